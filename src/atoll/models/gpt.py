"""One decoder-only transformer, small enough to hold in the head.

Tokens become vectors; each block lets every position look back (attention) and then think alone (feed-forward), both added onto
the stream; what comes out is compared with every token of the vocabulary. RMSNorm before each half, rotary positions, GELU,
no biases, no dropout.

    letter   B       T           V            W       H       D
    means    batch   positions   vocabulary   width   heads   head_size

The attention's inner width is `heads * head_size` and need not be `width`: the DiLoCo paper's models have 16 heads of 64 at
width 896. `GPT` is the config. It builds a `Decoder`, the module:

>>> decoder = GPT.tiny().build(vocab_size=257, seq_len=64, seed=0)
>>> decoder(torch.zeros(2, 10, dtype=torch.int64)).shape
torch.Size([2, 10, 257])
>>> f"{GPT.m150().num_params(32_000) / 1e6:.1f}M"
'149.8M'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError

INIT_STD = 0.02
NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class GPT:
    """The shape of a decoder.

    Args:
        layers: blocks of attention and feed-forward.
        width: size of the vector at each position.
        heads: attention heads.
        head_size: size of each head; even, because rotary positions turn it pair by pair.
        ffn_multiple: inner width of the feed-forward part, in widths.
        tied: whether the output projection is the embedding itself.
        rope_base: the slowest rotary frequency turns once in about 2 pi times this many positions.
        vocab_size: rows of the embedding. None: the tokenizer's. A larger number pads it, as the papers' 32,000 does for bytes.
    """

    layers: int
    width: int
    heads: int
    head_size: int
    ffn_multiple: int = 4
    tied: bool = True
    rope_base: float = 10_000.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("layers", "width", "heads", "head_size", "ffn_multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: a decoder needs at least 1. GPT.tiny() is a shape that works.")
        if self.head_size % 2:
            raise ConfigError(f"head_size={self.head_size} is odd: rotary positions turn pairs of numbers. Use an even head_size.")
        if not self.rope_base > 1:
            raise ConfigError(f"rope_base={self.rope_base} must be above 1: frequencies fall from 1 to 1/rope_base. Use 10000.")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size={self.vocab_size}: use a positive number, or None for the tokenizer's own.")

    def build(self, vocab_size: int, seq_len: int, seed: int) -> Decoder:
        """A decoder on the CPU in float32. The same arguments give the same weights, and the global RNG is neither read nor moved.

        Args:
            vocab_size: how many ids the tokenizer has.
            seq_len: the most positions the decoder looks at.
            seed: of the initial weights.
        """
        if seq_len < 1:
            raise ConfigError(f"seq_len={seq_len}: a decoder needs at least 1 position.")
        decoder = Decoder(self, used_vocab=vocab_size, padded_vocab=self._rows(vocab_size), seq_len=seq_len)
        decoder.reset(torch.Generator().manual_seed(seed))
        return decoder

    def num_params(self, vocab: int) -> int:
        """Trainable parameters with a tokenizer of `vocab` ids; nothing is built."""
        attention = 4 * self.width * self.heads * self.head_size
        feed_forward = 2 * self.ffn_multiple * self.width**2
        tables = (1 if self.tied else 2) * self._rows(vocab) * self.width
        return tables + self.layers * (attention + feed_forward + 2 * self.width) + self.width

    def _rows(self, vocab: int) -> int:
        if vocab < 1:
            raise ConfigError(f"the tokenizer's vocab_size={vocab}: at least 1 id is needed.")
        if self.vocab_size is not None and self.vocab_size < vocab:
            raise ConfigError(
                f"GPT.vocab_size={self.vocab_size} is smaller than the tokenizer's {vocab} ids. "
                f"Raise it to {vocab} or more, or leave it None to take the tokenizer's."
            )
        return self.vocab_size or vocab

    @staticmethod
    def tiny() -> GPT:
        """68,000 parameters on bytes: for tests and laptops."""
        return GPT(layers=2, width=48, heads=4, head_size=12)

    @staticmethod
    def m20() -> GPT:
        """The asynchronous Local-SGD paper's 20M (21.1M parameters at a vocabulary of 32,000)."""
        return GPT(layers=6, width=256, heads=4, head_size=64, tied=False)

    @staticmethod
    def m60() -> GPT:
        """The DiLoCo paper's 60M (58.96M parameters at a vocabulary of 32,000)."""
        return GPT(layers=3, width=896, heads=16, head_size=64)

    @staticmethod
    def m150() -> GPT:
        """The DiLoCo paper's 150M (149.8M parameters at a vocabulary of 32,000)."""
        return GPT(layers=12, width=896, heads=16, head_size=64)

    @staticmethod
    def m400() -> GPT:
        """The DiLoCo paper's 400M (388.9M parameters at a vocabulary of 32,000)."""
        return GPT(layers=12, width=1536, heads=12, head_size=128)


class Decoder(nn.Module):
    """The module that `GPT.build` makes. See the top of this file."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPT, *, used_vocab: int, padded_vocab: int, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.used_vocab = used_vocab
        self.seq_len = seq_len
        self.embedding = Embedding(padded_vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = None if config.tied else Linear(config.width, padded_vocab, bias=False)
        cos, sin = rotary_tables(seq_len, config.head_size, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw all weights anew. What is added onto the stream starts smaller, so that depth does not widen it."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            added = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            scale = 1 / math.sqrt(2 * self.config.layers) if added else 1.0
            parameter.normal_(0.0, INIT_STD * scale, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each of `tokens` (B, T)."""
        hidden = self.features(tokens)
        return F.linear(hidden, self.embedding.weight) if self.head is None else cast(Tensor, self.head(hidden))

    def features(self, tokens: Tensor) -> Tensor:
        """Hidden states (B, T, W) after the last block and norm."""
        length = tokens.shape[1]
        if length > self.seq_len:
            raise ConfigError(
                f"{length} positions were given to a decoder of seq_len={self.seq_len}. Give fewer, or build a longer one."
            )
        cos, sin = self.cos[:length], self.sin[:length]  # (T, D)
        stream = self.embedding(tokens)  # (B, T, W)
        for block in self.blocks:
            stream = block(stream, cos, sin)
        return cast(Tensor, self.norm(stream))

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of predicting each of `tokens` (B, T+1) but the first from those before it."""
        logits = self(tokens[:, :-1]).float()  # (B, T, V); of a decoder in half precision too: a loss has more than two digits
        if torch.compiler.is_compiling():
            return _fused_cross_entropy(logits, tokens[:, 1:])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt_tokens: Tensor,
        count: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The prompt and `count` more tokens: (B, T + count) for a prompt of (B, T), or (T + count,) for one of (T,).

        The decoder sees at most the last `seq_len` tokens, as in training, so that it may go on for as long as it likes.

        Args:
            prompt_tokens: one row of tokens, or several of the same length; at least one token each.
            count: how many tokens to add.
            temperature: below 1 is bolder; 0 always takes the likeliest token.
            top_k: draw among this many likeliest tokens; None: among all.
            generator: for the draws; None: torch's global one.
        """
        _check_sampling(prompt_tokens, count, temperature, top_k)
        tokens = prompt_tokens.view(-1, prompt_tokens.shape[-1])  # (B, T)
        for _ in range(count):
            # The last position alone goes through the head; padded rows of the vocabulary mean nothing, so they are never drawn.
            last = self.features(tokens[:, -self.seq_len :])[:, -1]  # (B, W)
            table = self.embedding.weight if self.head is None else self.head.weight
            logits = F.linear(last, table[: self.used_vocab]).float()  # (B, V)
            tokens = torch.cat((tokens, _draw(logits, temperature, top_k, generator)), dim=1)
        return tokens if prompt_tokens.ndim == 2 else tokens[0]


class Block(nn.Module):
    """Attention, then feed-forward, each added onto the stream."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, stream: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        stream = stream + self.attention(self.attention_norm(stream), cos, sin)
        return cast(Tensor, stream + self.feed_forward(self.feed_forward_norm(stream)))


class Attention(nn.Module):
    """Each position looks at itself and at those before it."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.heads, self.head_size = config.heads, config.head_size
        self.qkv = Linear(config.width, 3 * config.heads * config.head_size, bias=False)
        self.out = Linear(config.heads * config.head_size, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3 * self.heads, self.head_size)  # (B, T, 3H, D)
        qk, v = qkv.split([2 * self.heads, self.heads], dim=2)
        qk = rotate(qk, cos[:, None], sin[:, None]).to(v.dtype)  # queries and keys turn together: one pass over both
        q, k = qk.transpose(1, 2).chunk(2, dim=1)  # (B, H, T, D) each
        mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)  # (B, H, T, D)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))  # (B, T, W)


class FeedForward(nn.Module):
    """Each position on its own: widen, bend, narrow."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.up = Linear(config.width, config.ffn_multiple * config.width, bias=False)
        self.down = Linear(config.ffn_multiple * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.gelu(self.up(x))))  # exact GELU: on CPU it is faster than the tanh form


class Linear(nn.Linear):
    """A matrix without values: torch would draw them from the global RNG, and `Decoder.reset` draws them anyway."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """A table without values, for the same reason."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Scales each vector to unit mean square, then by a learnt gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


def rotary_tables(seq_len: int, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (T, D) of the angle by which each position turns each pair (d, d + D/2) of a head."""
    half = head_size // 2
    speed = base ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(seq_len, dtype=torch.float64)[:, None] * speed  # (T, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=1).float(), torch.cat((-sin, sin), dim=1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (a, b) of the last dimension to (a cos - b sin, b cos + a sin).

    Positions are angles, and a query and a key score by the angle between them: only their distance counts.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _fused_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits (B, T, V), in a form of which a compiler leaves nothing but two passes over the logits.

    The usual form looks targets up, and its gradient is scattered into zeros: under vmap a buffer of its own, in single precision
    and as large as the logits. A comparison with each position is computed in passing."""
    positions = torch.arange(logits.shape[-1], device=logits.device)
    chosen = torch.where(positions == targets.unsqueeze(-1), logits, 0.0).sum(-1)
    return (torch.logsumexp(logits, -1) - chosen).mean()


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token (B, 1) for each row of logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, ids = torch.topk(logits, min(top_k or logits.shape[-1], logits.shape[-1]))
    chosen = torch.multinomial(torch.softmax(likeliest / temperature, dim=-1), 1, generator=generator)
    return ids.gather(1, chosen)


def _check_sampling(prompt: Tensor, count: int, temperature: float, top_k: int | None) -> None:
    if prompt.ndim not in (1, 2) or prompt.numel() == 0:
        raise ConfigError(
            f"a prompt of shape {tuple(prompt.shape)}: give (tokens,) or (rows, tokens), at least 1 token to go on from."
        )
    if count < 0:
        raise ConfigError(f"count={count}: a prompt can be continued by 0 tokens or more.")
    if not temperature >= 0:
        raise ConfigError(
            f"temperature={temperature} must be 0 (always the likeliest token) or more; 1 draws as the model predicts."
        )
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k} leaves nothing to draw from. Use 1 or more, or None for all tokens.")
