"""The decoder: sizes of the papers, causality, relative positions, seeds, and what engines do to it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.models.gpt import GPT, Decoder, rotary_tables, rotate

torch.set_num_threads(1)

SMALL = GPT(layers=2, width=24, heads=3, head_size=10)


def small(seed: int = 0, seq_len: int = 16, config: GPT = SMALL, vocab_size: int = 31) -> Decoder:
    return config.build(vocab_size=vocab_size, seq_len=seq_len, seed=seed)


def some_tokens(*shape: int, vocab_size: int = 31, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("config", "millions"),
    [(GPT.m20(), 21.1), (GPT.m60(), 58.9), (GPT.m150(), 149.8), (GPT.m400(), 388.9)],
    ids=["m20", "m60", "m150", "m400"],
)
def test_presets_have_the_papers_sizes_at_a_vocabulary_of_32000(config: GPT, millions: float):
    gains = (2 * config.layers + 1) * config.width  # the table leaves out the norms
    assert round((config.num_params(32_000) - gains) / 1e6, 1) == millions


@pytest.mark.parametrize("config", [SMALL, GPT(layers=1, width=8, heads=2, head_size=6, ffn_multiple=3, tied=False), GPT.tiny()])
def test_num_params_counts_what_build_makes(config: GPT):
    assert config.num_params(31) == sum(p.numel() for p in small(config=config).parameters())


def test_changing_a_later_token_leaves_earlier_logits_unchanged():
    decoder, tokens = small(), some_tokens(2, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 31
    before, after = decoder(tokens), decoder(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotary_scores_depend_on_distance_only():
    cos, sin = rotary_tables(64, 10, 10_000.0)
    query, key = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    score = lambda i, j: torch.dot(rotate(query, cos[i], sin[i]), rotate(key, cos[j], sin[j]))  # noqa: E731
    torch.testing.assert_close(score(5, 2), score(45, 42))
    assert not torch.allclose(score(5, 2), score(5, 3))


def test_rotation_keeps_lengths_and_position_zero_does_not_turn():
    cos, sin = rotary_tables(8, 10, 10_000.0)
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[0], x[0])


def test_the_order_of_tokens_matters():
    decoder = small()
    with torch.no_grad():  # make attention strong enough to show
        for block in decoder.blocks:
            block.attention.out.weight.mul_(20)
    one, two = decoder(torch.tensor([[1, 2, 3]])), decoder(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(one[:, -1], two[:, -1])


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    one, same, other = small(seed=3), small(seed=3), small(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_building_neither_reads_nor_moves_the_global_rng():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = small()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(one.embedding.weight, small().embedding.weight)


def test_projections_into_the_residual_stream_start_smaller():
    decoder = GPT(layers=8, width=64, heads=4, head_size=16).build(vocab_size=500, seq_len=8, seed=0)
    block = decoder.blocks[0]
    assert float(decoder.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.attention.qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.attention.out.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert float(block.feed_forward.down.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert torch.equal(block.attention_norm.weight, torch.ones(64))


def test_tied_shares_one_parameter_and_untied_has_two():
    tied, untied = small(), small(config=GPT(layers=1, width=8, heads=2, head_size=4, tied=False))
    assert sum(p.shape[0] == 31 for p in tied.parameters()) == 1
    assert sum(p.shape[0] == 31 for p in untied.parameters()) == 2
    tied.loss(some_tokens(2, 9)).backward()
    assert tied.embedding.weight.grad is not None


def test_the_loss_of_a_fresh_decoder_is_near_that_of_guessing():
    assert small().loss(some_tokens(4, 17)).item() == pytest.approx(math.log(31), abs=0.1)


def test_loss_is_the_cross_entropy_of_the_next_token():
    decoder, tokens = small(), some_tokens(2, 9)
    chances = torch.log_softmax(decoder(tokens[:, :-1]), dim=-1)
    expected = -chances.gather(2, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(decoder.loss(tokens), expected)


def test_a_few_steps_learn_a_repeating_text():
    decoder, tokens = small(), torch.arange(17)[None] % 4
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        decoder.loss(tokens).backward()
        optimizer.step()
    assert float(decoder.loss(tokens).detach()) < 0.1
    assert decoder.generate(tokens[:, :4], count=30, temperature=0)[0].tolist() == [i % 4 for i in range(34)]


def test_features_are_the_hidden_states_that_the_head_reads():
    decoder, tokens = small(), some_tokens(2, 9)
    features = decoder.features(tokens)
    assert features.shape == (2, 9, 24)
    assert torch.equal(features @ decoder.embedding.weight.T, decoder(tokens))


def test_more_positions_than_the_decoder_has_are_refused():
    with pytest.raises(ConfigError, match=r"17 positions.*seq_len=16"):
        small()(some_tokens(1, 17))


def test_generate_continues_beyond_seq_len_and_sees_only_the_last_window():
    decoder = small(seq_len=8)
    first = decoder.generate(some_tokens(1, 20), count=5, temperature=0)
    second = decoder.generate(first[:, 12:20], count=5, temperature=0)
    assert first.shape == (1, 25)
    assert torch.equal(first[:, 20:], second[:, 8:])


def test_a_prompt_of_one_row_may_leave_out_the_row():
    decoder, prompt = small(), some_tokens(1, 4)
    assert torch.equal(decoder.generate(prompt[0], 6, temperature=0), decoder.generate(prompt, 6, temperature=0)[0])


def test_generate_draws_from_its_generator_and_keeps_the_prompt():
    decoder, prompt = small(), some_tokens(3, 4)
    draw = lambda seed: decoder.generate(prompt, 12, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert torch.equal(draw(0)[:, :4], prompt)


def test_drawing_from_the_single_likeliest_token_is_greedy():
    decoder, prompt = small(), some_tokens(2, 4)
    greedy = decoder.generate(prompt, 6, temperature=0)
    assert torch.equal(decoder.generate(prompt, 6, temperature=2.0, top_k=1), greedy)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_pad_the_vocabulary_are_never_drawn(tied: bool):
    config = GPT(layers=1, width=8, heads=2, head_size=4, vocab_size=64, tied=tied)
    decoder = config.build(vocab_size=3, seq_len=8, seed=0)
    assert decoder(some_tokens(1, 2, vocab_size=3)).shape == (1, 2, 64)
    assert int(decoder.generate(torch.zeros(4, 1, dtype=torch.int64), 50).max()) < 3


def test_compiled_and_eager_agree():
    """Within rounding: the loss has another form where it is compiled."""
    decoder, tokens = small(), some_tokens(2, 17)
    compiled = torch.compile(decoder.loss, backend="eager", fullgraph=True)
    loss = compiled(tokens)
    loss.backward()
    gradient = decoder.embedding.weight.grad.clone()
    decoder.zero_grad()
    eager = decoder.loss(tokens)
    eager.backward()
    torch.testing.assert_close(loss, eager, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, decoder.embedding.weight.grad, rtol=1e-5, atol=1e-7)


def test_parameters_may_live_in_one_flat_buffer():
    plain, flattened, tokens = small(), small(), some_tokens(2, 17)
    flat = torch.cat([p.detach().flatten() for p in flattened.parameters()])
    at = 0
    for parameter in flattened.parameters():
        parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    assert torch.equal(flattened.loss(tokens), plain.loss(tokens))
    flat.mul_(0.5)
    assert not torch.equal(flattened.loss(tokens), plain.loss(tokens))


def test_half_precision_under_autocast_stays_near_full_precision():
    decoder, tokens = small(), some_tokens(2, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = decoder.loss(tokens)
    half.backward()
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, decoder.loss(tokens), rtol=0.01, atol=0.01)


def test_rotary_tables_are_not_saved():
    assert not [name for name in small().state_dict() if name in ("cos", "sin")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"width": -4}, "width=-4"),
        ({"heads": 0}, "heads=0"),
        ({"head_size": 0}, "head_size=0"),
        ({"ffn_multiple": 0}, "ffn_multiple=0"),
        ({"head_size": 7}, "head_size=7 is odd.*even"),
        ({"rope_base": 0.0}, "rope_base=0.0"),
        ({"rope_base": math.nan}, "rope_base=nan"),
        ({"vocab_size": 0}, "vocab_size=0.*none"),
    ],
)
def test_impossible_shapes_are_refused_with_advice(fields: dict[str, float], message: str):
    shape = {"layers": 1, "width": 8, "heads": 2, "head_size": 4}
    with pytest.raises(ConfigError, match=message):
        GPT(**(shape | fields))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    with pytest.raises(ConfigError, match=r"vocab_size=100 is smaller than the tokenizer's 257.*None"):
        GPT(layers=1, width=8, heads=2, head_size=4, vocab_size=100).build(vocab_size=257, seq_len=8, seed=0)


@pytest.mark.parametrize(("vocab_size", "seq_len"), [(0, 8), (10, 0)])
def test_an_empty_prompt_or_an_empty_context_is_refused(vocab_size: int, seq_len: int):
    with pytest.raises(ConfigError):
        SMALL.build(vocab_size=vocab_size, seq_len=seq_len, seed=0)


@pytest.mark.parametrize(
    ("count", "temperature", "top_k", "message"),
    [(-1, 1.0, None, "count=-1"), (1, -0.5, None, "temperature=-0.5"), (1, math.nan, None, "nan"), (1, 1.0, 0, "top_k=0")],
)
def test_impossible_draws_are_refused(count: int, temperature: float, top_k: int | None, message: str):
    with pytest.raises(ConfigError, match=message):
        small().generate(some_tokens(1, 3), count, temperature, top_k)


@pytest.mark.parametrize("shape", [(1, 2, 3), (0,), (1, 0)])
def test_a_prompt_without_rows_or_tokens_is_refused(shape: tuple[int, ...]):
    with pytest.raises(ConfigError, match="prompt of shape"):
        small().generate(torch.zeros(shape, dtype=torch.int64), 1)
