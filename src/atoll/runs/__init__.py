"""A run from its description to its folder: Run, what builds live objects from it, checkpoints, and what carries it out."""
