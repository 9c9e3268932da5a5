"""A decoder as `ArceeForCausalLM` of transformers: its config, and its weights by that library's names.

Arcee has the same blocks: RMSNorm, rotary positions that rotate the halves of a head, feed-forward layers without a gate, and no
biases. Its activation is a setting, and queries, keys and values have three matrices instead of one. Nothing here needs the
library, which has Arcee since its version 4.53.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.models.gpt import GPT, INIT_STD, NORM_EPS, Decoder

_QKV = ("q_proj", "k_proj", "v_proj")
_OUTSIDE = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def arcee_loads(model: GPT) -> bool:
    """Whether transformers takes the decoder's shape. It checks that the width is a multiple of the heads, though with a head size
    of its own nothing depends on that."""
    return model.width % model.heads == 0


def arcee_config(decoder: Decoder, end_of_text: int | None) -> dict[str, Any]:
    """The contents of config.json."""
    model, vocabulary = decoder.config, decoder.embedding.weight.shape[0]
    return {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "vocab_size": vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_multiple * model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "head_dim": model.head_size,
        "hidden_act": "gelu",
        "max_position_embeddings": decoder.seq_len,
        "initializer_range": INIT_STD,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},  # since version 5
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }


def to_arcee(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a decoder by Arcee's names."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        _, number, inside = _in_block(name)
        if number is None:
            found[_OUTSIDE[name]] = tensor
        elif inside == "attention.qkv":
            parts = zip(_QKV, tensor.chunk(3), strict=True)
            found.update({f"model.layers.{number}.self_attn.{part}.weight": rows.contiguous() for part, rows in parts})
        else:
            found[f"model.layers.{number}.{_IN_BLOCK[inside]}.weight"] = tensor
    return found


def from_arcee(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The weights of a decoder by its own names. KeyError if one is missing."""
    found = {own: weights[theirs] for own, theirs in _OUTSIDE.items() if own != "head.weight" or theirs in weights}
    for number in range(layers):
        block = f"model.layers.{number}"
        qkv = [weights[f"{block}.self_attn.{part}.weight"] for part in _QKV]
        found[f"blocks.{number}.attention.qkv.weight"] = torch.cat(qkv)
        found |= {f"blocks.{number}.{own}.weight": weights[f"{block}.{theirs}.weight"] for own, theirs in _IN_BLOCK.items()}
    return found


def _in_block(name: str) -> tuple[str, str | None, str]:
    """`blocks`, the number and the layer in `blocks.NUMBER.LAYER.weight`; no number for other names."""
    parts = name.removesuffix(".weight").split(".", 2)
    return (parts[0], parts[1], parts[2]) if parts[0] == "blocks" else (name, None, "")
