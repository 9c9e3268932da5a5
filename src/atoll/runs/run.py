"""Run: a whole experiment as one frozen value, which holds all that decides a figure. A recipe is a function that returns one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.async_scheduler import dynamic_steps
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import FSDP, ZeRO1
from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm, AsyncAlgorithm, Correction, Rebases, Rule
from atoll.data.gaussians import Gaussians
from atoll.data.instructions import Instructions
from atoll.data.text import Text
from atoll.models.gpt import GPT
from atoll.models.mlp import MLP
from atoll.models.pretrained import Pretrained
from atoll.optim.adam import Adam, AdamW
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.schedules import WSD, Cosine
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.optim.staleness import DelayCompensation, Polynomial
from atoll.replica.local_replica import InnerRule
from atoll.runs.cluster import Cluster
from atoll.runs.two_level import check_inside
from atoll.runs.validation import check_habits, check_lines, check_pieces, check_stacked, check_warmup

S = TypeVar("S")


class TrainsDevices(Algorithm[S], Rebases[S], Protocol[S]):
    """What can train the devices of one island: an algorithm that can go on from weights which islands agreed on."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How each island trains.

    Args:
        steps: inner steps per island after the warm start; a multiple of the steps of a round. In asynchronous runs, where fast
            islands take more of them, the mean over the islands, and any number.
        batch_size: sequences (or points) per inner step and island; per device, where an island has several.
        micro_batches: into how many pieces a batch is cut to save memory; the result is the same within rounding.
        clip_norm: gradients longer than this are shortened to it; none leaves them.
        warm_start_steps: steps of plain training, by one island, before the clock starts. 0 starts from scratch.
        warm_start_lr: its learning rate, after a warm-up; none takes the peak of the run's schedule.
        device: cpu, cuda, or auto for cuda where there is one.
        precision: fp32; bf16 for a forward pass in bfloat16 (on CUDA); or all-bf16 for a module that is bfloat16 itself, weights,
            gradients and activations, beside masters and moments in fp32.
        compile: pass the loss through torch.compile.
        together: whether the simulated islands of one GPU compute stacked in one pass, one after the other (`apart`), or whichever
            is measured to be faster (`auto`). On a CPU `auto` is a thread for each.
        fresh_optimizer: forget the inner optimizer's moments at the beginning of every round.
        peak_first: take the first step of every round at the schedule's highest rate.
    """

    steps: int
    batch_size: int
    micro_batches: int = 1
    clip_norm: float | None = 1.0
    warm_start_steps: int = 0
    warm_start_lr: float | None = None
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    precision: Literal["fp32", "bf16", "all-bf16"] = "fp32"
    compile: bool = False
    together: Literal["auto", "stacked", "apart"] = "auto"
    fresh_optimizer: bool = False
    peak_first: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "batch_size", "micro_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name}={getattr(self, name)}: it is at least 1. Give a positive number.")
        if self.warm_start_steps < 0:
            raise ConfigError(f"train.warm_start_steps={self.warm_start_steps}: it is 0 or more. Use 0 to start from scratch.")
        if self.warm_start_lr is not None and not self.warm_start_lr > 0:
            raise ConfigError(f"train.warm_start_lr={self.warm_start_lr}: it is more than 0. Use none for the schedule's peak.")
        if self.micro_batches > self.batch_size:
            raise ConfigError(
                f"train.micro_batches={self.micro_batches} is more than train.batch_size={self.batch_size}: "
                f"a piece holds at least one example. Lower micro_batches."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"train.clip_norm={self.clip_norm}: it is more than 0. Use none to clip nothing.")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What is kept of a run while it goes on. Intervals are in inner steps per island: rounded to whole rounds, or, with a hub,
    up to the arrival that completes them.

    Args:
        evaluate_every: inner steps between evaluations; the first and the last weights are always evaluated.
        save_every: inner steps between checkpoints; the last round is always saved.
        checkpoints: how many of the newest are kept.
        tensorboard: also write TensorBoard files.
    """

    evaluate_every: int = 100
    save_every: int = 100
    checkpoints: int = 2
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("evaluate_every", "save_every", "checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"keep.{name}={getattr(self, name)}: it is at least 1. Give a positive number.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole experiment.

    Args:
        recipe: the name it goes by.
        model: what is trained: a decoder, a perceptron, or a pretrained model.
        data: what it reads: text for a decoder, points for a perceptron, instructions for a pretrained model.
        algorithm: how islands work together.
        optimizer: the inner rule; gradient algorithms such as DDP use it too, unless they have one of their own.
        train: how each island trains.
        cluster: the islands and the lines between them.
        keep: evaluations and checkpoints.
        seed: of weights, data order and everything the cluster draws.
        inside: how the devices of an island work together, between two agreements of islands. None: where an island has several
            devices, all of them are equals, as if each were an island.
    """

    recipe: str
    model: GPT | MLP | Pretrained
    data: Text | Gaussians | Instructions
    algorithm: Algorithm[Any] | AsyncAlgorithm[Any]
    optimizer: InnerRule
    train: Train
    cluster: Cluster = Cluster()
    keep: Keep = Keep()
    seed: int = 0
    inside: TrainsDevices[Any] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.seed < 2**48:
            raise ConfigError(f"seed={self.seed} is outside [0, 2**48). Use a smaller number.")
        if self.train.precision == "bf16" and self.train.device == "cpu":
            raise ConfigError(
                "train.precision=bf16 with train.device=cpu: casting on the way forward is for CUDA. Use fp32, all-bf16 for a "
                "module that is bfloat16 itself, or device=auto or cuda."
            )
        self._check_pair()
        self._check_together()
        if isinstance(self.algorithm, AsyncAlgorithm):
            self.cluster.check_asynchronous()
            speeds, islands = self.algorithm.plan.speeds, self.world.islands
            if speeds and len(speeds) != islands:
                each = self.cluster.devices_per_island
                devices = f" of {each} devices, which are islands here" if each > 1 else ""
                raise ConfigError(
                    f"algorithm.speeds has {len(speeds)} figures for cluster.islands={self.cluster.islands}{devices}: give one per "
                    f"island, or leave it empty to take the cluster's."
                )
            return
        self.cluster.check_synchronous()
        per_round = self.algorithm.steps_per_round
        if self.train.steps % per_round:
            fit = max(1, round(self.train.steps / per_round)) * per_round
            raise ConfigError(
                f"train.steps={self.train.steps} is not a multiple of the {per_round} inner steps of a round: the last round would "
                f"be cut short. Use train.steps={fit}, or another length of a round."
            )

    def _check_pair(self) -> None:
        pairs = ((GPT, Text), (MLP, Gaussians), (Pretrained, Instructions))
        if any(isinstance(self.model, model) and isinstance(self.data, data) for model, data in pairs):
            return
        fit = [f"data={data.__name__}" for model, data in pairs if isinstance(self.model, model)]
        fit += [f"model={model.__name__}(...)" for model, data in pairs if isinstance(self.data, data)]
        raise ConfigError(
            f"model is {type(self.model).__name__} and data is {type(self.data).__name__}: a GPT reads Text, an MLP reads "
            f"Gaussians, and a Pretrained reads Instructions. Set {', or '.join(fit)}."
        )

    def _check_together(self) -> None:
        if self.inside is not None:
            check_inside(self.algorithm, self.inside)
        check_habits(self.algorithm, self.inside, self.train)
        check_stacked(self.train)
        check_lines(self.cluster, self.inside)
        for at, algorithm in (("algorithm", self.algorithm), ("inside", self.inside)):
            check_pieces(algorithm, at, self.train)
            check_warmup(algorithm, at, self.train)

    @property
    def world(self) -> Cluster:
        """The cluster as the algorithm between islands sees it: without an algorithm inside, every device is an island."""
        return self.cluster if self.inside is not None else self.cluster.apart(self.seed)

    @property
    def _asynchronous(self) -> bool:
        return isinstance(self.algorithm, AsyncAlgorithm)

    @property
    def shards(self) -> int:
        """Into how many the data are cut."""
        return self.data.shards or self.cluster.devices

    @property
    def schedule_steps(self) -> int:
        """How long a learning-rate schedule is that was left open."""
        if isinstance(self.algorithm, AsyncAlgorithm):  # the position follows the shard, on which all islands' steps are spread
            return max(1, self.train.steps * self.world.islands // self.shards)
        return self.train.steps

    @property
    def resolved(self) -> Run:
        """The run with nothing left open: schedules as long as the run, and the algorithm with the run's optimizer and clipping."""
        with _named(
            "optimizer", f"train.steps * islands / shards = {self.schedule_steps}" if self._asynchronous else "train.steps"
        ):
            optimizer = with_steps(self.optimizer, self.schedule_steps)
        algorithm = self._filled(self.algorithm, "algorithm", optimizer, self._outer_steps())
        inside = None
        if self.inside is not None:
            rounds = self.train.steps // self.inside.steps_per_round
            inside = self._filled(self.inside, "inside", optimizer, rounds)
        return replace(self, data=self._resolved_data(), optimizer=optimizer, algorithm=algorithm, inside=inside)

    def _filled(self, algorithm: Any, name: str, optimizer: InnerRule, rounds: int) -> Any:
        """The algorithm with the run's optimizer and clipping where it has none, its clock, and schedules of so many rounds."""
        filled: dict[str, Any] = {}
        for field in fields(algorithm):
            value = getattr(algorithm, field.name)
            if value is None and field.name in ("optimizer", "clip_norm"):
                filled[field.name] = optimizer if field.name == "optimizer" else self.train.clip_norm
            elif value is None and field.name == "clock" and isinstance(algorithm, ACCO):
                filled[field.name] = algorithm.ticks
            else:
                with _named(f"{name}.{field.name}", f"{rounds} {'arrivals' if self._asynchronous else 'rounds'}"):
                    filled[field.name] = with_steps(value, rounds)
        return replace(algorithm, **filled)

    def _resolved_data(self) -> Text | Gaussians | Instructions:
        """A pretrained model brings its own tokenizer, unless there is another."""
        if isinstance(self.model, Pretrained) and isinstance(self.data, Instructions) and self.data.tokenizer is None:
            return replace(self.data, tokenizer=self.model.path)
        return self.data

    def rounds(self, steps: int) -> int:
        """So many inner steps in rounds: at least one."""
        algorithm = self.algorithm
        return max(1, steps // (algorithm.plan.steps if isinstance(algorithm, AsyncAlgorithm) else algorithm.steps_per_round))

    def _outer_steps(self) -> int:
        """How often an algorithm's own rules are asked: once a round, and in asynchronous runs at every arrival, of which there are
        the more the fewer steps slow islands take."""
        if not isinstance(self.algorithm, AsyncAlgorithm):
            return self.rounds(self.train.steps)
        plan, world = self.algorithm.plan, self.world
        speeds = [1 / world.step_time(island, self.seed) for island in range(world.islands)]
        pace = speeds if plan.pace == "measured" or not plan.speeds else plan.speeds
        steps = [plan.steps if plan.pace == "even" else dynamic_steps(v, max(pace), plan.steps) for v in pace]
        arrivals_per_update = sum(v / n for v, n in zip(speeds, steps, strict=True)) / sum(speeds)
        return max(1, round(self.train.steps * world.islands * arrivals_per_update))


def device_of(run: Run) -> str:
    """Where the run computes."""
    if run.train.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if run.train.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch sees no CUDA device. Use train.device=cpu, or auto.")
    return run.train.device


def dtype_of(run: Run) -> torch.dtype | None:
    """What the module's parameters are cast to; none leaves them."""
    return torch.bfloat16 if run.train.precision == "all-bf16" else None


def precision_notice(run: Run) -> str | None:
    """That this machine computes in fp32 although bf16 was asked for, in one line; none where it does not."""
    if run.train.precision != "bf16" or device_of(run) != "cpu":
        return None
    return f"train.precision=bf16: ignored, since train.device={run.train.device} finds no CUDA device here. It computes in fp32."


@contextmanager
def _named(at: str, steps: str) -> Iterator[None]:
    """Says whose schedule does not fit, and how long the run makes it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{at}: its schedule is as long as the run ({steps}). {error}") from error


def with_steps(rule: Any, steps: int) -> Any:
    """The rule with a schedule that is open about its length made this long, also in a rule that it wraps."""
    if not is_dataclass(rule) or isinstance(rule, type):
        return rule
    steps = max(1, steps // _arrivals_per_step(rule))
    changed: dict[str, Any] = {}
    for name, value in ((field.name, getattr(rule, field.name)) for field in fields(rule)):
        if name == "lr" and isinstance(value, Cosine | WSD) and value.steps is None:
            changed[name] = replace(value, steps=steps)
        elif name == "rule":
            changed[name] = with_steps(value, steps)
    return replace(rule, **changed) if changed else rule


def _arrivals_per_step(rule: Any) -> int:
    """Some rules go on along their schedule only once in several gradients."""
    return rule.period if isinstance(rule, DelayedNesterov) else rule.size if isinstance(rule, Buffered) else 1


_CANDIDATES: Mapping[Any, Sequence[type]] = {
    Algorithm: (DDP, ZeRO1, FSDP, ACCO, DPU, WP, DiLoCo),
    TrainsDevices: (DDP, ZeRO1, FSDP, ACCO, DPU, WP),
    AsyncAlgorithm: (AsyncLocalSGD,),
    Rule: (SGD, Momentum, Nesterov, Adam, AdamW, DelayedNesterov, Buffered),
    Correction: (Polynomial, DelayCompensation),
}


def candidates(protocol: Any) -> Sequence[type]:
    """What can be named on the command line where a Run asks for an algorithm, a rule or a correction."""
    return _CANDIDATES.get(protocol, ())
