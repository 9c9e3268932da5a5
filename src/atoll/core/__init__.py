"""What every other package stands on: trees of tensors over one buffer, the protocols of the seam, events, errors."""
