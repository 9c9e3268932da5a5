"""A decoder has the same logits as transformers' Arcee with its config and its weights."""

from __future__ import annotations

import pytest
import torch
from transformers import ArceeConfig, ArceeForCausalLM

from atoll.models.arcee import arcee_config, arcee_loads, from_arcee, to_arcee
from atoll.models.gpt import GPT

TOKENS = torch.arange(96).view(3, 32)
SHAPES = [
    GPT(layers=2, width=24, heads=2, head_size=12),
    GPT(layers=1, width=24, heads=2, head_size=8, tied=False, vocab_size=120, rope_base=500.0, ffn_multiple=3),
    GPT(layers=2, width=16, heads=4, head_size=10, vocab_size=128),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_same_logits_and_number_of_parameters(shape):
    ours = shape.build(100, 32, seed=0).eval()
    for norm in (parameter for name, parameter in ours.named_parameters() if "norm" in name):
        norm.data.normal_(1.0, 0.2, generator=torch.Generator().manual_seed(1))
    theirs = ArceeForCausalLM(ArceeConfig(**arcee_config(ours, end_of_text=None))).eval()
    missing, unexpected = theirs.load_state_dict(to_arcee(ours.state_dict()), strict=False)
    assert set(missing) <= ({"lm_head.weight"} if shape.tied else set())
    assert not unexpected
    theirs.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), atol=1e-5, rtol=0)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == shape.num_params(100)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_weights_come_back_bit_for_bit(shape):
    ours = shape.build(100, 32, seed=0).state_dict()
    again = from_arcee(to_arcee(ours), shape.layers)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_all_presets_have_a_shape_that_transformers_takes():
    assert all(arcee_loads(preset()) for preset in (GPT.tiny, GPT.m20, GPT.m60, GPT.m150, GPT.m400))
    odd = GPT(layers=1, width=25, heads=2, head_size=8)
    assert not arcee_loads(odd)
    with pytest.raises(Exception, match="not a multiple"):
        ArceeConfig(**arcee_config(odd.build(8, 8, seed=0), end_of_text=None))
