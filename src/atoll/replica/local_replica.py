"""LocalReplica: the inner training loop of one island. A module, a torch optimizer, and work that an engine assigns.

Every engine computes with it. It has no clock, no peers and no data position: `Work` says which batches to read and where on the
learning-rate schedule the first of them lies. Its state in a checkpoint is the optimizer's moments, the random generator and the
module's buffers. A module in half precision is trained through master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.core.protocols import Gradient, ReadsAhead, Weigh, Work, Workload
from atoll.optim.adam import Adam, AdamW
from atoll.optim.schedules import Schedule, at
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.optim.torch_optimizers import TorchRule, TorchState, moments_of, place_state, set_rate
from atoll.replica.data_parallel import DataParallelDevices
from atoll.replica.flat_parameters import FlatModule, TrainableWeights, copy_buffers, persistent_buffers, trainable_weights
from atoll.replica.forward_backward import ForwardBackward, Loss, ModuleTraits, probe_module, split_batch
from atoll.replica.master_weights import InnerRule as InnerRule, MasterWeights, cast_parameters, needs_master_weights


class ComputeResult(NamedTuple):
    """What a replica computed: the loss of each step, the tokens of all steps, and whether the steps moved the weights."""

    losses: list[float]
    tokens: int
    moved: bool = True


@dataclass(frozen=True)
class RoundStart:
    """What a replica does at the start of every round. A round may call `train` several times."""

    fresh_optimizer: bool = False  # reset the optimizer's moments
    peak_first: bool = False  # take the first step at the schedule's highest rate, wherever on the schedule the round lies


_ROUND_START = RoundStart()


class LocalReplica:
    """One island's model and inner optimizer.

    Args:
        optimizer: the inner rule, carried out by torch's own optimizer (fused AdamW where there is one).
        clip_norm: gradients with a larger norm are scaled down to it.
        micro_batches: pieces that each batch is cut into; their gradients are accumulated to the mean over the batch.
        devices: the first holds the module and the optimizer; each further one computes a share of every batch.
        autocast: run forward passes in bfloat16 (CUDA only).
        dtype: of the module's parameters, and so of gradients and activations; None leaves them as the workload makes them.
        loss: a compiled form of `workload.loss`, shared by all replicas.
        seed: of this replica's random generator, for modules that draw (dropout).
    """

    def __init__(
        self,
        workload: Workload,
        *,
        optimizer: InnerRule,
        clip_norm: float | None = None,
        micro_batches: int = 1,
        devices: Sequence[str] = ("cpu",),
        autocast: bool = False,
        dtype: torch.dtype | None = None,
        loss: Loss | None = None,
        seed: int = 0,
        round_start: RoundStart = _ROUND_START,
    ) -> None:
        self.device, *more_devices = devices
        self.weights: TrainableWeights = trainable_weights(cast_parameters(workload.module().to(self.device), dtype))
        self.steps_taken = 0
        self.has_trained = False  # false while it computes gradients only
        self.rule = optimizer
        self.cancelled: Callable[[], bool] = lambda: False  # asked before each step of `train`: whether to stop
        self.on_step: Callable[[], object] = lambda: None  # called before each step of `train`
        self.batches = workload.batches
        self.optimizer = self._new_optimizer()
        self.stack_row: tuple[int, int] | None = None
        """The address and the bytes of its gradients, if it last computed in a `VmapStack`."""
        self.clip_norm, self.micro_batches = clip_norm, micro_batches
        self._masters: MasterWeights | None = None
        """Made when a module in half precision is first trained. An algorithm that asks for gradients only has its own."""
        self._unrounded: Tree | None = None
        """The weights that were loaded last, until something is computed, if they are more precise than the module."""
        self._data_parallel = DataParallelDevices(workload, more_devices, dtype) if more_devices else None
        self.forward_backward = ForwardBackward(
            weights=self.weights,
            workload=workload,
            loss=loss or workload.loss,
            device=self.device,
            data_parallel=self._data_parallel,
            autocast=autocast,
        )
        self._round_start = round_start
        self._round: int | None = None  # the position on the schedule at which the last round began
        self._pieces: tuple[tuple[int, int, int] | None, list[Any]] = None, []
        """The shard, the position and the number of pieces of the batch that was read last, and its pieces, while some are left."""
        self._random = torch.Generator().manual_seed(seed).get_state()

    def load(self, params: Tree) -> None:
        """Loads weights, all of them or some pieces, and keeps the optimizer's state."""
        self.weights.load(params)
        if self._masters is not None:
            self._masters.load(params)
        elif self._unrounded is not None:
            params = self._unrounded.overlaid(params)
        if self._masters is None and needs_master_weights(self.weights):
            self._unrounded = params if params.flat.dtype.itemsize > params.layout.dtype.itemsize else None

    def params(self, layout: Layout | None = None) -> Tree:
        """A copy of the present weights, or of those in this layout, in the highest precision there is."""
        layout = layout or self.weights.layout
        if self._masters is not None:
            return self._masters.read(layout)
        return self.weights.read(layout) if self._unrounded is None else self._unrounded.part(layout).claim()

    def borrowed(self) -> Tree:
        """The present weights, borrowed: without a copy where they lie in one buffer, else collected when they are read."""
        if self._masters is None and self._unrounded is None and isinstance(self.weights, FlatModule):
            return self.weights.borrowed()
        return Tree.borrowed_from(self.weights.layout, lambda layout: self.params(layout).flat)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        if isinstance(self.rule, TorchRule):
            return self.rule.optimizer([*self.weights.tensor_parameters().items()])
        return torch_optimizer(self.rule, *self.weights.decay_groups())

    @property
    def optimizer_parameters(self) -> list[nn.Parameter]:
        """The optimizer's parameters in the order of the layout."""
        if isinstance(self.rule, TorchRule):
            return [*self.weights.tensor_parameters().values()]
        return [parameter for group in self.weights.decay_groups() for parameter in group]

    def moments(self) -> dict[str, Tree]:
        """Copies of the inner optimizer's moments; see `protocols.HasMoments`. Of a torch optimizer, without counters of steps."""
        if isinstance(self.rule, TorchRule):
            saved = None if self._masters is None else self._masters.moments()
            named = [*self.weights.tensor_parameters().items()]
            kept = saved.moments if isinstance(saved, TorchState) else moments_of(self.optimizer, named)
            return {moment.name: moment.values.copy() for moment in kept if moment.name != "step"}
        layout = self.weights.layout
        return {name: Tree(layout, torch.cat([part.flatten() for part in parts])) for name, parts in self._moments().items()}

    def load_moments(self, moments: Mapping[str, Tree]) -> None:
        if isinstance(self.rule, TorchRule):
            self._load_torch_moments(moments)
            return
        for name, parts in self._moments().items():
            for part, values in zip(parts, torch.split(moments[name].flat, [part.numel() for part in parts]), strict=True):
                part.copy_(values.view_as(part))

    def _load_torch_moments(self, moments: Mapping[str, Tree]) -> None:
        if self._masters is not None:
            state = self._masters.moments()
            assert isinstance(state, TorchState)
            new = tuple(moment._replace(values=moments.get(moment.name, moment.values)) for moment in state.moments)
            self._masters.restore(state._replace(moments=new))
            return
        parameters = self.weights.tensor_parameters()
        for kind, values in moments.items():
            for name, value in values.items():
                self.optimizer.state[parameters[name]][kind].copy_(value)

    def _moments(self) -> dict[str, list[Tensor]]:
        """Each moment as the tensors of its parameters, in the order of the layout: matrices come first in both."""
        if self._masters is not None:
            flats = [moment for moment in self._masters.moments() if isinstance(moment, Tensor)]
            names = ("exp_avg", "exp_avg_sq") if len(flats) > 1 else ("momentum_buffer",)
            return {name: [flat] for name, flat in zip(names, flats, strict=False)}  # plain SGD has none
        states = [self.optimizer.state.get(p, {}) for group in self.optimizer.param_groups for p in group["params"]]
        kinds = ("exp_avg", "exp_avg_sq", "momentum_buffer")
        return {kind: [state[kind] for state in states] for kind in kinds if all(state.get(kind) is not None for state in states)}

    # ----------------------------------------------------------------------------------------------------------- training

    def train(self, steps: int, work: Work, after: int = 0) -> ComputeResult:
        """Takes the optimizer steps of a round on consecutive batches, except for the first `after`, which a stack has taken."""
        losses, tokens, self.stack_row = [], 0, None
        if not after:
            self.begin_training(work)
        with self._own_randomness():
            for step, batch in enumerate(self.read_batches(steps - after, work.after(after)), after):
                if self.cancelled():
                    raise CancelledError("the engine no longer needs these steps")
                self.on_step()
                tokens += self.batches.tokens(batch)
                self.weights.zero_gradient()
                losses.append(self._backward(batch))
                self.weights.gather_gradient()
                self._step(self.learning_rate(step, work))
                self.steps_taken += 1
        # The host waits for the device once per round, not once per step.
        return ComputeResult([float(loss) for loss in torch.stack(losses).tolist()], tokens)

    def begin_training(self, work: Work) -> None:
        """Called before the first of some steps of a round. Makes master weights, if the module needs them and has none."""
        round_, self._round = self._round, work.schedule - work.before
        starts = work.before == 0 or round_ != self._round  # an island may take only the last steps of a round
        self.has_trained = True
        if self._masters is None and needs_master_weights(self.weights):
            self._masters = MasterWeights(self.weights, self.rule, self._unrounded or self.weights.read())
            self._unrounded = None
        if self._round_start.fresh_optimizer and starts:
            if self._masters is None:
                self.optimizer = self._new_optimizer()
            else:
                self._masters.reset_moments()

    def read_batches(self, steps: int, work: Work) -> Iterator[Any]:
        """The batches of these steps; for a GPU they are read ahead."""
        if self.device != "cpu" and isinstance(self.batches, ReadsAhead):
            return self.batches.ahead(work.shard, work.start, steps, self.device)
        return (self.batches.batch(work.shard, work.start + step) for step in range(steps))

    def learning_rate(self, step: int, work: Work) -> float:
        """The rate of a step of this work, counted from 0."""
        lr = self.rule.lr
        if self._round_start.peak_first and work.before + step == 0:
            return lr.lr if isinstance(lr, Schedule) else lr
        return at(lr, work.schedule + step)

    def _step(self, lr: float) -> None:
        if self._masters is not None:
            self._masters.step(lr, self.clip_norm)
            return
        if self.clip_norm is not None:
            gradients = self.weights.gradients()
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
            # As torch.nn.utils.clip_grad_norm_ does it, without reading the norm back from the device.
            scale = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.mul_(scale)
        set_rate(self.optimizer, lr)
        self.optimizer.step()

    # ---------------------------------------------------------------------------------------------------------- gradients

    def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> tuple[Gradient, ComputeResult]:
        """The gradient of the batch, or piece of one, that `work` begins with; see `protocols.Replica`."""
        self.stack_row = None
        batch, tokens, weight = self.prepare_gradient(work, weigh, at)
        with self._own_randomness():
            self.weights.begin_accumulation(None if onto is None else onto.sum, wide=wide)
            # The mean loss of a batch without tokens need not be a number.
            loss = self._backward(batch, weight) if weight else torch.zeros(())
        gradient = self.finish_gradient(work, self.weights.end_accumulation(), weight, tokens, onto)
        return gradient, ComputeResult([float(loss)], tokens, moved=False)

    def prepare_gradient(self, work: Work, weigh: Weigh, at: Tree | None) -> tuple[Any, int, float]:
        """Loads the weights `at`, if given. Returns the batch, or piece of one, its tokens, and its weight."""
        if at is not None:
            self.load(at)
        self._unrounded = None
        batch = self._read_piece(work)
        tokens = self.batches.tokens(batch)
        return batch, tokens, float(tokens) if weigh == "tokens" else 1.0

    def _read_piece(self, work: Work) -> Any:
        """The batch that `work` begins with, or a piece of one. Pieces that are asked for one after the other are read at once."""
        position, piece = divmod(work.start, work.pieces)
        key = (work.shard, position, work.pieces)
        if self._pieces[0] != key:
            batch = next(self.read_batches(1, replace(work, start=position)))
            self._pieces = key, list(split_batch(batch, work.pieces))
        found = self._pieces[1][piece]
        if piece == work.pieces - 1:
            self._pieces = None, []
        return found

    def finish_gradient(self, work: Work, total: Tree, weight: float, tokens: int, onto: Gradient | None) -> Gradient:
        """The accumulated gradients with their weight and tokens."""
        self.steps_taken += work.start % work.pieces == 0
        before = (0.0, 0) if onto is None else (onto.weight, onto.tokens)
        return Gradient(total, before[0] + weight, before[1] + tokens)

    # ------------------------------------------------------------------------------------------------------------- passes

    def dry_run(self, batch: Any) -> None:
        """A forward and backward pass whose gradient is discarded."""
        self.weights.begin_accumulation(None)
        self._backward(batch)
        self.weights.end_accumulation()

    def _backward(self, batch: Any, weight: float = 1.0) -> Tensor:
        in_turn = self._data_parallel is not None and self.traits.draws_randomness
        return self.forward_backward.backward(batch, weight, micro_batches=self.micro_batches, in_turn=in_turn)

    @cached_property
    def traits(self) -> ModuleTraits:
        """Equal for all replicas of one workload."""
        return probe_module(self.weights.module, self.device, self.forward_backward.dry_run)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Sets the global generators to this replica's state. The engine runs one thread at a time if the module draws."""
        if not self.traits.draws_randomness:
            yield
            return
        all_devices = [self.device, *(self._data_parallel.devices if self._data_parallel is not None else ())]
        devices = [device for device in all_devices if device.startswith("cuda")]
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(self._random)
            for device in devices:  # seeds are drawn from the saved state, so that one state determines all generators
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(int(torch.randint(2**62, ()).item()))
            yield
            self._random = torch.get_rng_state()

    # --------------------------------------------------------------------------------------------------- saving and counting

    def state(self) -> dict[str, Any]:
        """Moments, random generator and buffers, for a checkpoint. The weights are saved elsewhere."""
        return {**self.moments_state(), "random": self._random, "buffers": self.buffers(), "steps": self.steps_taken}

    def moments_state(self) -> dict[str, Any]:
        """All that the inner optimizer remembers, with its counts of steps. The next step computes in these tensors."""
        forgets = self._round_start.fresh_optimizer  # moments that the next round resets are not saved
        kept = {} if forgets else self.optimizer.state
        return {
            "optimizer": [dict(kept.get(parameter, {})) for parameter in self._stepped()],
            "masters": None if self._masters is None or forgets else self._masters.moments(),
        }

    def load_moments_state(self, given: Mapping[str, Any]) -> None:
        """Continue with copies of what another replica's `moments_state` returned. Raises ValueError for other shapes."""
        for parameter, moments in zip(self._stepped(), given["optimizer"], strict=True):
            for name, value in moments.items():
                if isinstance(value, Tensor) and value.shape not in (parameter.shape, ()):
                    raise ValueError(
                        f"its moment {name[:40]!r} has shape {tuple(value.shape)}, and its weights {tuple(parameter.shape)}"
                    )
        self.restore({**self.state(), **given})

    def _stepped(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def buffers(self) -> dict[str, Tensor]:
        return persistent_buffers(self.weights.module)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self.optimizer.state.clear()
        for parameter, moments in zip(self._stepped(), state["optimizer"], strict=True):
            if moments:
                self.optimizer.state[parameter] = {
                    name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                    for name, value in moments.items()
                }
        place_state(self.optimizer)
        self._masters = None
        if state["masters"] is not None:
            self._masters = MasterWeights(self.weights, self.rule, self.weights.read())
            self._masters.restore(state["masters"])
        self._random = state["random"].clone()
        self.steps_taken = state["steps"]
        copy_buffers(self.weights.module, state["buffers"])

    def tensors(self) -> dict[str, list[Tensor]]:
        """All tensors of this replica, by kind."""
        moments = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        copies = [self.weights, *(self._data_parallel.copies if self._data_parallel is not None else ())]
        parameters = [parameter for copy in copies for parameter in copy.module.parameters()]
        return {
            "parameters": [*parameters, *(buffer for copy in copies for buffer in copy.module.buffers())],
            "gradients": [
                *(gradient for copy in copies for gradient in copy.gradients()),
                *(parameter.grad for parameter in parameters if parameter.grad is not None),
            ],
            "optimizer": moments if self._masters is None else [*moments, *self._masters.tensors()],
        }


def torch_optimizer(rule: InnerRule, matrices: Sequence[nn.Parameter], rest: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer for an inner rule, fused where possible. Weight decay applies to matrices only, unless
    `AdamW.decay` is "all"."""
    lr = at(rule.lr, 0)
    if isinstance(rule, AdamW):
        spared = rule.weight_decay if rule.decay == "all" else 0.0
        groups = [{"params": matrices, "weight_decay": rule.weight_decay}, {"params": rest, "weight_decay": spared}]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=lr, betas=rule.betas, eps=rule.eps, fused=True)
    parameters = [*matrices, *rest]
    if isinstance(rule, Adam):
        return torch.optim.Adam(parameters, lr=lr, betas=rule.betas, eps=rule.eps, fused=True)
    assert isinstance(rule, SGD | Momentum | Nesterov)
    momentum = 0.0 if isinstance(rule, SGD) else rule.momentum
    nesterov = isinstance(rule, Nesterov)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=rule.weight_decay)


# ------------------------------------------------------------------------------------------- jobs, which a stack may batch


@dataclass(frozen=True, eq=False)
class TrainJob:
    """Steps of one replica, except for the first `after`, which were taken already."""

    replica: LocalReplica
    steps: int
    work: Work
    after: int = 0

    @property
    def batches(self) -> float:
        return self.steps

    def __call__(self) -> tuple[int, ComputeResult]:
        return self.result(self.replica.train(self.steps, self.work, self.after))

    def result(self, computed: ComputeResult) -> tuple[int, ComputeResult]:
        """What `Replica.train` returns for it, and what was computed."""
        return computed.tokens, computed

    def first_batch(self) -> Any:
        return next(self.replica.read_batches(1, self.work))


@dataclass(frozen=True, eq=False)
class GradientJob:
    """A gradient of one replica; see `protocols.Replica.gradient`."""

    replica: LocalReplica
    work: Work
    at: Tree | None
    onto: Gradient | None
    weigh: Weigh
    wide: bool
    steps: ClassVar[int] = 0

    @property
    def batches(self) -> float:
        return 1 / self.work.pieces if self.work.pieces > 1 else 1

    def __call__(self) -> tuple[Gradient, ComputeResult]:
        return self.replica.gradient(self.work, at=self.at, onto=self.onto, weigh=self.weigh, wide=self.wide)

    def first_batch(self) -> Any:
        return self.replica.prepare_gradient(self.work, self.weigh, self.at)[0]


ComputeJob = TrainJob | GradientJob


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Sets the number of torch threads of this thread. The last bits of sums depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
