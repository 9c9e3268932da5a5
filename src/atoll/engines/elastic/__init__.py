"""Islands that come and go: membership by torchft, weights by our own wire, and a commit that all who are there agree on."""
