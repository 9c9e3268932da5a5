"""One island's copy of the model: local training, flat parameters, master weights, micro-batches."""
