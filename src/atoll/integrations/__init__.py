"""Callbacks that make a Trainer of Hugging Face (extra `hf`) or Lightning (extra `lightning`) an island of `atoll.islands`."""
