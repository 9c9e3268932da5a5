"""A decoder-only transformer: RMSNorm before attention and feed-forward, rotary positions, GELU, no biases, no dropout.

    letter   B       T           V            W       H       D
    means    batch   positions   vocabulary   width   heads   head_size

The inner width of attention is `heads * head_size`, which may differ from `width`: the DiLoCo paper's models have 16 heads of 64 at
width 896. `GPT` is the config. It builds a `Decoder`, the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from atoll.core.config.type_checks import AtMost, LayerSize, check_positive, check_types
from atoll.core.errors import ConfigError

M = TypeVar("M", bound=nn.Module)
INIT_STD = 0.02
NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class GPT:
    """The shape of a decoder.

    Args:
        layers: blocks of attention and feed-forward.
        width: size of the residual stream.
        heads: attention heads per layer.
        head_size: size of each head; even, because rotary positions rotate pairs.
        ffn_multiple: hidden width of the feed-forward layers, in widths.
        tied: whether the output projection is the embedding.
        rope_base: the slowest rotary frequency has a period of about 2 pi times this many positions.
        vocab_size: rows of the embedding; none: the tokenizer's size. A larger number pads it.
    """

    layers: Annotated[int, AtMost(10_000)]
    width: LayerSize
    heads: LayerSize
    head_size: LayerSize
    ffn_multiple: Annotated[int, AtMost(1024)] = 4
    tied: bool = True
    rope_base: float = 10_000.0
    vocab_size: Annotated[int, AtMost(2**24)] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "layers", "width", "heads", "head_size", "ffn_multiple")
        if self.head_size % 2:
            raise ConfigError(f"head_size={self.head_size} is odd: rotary positions rotate pairs. Use an even head_size.")
        if not self.rope_base > 1:
            raise ConfigError(f"rope_base={self.rope_base} must be above 1: frequencies fall from 1 to 1/rope_base. Use 10000.")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size={self.vocab_size}: use a positive number, or none for the tokenizer's own.")

    def build(self, vocab_size: int, seq_len: int, seed: int) -> Decoder:
        """A decoder on the CPU in float32, for a tokenizer of `vocab_size` ids and up to `seq_len` positions.

        The same arguments give the same weights. The global RNG is not used.
        """
        if seq_len < 1:
            raise ConfigError(f"seq_len={seq_len}: a decoder needs at least 1 position.")
        decoder = Decoder(self, used_vocab=vocab_size, padded_vocab=self._padded_vocab(vocab_size), seq_len=seq_len)
        decoder.reset(torch.Generator().manual_seed(seed))
        return decoder

    def num_params(self, vocab: int) -> int:
        """Number of trainable parameters with a tokenizer of `vocab` ids, without building a module."""
        attention = 4 * self.width * self.heads * self.head_size
        feed_forward = 2 * self.ffn_multiple * self.width**2
        tables = (1 if self.tied else 2) * self._padded_vocab(vocab) * self.width
        return tables + self.layers * (attention + feed_forward + 2 * self.width) + self.width

    def _padded_vocab(self, vocab: int) -> int:
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
        """68,000 parameters with the byte tokenizer: for tests and laptops."""
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
    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPT, *, used_vocab: int, padded_vocab: int, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.used_vocab = used_vocab
        self.seq_len = seq_len
        self.embedding = _uninitialized(nn.Embedding, padded_vocab, config.width)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.head = None if config.tied else _uninitialized(nn.Linear, config.width, padded_vocab, bias=False)
        cos, sin = rotary_tables(seq_len, config.head_size, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw all weights. Projections into the residual stream start smaller by sqrt(2 * layers), so that its variance does not
        grow with depth."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            is_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            scale = 1 / math.sqrt(2 * self.config.layers) if is_residual else 1.0
            parameter.normal_(0.0, INIT_STD * scale, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token logits (B, T, V) for `tokens` (B, T)."""
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
        """Mean cross entropy, in nats, of predicting all `tokens` (B, T+1) but the first from those before them."""
        logits = self(tokens[:, :-1]).float()  # (B, T, V); float32 also for a decoder in half precision
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

        The decoder sees at most the last `seq_len` tokens, so `count` has no limit. A temperature of 0 always takes the likeliest
        token. `top_k` samples among that many likeliest tokens.
        """
        _check_sampling(prompt_tokens, count, temperature, top_k)
        tokens = prompt_tokens.view(-1, prompt_tokens.shape[-1])  # (B, T)
        for _ in range(count):
            # Only the last position goes through the head. Padding rows of the vocabulary have no meaning and are never sampled.
            last = self.features(tokens[:, -self.seq_len :])[:, -1]  # (B, W)
            table = self.embedding.weight if self.head is None else self.head.weight
            logits = F.linear(last, table[: self.used_vocab]).float()  # (B, V)
            tokens = torch.cat((tokens, _sample(logits, temperature, top_k, generator)), dim=1)
        return tokens if prompt_tokens.ndim == 2 else tokens[0]


class DecoderBlock(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.feed_forward = FeedForward(config)

    def forward(self, stream: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        stream = stream + self.attention(self.attention_norm(stream), cos, sin)
        return cast(Tensor, stream + self.feed_forward(self.feed_forward_norm(stream)))


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.heads, self.head_size = config.heads, config.head_size
        self.qkv = _uninitialized(nn.Linear, config.width, 3 * config.heads * config.head_size, bias=False)
        self.out = _uninitialized(nn.Linear, config.heads * config.head_size, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3 * self.heads, self.head_size)  # (B, T, 3H, D)
        qk, v = qkv.split([2 * self.heads, self.heads], dim=2)
        qk = rotate(qk, cos[:, None], sin[:, None]).to(v.dtype)  # one pass rotates queries and keys
        q, k = qk.transpose(1, 2).chunk(2, dim=1)  # (B, H, T, D) each
        mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)  # (B, H, T, D)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))  # (B, T, W)


class FeedForward(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.up = _uninitialized(nn.Linear, config.width, config.ffn_multiple * config.width, bias=False)
        self.down = _uninitialized(nn.Linear, config.ffn_multiple * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.gelu(self.up(x))))  # exact GELU: on CPU it is faster than the tanh form


def _uninitialized(kind: Callable[..., M], *sizes: int, **options: bool) -> M:
    """A layer whose weights `Decoder.reset` draws; torch would draw them from the global RNG."""
    return cast(M, skip_init(kind, *sizes, **options))  # type: ignore[no-untyped-call]


def rotary_tables(seq_len: int, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (T, D) of the angle by which each position rotates each pair (d, d + D/2) of a head."""
    half = head_size // 2
    speed = base ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(seq_len, dtype=torch.float64)[:, None] * speed  # (T, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=1).float(), torch.cat((-sin, sin), dim=1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (a, b) of the last dimension to (a cos - b sin, b cos + a sin).

    The score of a rotated query and key then depends on the distance of their positions alone.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _fused_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits (B, T, V), which a compiler fuses into two passes over the logits.

    The usual form gathers targets. Its gradient is a scatter into zeros, which under vmap needs a float32 buffer as large as the
    logits. A comparison with each position needs no buffer."""
    positions = torch.arange(logits.shape[-1], device=logits.device)
    chosen = torch.where(positions == targets.unsqueeze(-1), logits, 0.0).sum(-1)
    return (torch.logsumexp(logits, -1) - chosen).mean()


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token (B, 1) for each row of logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, ids = torch.topk(logits, min(top_k or logits.shape[-1], logits.shape[-1]))
    chosen = torch.multinomial(torch.softmax(likeliest / temperature, dim=-1), 1, generator=generator)
    return ids.gather(1, chosen)


def _check_sampling(prompt: Tensor, count: int, temperature: float, top_k: int | None) -> None:
    if prompt.ndim not in (1, 2) or prompt.numel() == 0:
        raise ConfigError(f"a prompt of shape {tuple(prompt.shape)}: give (tokens,) or (rows, tokens), with at least 1 token.")
    if count < 0:
        raise ConfigError(f"count={count}: the number of tokens to generate is 0 or more.")
    if not temperature >= 0:
        raise ConfigError(
            f"temperature={temperature} must be 0 (always the likeliest token) or more; 1 samples from the model's distribution."
        )
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k} leaves nothing to sample from. Use 1 or more, or None for all tokens.")
