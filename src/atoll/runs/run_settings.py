"""Run: an experiment as one frozen value, with every setting that decides a result. A recipe is a function that returns one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.async_scheduler import dynamic_steps
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.eager_updates import Eager
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import FSDP, ZeRO1
from atoll.core.config.type_checks import WideInt, check_positive, check_types
from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm, AsyncAlgorithm, Correction, Rebases, Rule
from atoll.data.gaussians import Gaussians
from atoll.data.instructions import Instructions
from atoll.data.text_dataset import Text
from atoll.models.gpt import GPT
from atoll.models.mlp import MLP
from atoll.models.pretrained import Pretrained
from atoll.optim.adam import Adam, AdamW
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.schedules import WSD, Cosine, Schedule, at
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.optim.staleness import DelayCompensation, Polynomial
from atoll.optim.torch_optimizers import Muon, TorchOptimizer
from atoll.replica.local_replica import InnerRule
from atoll.runs.cluster import Cluster
from atoll.runs.settings_validation import check_run

S = TypeVar("S")


class TrainsDevices(Algorithm[S], Rebases[S], Protocol[S]):
    """An algorithm that can train the devices of one island: it can continue from weights that islands have averaged."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How each island trains.

    Args:
        steps: inner steps per island after the warm start, a multiple of the steps of a round. In asynchronous runs it is the mean
            over the islands, and any number.
        batch_size: sequences (or points) per inner step of a device.
        micro_batches: parts into which a batch is cut to save memory. The result is the same within rounding.
        clip_norm: upper limit of the gradient's norm; none: no limit.
        warm_start_steps: steps that one island trains before the clock starts; 0 starts from scratch.
        warm_start_lr: its learning rate, after a warm-up; none: the peak of the run's schedule.
        device: cpu, cuda, or auto for cuda where there is one.
        precision: auto; bf16 for a forward pass in bfloat16 (on CUDA); fp32, whose matrix products are TF32 on CUDA; fp32-strict,
            whose products are not; or all-bf16 for bfloat16 weights, gradients and activations with master weights and moments in
            fp32. auto is bf16 on a CUDA device that has it, else fp32.
        compile: whether the loss passes through torch.compile, and stacked passes are recorded as CUDA graphs; auto: on CUDA, if
            the run is long enough to gain from it.
        together: the simulated islands of one GPU compute `stacked` in one pass, one after the other (`apart`), or in the way that
            is measured to be faster (`auto`). On a CPU `auto` computes each island in a thread of its own.
        fresh_optimizer: reset the inner optimizer at the start of every round.
        peak_first: take the first step of every round at the schedule's highest rate.
        joiner_moments: the inner optimizer of an island that joins a running run, or returns to it, is `empty`, or begins with the
            moments of the `donor`, the island that sends it the weights. They are sent with these.
    """

    steps: int
    batch_size: int
    micro_batches: int = 1
    clip_norm: float | None = 1.0
    warm_start_steps: int = 0
    warm_start_lr: float | None = None
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    precision: Literal["auto", "fp32", "fp32-strict", "bf16", "all-bf16"] = "auto"
    compile: Literal["auto"] | bool = "auto"
    together: Literal["auto", "stacked", "apart"] = "auto"
    fresh_optimizer: bool = False
    peak_first: bool = False
    joiner_moments: Literal["empty", "donor"] = "empty"

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "steps", "batch_size", "micro_batches", path="train.")
        if self.warm_start_steps < 0:
            raise ConfigError(f"train.warm_start_steps={self.warm_start_steps}: it is 0 or more. Use 0 to start from scratch.")
        if self.warm_start_lr is not None and not self.warm_start_lr > 0:
            raise ConfigError(f"train.warm_start_lr={self.warm_start_lr}: it is more than 0. Use none for the schedule's peak.")
        if self.micro_batches > self.batch_size:
            raise ConfigError(
                f"train.micro_batches={self.micro_batches} is more than train.batch_size={self.batch_size}: "
                f"a micro-batch holds at least one example. Lower micro_batches."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"train.clip_norm={self.clip_norm}: it is more than 0. Use none for no limit.")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """How often a run evaluates and saves. Intervals are inner steps per island, rounded to whole rounds; with a hub, rounded up to
    the next arrival.

    Args:
        evaluate_every: inner steps between evaluations. The first and the last weights are always evaluated.
        save_every: inner steps between checkpoints. The last round is always saved.
        checkpoints: number of checkpoints that are kept.
        tensorboard: write TensorBoard files too.
    """

    evaluate_every: int = 100
    save_every: int = 100
    checkpoints: int = 2
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "evaluate_every", "save_every", "checkpoints", path="keep.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole experiment.

    Args:
        recipe: the name of the recipe that the run began with; its folder has this name by default.
        model: a decoder, a perceptron, or a model of the Hugging Face library.
        data: text for a decoder, points for a perceptron, text or instructions for a Hugging Face model.
        algorithm: the algorithm between islands.
        optimizer: the inner rule; also of gradient algorithms such as DDP, unless they have one of their own.
        train: how each island trains.
        cluster: the islands and the links between them.
        keep: evaluations and checkpoints.
        seed: of weights, data order and all random numbers of the cluster.
        inside: the algorithm between the devices of an island. None: every device is an island.
    """

    recipe: str
    model: GPT | MLP | Pretrained
    data: Text | Gaussians | Instructions
    algorithm: Algorithm[Any] | AsyncAlgorithm[Any]
    optimizer: InnerRule
    train: Train
    cluster: Cluster = Cluster()
    keep: Keep = Keep()
    seed: WideInt = 0
    inside: TrainsDevices[Any] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_run(self)

    @property
    def effective_cluster(self) -> Cluster:
        """The cluster of the algorithm between islands: without an algorithm inside, every device is an island."""
        return self.cluster if self.inside is not None else self.cluster.devices_as_islands(self.seed)

    @property
    def _asynchronous(self) -> bool:
        return isinstance(self.algorithm, AsyncAlgorithm)

    @property
    def shards(self) -> int:
        """Number of shards of the data."""
        return self.data.shards or self.cluster.devices

    @property
    def schedule_steps(self) -> int:
        """The length of a learning-rate schedule that has none of its own."""
        if not self._asynchronous:
            return self.train.steps
        # The position is the shard's, and all islands' steps are spread over the shards.
        return max(1, self.train.steps * self.effective_cluster.islands // self.shards)

    @property
    def resolved(self) -> Run:
        """The run with defaults filled in: lengths of schedules, the algorithm's optimizer and clipping, the tokenizer of a
        pretrained model, and the precision and compilation that this machine's device has."""
        with _schedule_errors(
            "optimizer", f"train.steps * islands / shards = {self.schedule_steps}" if self._asynchronous else "train.steps"
        ):
            optimizer = with_steps(self.optimizer, self.schedule_steps)
        algorithm = self._with_defaults(self.algorithm, "algorithm", optimizer, self._outer_steps())
        inside = None
        if self.inside is not None:
            rounds = self.train.steps // self.inside.steps_per_round
            inside = self._with_defaults(self.inside, "inside", optimizer, rounds)
        data = self.data
        if isinstance(self.model, Pretrained) and isinstance(data, Instructions) and data.tokenizer is None:
            data = replace(data, tokenizer=self.model.path)
        train = choose_computing(self, here(self))[0]
        return replace(self, data=data, optimizer=optimizer, algorithm=algorithm, inside=inside, train=train)

    def _with_defaults(self, algorithm: Any, name: str, optimizer: InnerRule, rounds: int) -> Any:
        """The algorithm with the run's optimizer and clipping where it has none, its clock, and schedules of `rounds` rounds."""
        filled: dict[str, Any] = {}
        for field in fields(algorithm):
            value = getattr(algorithm, field.name)
            if value is None and field.name in ("optimizer", "clip_norm"):
                filled[field.name] = optimizer if field.name == "optimizer" else self.train.clip_norm
            elif value is None and field.name == "clock" and isinstance(algorithm, ACCO):
                filled[field.name] = algorithm.ticks
            else:
                with _schedule_errors(f"{name}.{field.name}", f"{rounds} {'arrivals' if self._asynchronous else 'rounds'}"):
                    filled[field.name] = with_steps(value, rounds)
        return replace(algorithm, **filled)

    def rounds(self, steps: int) -> int:
        """The number of rounds in this number of inner steps: at least one."""
        algorithm = self.algorithm
        return max(1, steps // (algorithm.plan.steps if isinstance(algorithm, AsyncAlgorithm) else algorithm.steps_per_round))

    def _outer_steps(self) -> int:
        """The number of updates by an algorithm's own rules: one per round, or in asynchronous runs one per arrival, whose number
        grows as slow islands take fewer steps per round."""
        if not isinstance(self.algorithm, AsyncAlgorithm):
            return self.rounds(self.train.steps)
        plan, cluster = self.algorithm.plan, self.effective_cluster
        speeds = [1 / cluster.step_time(island, self.seed) for island in range(cluster.islands)]
        pace = speeds if plan.pace == "measured" or not plan.speeds else plan.speeds
        steps = [plan.steps if plan.pace == "even" else dynamic_steps(v, max(pace), plan.steps) for v in pace]
        arrivals_per_update = sum(v / n for v, n in zip(speeds, steps, strict=True)) / sum(speeds)
        return max(1, round(self.train.steps * cluster.islands * arrivals_per_update))


def device_of(run: Run) -> str:
    """The device that the run computes on."""
    if run.train.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if run.train.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch sees no CUDA device. Use train.device=cpu, or auto.")
    return run.train.device


def dtype_of(run: Run) -> torch.dtype | None:
    """The dtype that the module's parameters are cast to; none: as they are."""
    return torch.bfloat16 if run.train.precision == "all-bf16" else None


class ComputeDevice(NamedTuple):
    """What `auto` depends on."""

    capability: tuple[int, int] | None  # the CUDA compute capability; None on a CPU
    compiles: bool  # whether torch.compile finds Triton, which generates its CUDA kernels


def here(run: Run) -> ComputeDevice:
    """The device that this machine has for the run. A missing device is refused elsewhere: `device_of`."""
    asked = "auto" in (run.train.precision, run.train.compile) or run.train.precision == "bf16"
    if not asked or run.train.device == "cpu" or not torch.cuda.is_available():
        return ComputeDevice(None, compiles=False)
    return ComputeDevice(torch.cuda.get_device_capability(), compiles=find_spec("triton") is not None)


BF16_CAPABILITY = (8, 0)
"""Of the first CUDA devices with products in bfloat16 (Ampere)."""
COMPILE_S = 40.0
"""Seconds until the first step of a compiled shape (docs/log.md, 2026-11-16: decoders of 13 M parameters on an H200)."""
SAVED_S_PER_LAYER = 0.0086 / 6
"""Seconds that recorded passes save per step and layer. A loop that launches each kernel takes 10.2 ms per step of the preset m20,
which has 6 layers, and recorded passes take 1.6 ms (benchmarks/records/2026-11-16_gpu, m20 2 x 256: 50.3 k and 328 k tokens/s)."""


def compiling_pays(steps: int, layers: int) -> bool:
    """Whether this number of steps of one process saves more time than compiling takes.

    >>> compiling_pays(steps=1_000 + 3_000 * 4, layers=6), compiling_pays(steps=225 + 900 * 4, layers=2)
    (True, False)
    """
    return steps * layers * SAVED_S_PER_LAYER > COMPILE_S


def choose_computing(
    run: Run, device: ComputeDevice, *, islands: int | None = None, own_workload: bool = False
) -> tuple[Train, str | None]:
    """How the run computes on this device: its `train` without `auto`, and a line for the log if there was something to choose on a
    CUDA device, or if bf16 was asked for and there is none.

    Args:
        islands: that one process computes; None: all of them, as in the simulator.
        own_workload: the user gives the model and the data.
    """
    train = run.train
    if device.capability is None:
        ignored = train.precision == "bf16" and train.device == "auto" and not isinstance(run.inside, FSDP)  # FSDP2 casts on a CPU
        line = "train.precision=bf16: ignored, since train.device=auto finds no CUDA device here. The run computes in fp32."
        precision = "fp32" if ignored or train.precision == "auto" else train.precision
        return replace(train, precision=precision, compile=train.compile is True), line if ignored else None
    reasons = []
    if train.precision == "auto":
        has_bf16 = device.capability >= BF16_CAPABILITY
        train = replace(train, precision="bf16" if has_bf16 else "fp32")
        reasons.append(f"this device has {'' if has_bf16 else 'no '}bf16")
    if train.compile == "auto":
        count = run.effective_cluster.islands * run.effective_cluster.devices_per_island if islands is None else islands
        why_not = _why_not_compiled(run, train.warm_start_steps + train.steps * count, device, own_workload)
        train = replace(train, compile=not why_not)
        reasons.append(why_not or "the run is long")
    if not reasons:
        return train, None
    compiled = "compiled" if train.compile else "not compiled"
    return train, (
        f"precision {train.precision}, {compiled}: {' and '.join(reasons)}; set train.precision / train.compile to change it"
    )


def _why_not_compiled(run: Run, steps: int, device: ComputeDevice, own_workload: bool) -> str:
    """Why `compile=auto` does not compile; empty if it does."""
    if not device.compiles:
        return "torch.compile finds no Triton"
    if own_workload:
        return "the workload is the user's own"
    if not isinstance(run.model, GPT):
        # Of instructions every batch length would be compiled anew, and a perceptron has little to compile.
        return f"the model is a {type(run.model).__name__}"
    return "" if compiling_pays(steps, run.model.layers) else "the run is too short to gain from compiling"


def check_recorded_precision(run: Run, device: ComputeDevice) -> None:
    """Refuse to resume a run in another precision than it began with."""
    if run.train.precision == "bf16" and device.capability is None and not isinstance(run.inside, FSDP):
        raise ConfigError(
            "this run computes in bf16, and torch sees no CUDA device here. Resume it on a machine that has one, or start a new "
            "run with train.precision=fp32."
        )


def as_recorded(given: Run, recorded: Run) -> Run:
    """The given Run with the recorded precision and compilation where it leaves them to the device."""
    train, own = given.train, recorded.train
    left_open = train.precision == "auto" or (train.precision == "bf16" and train.device == "auto" and own.precision == "fp32")
    precision = own.precision if left_open else train.precision
    compiled = own.compile if train.compile == "auto" else train.compile
    return replace(given, train=replace(train, precision=precision, compile=compiled))


@contextmanager
def _schedule_errors(path: str, steps: str) -> Iterator[None]:
    """Adds to an error which schedule does not fit, and its length in the run."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: its schedule is as long as the run ({steps}). {error}") from error


def with_steps(rule: Any, steps: int) -> Any:
    """The rule with a schedule of this length if its schedule has none, also in a rule that it wraps."""
    if not is_dataclass(rule) or isinstance(rule, type):
        return rule
    # These two rules take one step of their schedule after several arrivals.
    arrivals = rule.period if isinstance(rule, DelayedNesterov) else rule.size if isinstance(rule, Buffered) else 1
    steps = max(1, steps // arrivals)
    changed: dict[str, Any] = {}
    for name, value in ((field.name, getattr(rule, field.name)) for field in fields(rule)):
        if name == "lr" and isinstance(value, Cosine | WSD) and value.steps is None:
            changed[name] = replace(value, steps=steps)
        elif name == "rule":
            changed[name] = with_steps(value, steps)
    return replace(rule, **changed) if changed else rule


def with_rate_at(algorithm: Algorithm[Any], position: int) -> Algorithm[Any]:
    """The algorithm with its optimizer's rate fixed at this position of the run's schedule. Rules count their own updates, so a
    joiner's rule would start the schedule again."""
    rule: Any = getattr(algorithm, "optimizer", None)
    lr = getattr(rule, "lr", None)
    if not isinstance(lr, Schedule):
        return algorithm
    fixed: Algorithm[Any] = replace(algorithm, optimizer=replace(rule, lr=at(lr, position)))  # type: ignore[type-var]
    return fixed


candidates: Mapping[Any, Sequence[type]] = {
    Algorithm: (DDP, ZeRO1, FSDP, ACCO, DPU, WP, DiLoCo, Streaming, Eager),
    TrainsDevices: (DDP, ZeRO1, FSDP, ACCO, DPU, WP),
    AsyncAlgorithm: (AsyncLocalSGD,),
    Rule: (SGD, Momentum, Nesterov, Adam, AdamW, DelayedNesterov, Buffered, Muon, TorchOptimizer),
    Correction: (Polynomial, DelayCompensation),
}
"""The classes that a user can name on the command line where a Run takes an algorithm, a rule or a correction."""
