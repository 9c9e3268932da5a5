"""Islands that are processes, on torch.distributed."""
