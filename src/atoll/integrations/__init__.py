"""Other people's training loops: callbacks for Hugging Face's Trainer and for Lightning, on top of `atoll.islands`.

`hf` needs the extra `hf`, `lightning` the extra `lightning`.
"""
