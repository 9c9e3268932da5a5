"""Models: a decoder-only transformer with the papers' sizes as presets, a one-layer MLP, and Hugging Face models from disk."""
