"""LocalReplica: the inner loop. A module, a torch optimizer, and work that is handed to it; ordinary, fast PyTorch.

Every engine computes with it. It knows no clock and no peers, and keeps no data position: `Work` says which batches to read and
where on the learning-rate schedule the first of them lies. What it does keep, and what a checkpoint must hold, is the optimizer's
moments and the state of its random numbers. A module in half precision is trained by masters, see `masters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, ReadsAhead, Weigh, Work, Workload
from atoll.optim.adam import Adam, AdamW
from atoll.optim.schedules import Schedule, at
from atoll.optim.sgd import SGD, Nesterov
from atoll.replica.data_parallel import DataParallelDevices
from atoll.replica.flat_parameters import TrainableWeights, copy_buffers, trainable_weights
from atoll.replica.forward_backward import ForwardBackward, Loss, ModuleTraits, probe_module
from atoll.replica.master_weights import InnerRule as InnerRule
from atoll.replica.master_weights import MasterWeights, cast_parameters, needs_master_weights
from atoll.replica.micro_batches import split_batch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many torch threads in this thread, for a while: sums depend on their number in the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ComputeResult(NamedTuple):
    """What some steps brought: the loss of each, the tokens read in all, and whether the weights moved."""

    losses: list[float]
    tokens: int
    moved: bool = True


class LocalReplica:
    """One island's model and inner optimizer.

    Args:
        workload: what is trained.
        optimizer: the inner rule, carried out by torch's own optimizer (fused AdamW where there is one).
        clip_norm: gradients longer than this are shortened to it.
        micro_batches: into how many pieces each batch is cut; their gradients are accumulated, to the mean over the batch.
        device: where the module lives.
        more_devices: each computes a share of every batch with a copy of the module.
        autocast: run the forward pass in bfloat16 (CUDA only).
        dtype: of the module's parameters, and so of gradients and activations; none leaves them as the workload makes them.
        loss: a compiled form of `workload.loss`, shared by all replicas.
        seed: of this replica's random numbers, for modules that draw some (dropout).
        fresh_optimizer: forget the moments at the beginning of every round, that is, of every call of `train`.
        peak_first: take the first step of every round at the schedule's highest rate, wherever on the schedule the round lies.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        optimizer: InnerRule,
        clip_norm: float | None = None,
        micro_batches: int = 1,
        device: str = "cpu",
        more_devices: Sequence[str] = (),
        autocast: bool = False,
        dtype: torch.dtype | None = None,
        loss: Loss | None = None,
        seed: int = 0,
        fresh_optimizer: bool = False,
        peak_first: bool = False,
    ) -> None:
        self.weights: TrainableWeights = trainable_weights(cast_parameters(workload.module().to(device), dtype))
        self.steps_taken = 0
        self.trains = False
        """Whether it has been asked to, and not for gradients alone."""
        self.rule = optimizer
        self.stopped: Callable[[], bool] = lambda: False
        """Asked before each step of `train`: whether to give up."""
        self.batches = workload.batches
        self.optimizer = torch_optimizer(optimizer, *self.weights.groups())
        self.row: tuple[int, int] | None = None
        """Where its gradients lie, and how many bytes they are, if it computed in a stack last."""
        self._masters: MasterWeights | None = None
        """Made when a module in half precision is first trained: whoever asks for gradients alone keeps masters of its own."""
        self._full: Tree | None = None
        """The weights that were loaded last, until something is computed, if they have digits that the module has not."""
        self.clip_norm, self.micro_batches = clip_norm, micro_batches
        self.device = device
        self._helpers = DataParallelDevices(workload, more_devices, dtype) if more_devices else None
        self._passes = ForwardBackward(
            weights=self.weights,
            batches=workload.batches,
            loss=loss or workload.loss,
            plain_loss=workload.loss,
            device=device,
            helpers=self._helpers,
            autocast=autocast,
        )
        self._fresh_optimizer, self._peak_first = fresh_optimizer, peak_first
        self._random = torch.Generator().manual_seed(seed).get_state()

    def load(self, params: Tree) -> None:
        """Take these weights; the optimizer's state stays."""
        self.weights.load(params)
        if self._masters is not None:
            self._masters.load(params)
        elif needs_master_weights(self.weights):
            self._full = params if params.flat.dtype.itemsize > params.layout.dtype.itemsize else None

    def params(self) -> Tree:
        """A copy of the present weights, in all the digits that there are."""
        if self._masters is not None:
            return self._masters.read()
        return self.weights.read() if self._full is None else self._full.copy()

    def lent(self) -> Tree:
        """The present weights without a copy where that is possible, to be read before anything is computed again."""
        return self.weights.lent() if self._masters is None and self._full is None else self.params()

    def train(self, steps: int, work: Work, after: int = 0) -> ComputeResult:
        """Take `steps` optimizer steps on consecutive batches.

        Args:
            steps: of the round.
            work: what to read.
            after: how many of them were taken before, in another way.
        """
        losses, tokens, self.row = [], 0, None
        masters = self._masters if after else self.begin_round()
        with self._own_randomness():
            for step, batch in enumerate(self.read(steps - after, replace(work, start=work.start + after)), after):
                if self.stopped():
                    raise CancelledError("nobody waits for these steps any more")
                tokens += self.batches.tokens(batch)
                self.weights.zero_gradient()
                losses.append(self._backward(batch))
                self.weights.gather_gradient()
                if masters is None:
                    self._step(self.rate(step, work))
                else:
                    masters.step(self.rate(step, work), self.clip_norm)
                self.steps_taken += 1
        # One wait for the device at the end, not one per step.
        return ComputeResult([float(loss) for loss in torch.stack(losses).tolist()], tokens)

    def begin_round(self) -> MasterWeights | None:
        """Before the first of some steps; returns the masters, if it is they who step."""
        self.trains = True
        masters = self._masters = self._masters or self._make_masters()
        if self._fresh_optimizer:
            self.optimizer.state.clear() if masters is None else masters.forget()
        return masters

    def read(self, steps: int, work: Work) -> Iterator[Any]:
        """The batches of so many steps; on a GPU before they are needed, so that nobody waits for them."""
        if self.device != "cpu" and isinstance(self.batches, ReadsAhead):
            return self.batches.ahead(work.shard, work.start, steps, self.device)
        return (self.batches.batch(work.shard, work.start + step) for step in range(steps))

    def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> tuple[Gradient, ComputeResult]:
        """The gradient of the batch, or piece of one, that `work` begins with; see `protocols.Replica`."""
        self.row = None
        batch, tokens, weight = self.read_piece(work, weigh, at)
        with self._own_randomness():
            self.weights.collect(None if onto is None else onto.sum, wide=wide)
            # A batch without tokens has nothing to learn from: its mean loss need not be a number.
            loss = self._backward(batch, weight) if weight else torch.zeros(())
        return self.counted(work, self.weights.collected(), weight, tokens, onto), ComputeResult([float(loss)], tokens, moved=False)

    def read_piece(self, work: Work, weigh: Weigh, at: Tree | None) -> tuple[Any, int, float]:
        """Before a gradient: takes the weights that it is to be of. Returns its batch, or piece of one, the tokens in it, and its
        weight."""
        if at is not None:
            self.load(at)
        self._full = None
        batch = next(self.read(1, replace(work, start=work.start // work.pieces)))
        if work.pieces > 1:
            batch = list(split_batch(batch, work.pieces))[work.start % work.pieces]
        tokens = self.batches.tokens(batch)
        return batch, tokens, float(tokens) if weigh == "tokens" else 1.0

    def counted(self, work: Work, total: Tree, weight: float, tokens: int, onto: Gradient | None) -> Gradient:
        """After it: gradients that were added up, with what they weigh."""
        self.steps_taken += work.start % work.pieces == 0
        before = (0.0, 0) if onto is None else (onto.weight, onto.tokens)
        return Gradient(total, before[0] + weight, before[1] + tokens)

    def _make_masters(self) -> MasterWeights | None:
        """None where the module has single precision itself."""
        if not needs_master_weights(self.weights):
            return None
        full, self._full = self._full or self.weights.read(), None
        return MasterWeights(self.weights, self.rule, full)

    def _step(self, lr: float) -> None:
        self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def rate(self, step: int, work: Work) -> float:
        """The learning rate of a round's step, counted from 0."""
        return peak(self.rule.lr) if self._peak_first and step == 0 else at(self.rule.lr, work.schedule + step)

    def pass_over(self, batch: Any) -> None:
        """Forwards and backwards, and nothing comes of it."""
        self.weights.collect(None)
        self._backward(batch)
        self.weights.collected()

    def _backward(self, batch: Any, weight: float = 1.0) -> Tensor:
        in_turn = self._helpers is not None and self.draws_randomness
        return self._passes.backward(batch, weight, micro_batches=self.micro_batches, in_turn=in_turn)

    def _clip(self) -> None:
        if self.clip_norm is None:
            return
        gradients = self.weights.gradients()
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        # As torch.nn.utils.clip_grad_norm_ does it, without asking the device for the norm.
        scale = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)

    def precision(self) -> AbstractContextManager[Any]:
        """In which forward passes run."""
        return self._passes.precision()

    @property
    def draws_randomness(self) -> bool:
        return self.traits.draws_randomness

    @cached_property
    def traits(self) -> ModuleTraits:
        """Replicas of one kind have the same."""
        return probe_module(self.weights.module, self.device, self._passes.try_a_few)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """The global generators, for a while with this replica's state. Not for two threads at a time: the engine sees to that."""
        if not self.draws_randomness:
            yield
            return
        all_devices = [self.device, *(self._helpers.devices if self._helpers is not None else ())]
        devices = [device for device in all_devices if device.startswith("cuda")]
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(self._random)
            for device in devices:  # drawn from the saved state, so that one state serves all generators
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(int(torch.randint(2**62, ()).item()))
            yield
            self._random = torch.get_rng_state()

    # ------------------------------------------------------------------------------------------------------------- saving

    def state(self) -> dict[str, Any]:
        """Moments, random numbers and buffers: all that a checkpoint must hold besides the weights."""
        kept = {} if self._fresh_optimizer else self.optimizer.state  # what the next round would forget need not be kept
        moments = [dict(kept.get(p, {})) for g in self.optimizer.param_groups for p in g["params"]]
        masters = None if self._masters is None or self._fresh_optimizer else self._masters.moments()
        return {
            "optimizer": moments,
            "masters": masters,
            "random": self._random,
            "buffers": self.buffers(),
            "steps": self.steps_taken,
        }

    def buffers(self) -> dict[str, Tensor]:
        """What the module keeps besides its parameters (such as BatchNorm's running means), as it is now."""
        module = self.weights.module
        kept = module.state_dict().keys()  # tables that are made anew with the module are not
        return {name: buffer.detach() for name, buffer in module.named_buffers() if name in kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.optimizer.state.clear()
        for parameter, moments in zip(parameters, state["optimizer"], strict=True):
            if moments:
                self.optimizer.state[parameter] = {
                    name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                    for name, value in moments.items()
                }
        self._masters = None
        if state["masters"] is not None:
            self._masters = MasterWeights(self.weights, self.rule, self.weights.read())
            self._masters.restore(state["masters"])
        self._random = state["random"].clone()
        self.steps_taken = state["steps"]
        copy_buffers(self.weights.module, state["buffers"])

    def tensors(self) -> dict[str, list[Tensor]]:
        """All that this replica holds, by what it is for."""
        module = self.weights.module
        moments = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        helpers = {"parameters": [], "gradients": []} if self._helpers is None else self._helpers.tensors()
        gradients = [*self.weights.gradients(), *(p.grad for p in module.parameters() if p.grad is not None)]
        return {
            "parameters": [*module.parameters(), *module.buffers(), *helpers["parameters"]],
            "gradients": [*gradients, *helpers["gradients"]],
            "optimizer": moments if self._masters is None else [*moments, *self._masters.tensors()],
        }

    @property
    def nbytes(self) -> int:
        """What this replica holds: weights, gradients and the optimizer's moments, and masters where there are some."""
        held = {t.untyped_storage().data_ptr(): t.untyped_storage() for group in self.tensors().values() for t in group}
        return sum(storage.nbytes() for storage in held.values())


def peak(lr: float | Schedule) -> float:
    """The highest rate of a schedule."""
    return lr.lr if isinstance(lr, Schedule) else lr


def torch_optimizer(rule: InnerRule, matrices: Sequence[nn.Parameter], rest: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer for an inner rule. Two groups: what decays, and what does not."""
    lr = at(rule.lr, 0)
    if isinstance(rule, AdamW):
        spared = rule.weight_decay if rule.decay == "all" else 0.0
        groups = [{"params": matrices, "weight_decay": rule.weight_decay}, {"params": rest, "weight_decay": spared}]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=lr, betas=rule.betas, eps=rule.eps, fused=True)
    parameters = [*matrices, *rest]
    if isinstance(rule, Adam):
        return torch.optim.Adam(parameters, lr=lr, betas=rule.betas, eps=rule.eps, fused=True)
    momentum = 0.0 if isinstance(rule, SGD) else rule.momentum
    nesterov = isinstance(rule, Nesterov)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=rule.weight_decay)


@dataclass(frozen=True, eq=False)
class TrainJob:
    """Some steps of one replica."""

    replica: LocalReplica
    steps: int
    work: Work

    def __call__(self) -> tuple[None, ComputeResult]:
        return None, self.replica.train(self.steps, self.work)

    def first_batch(self) -> Any:
        return next(self.replica.read(1, self.work))


@dataclass(frozen=True, eq=False)
class GradientJob:
    """A gradient of one replica; see `protocols.Replica.gradient`."""

    replica: LocalReplica
    work: Work
    at: Tree | None
    onto: Gradient | None
    weigh: Weigh
    wide: bool

    def __call__(self) -> tuple[Gradient, ComputeResult]:
        return self.replica.gradient(self.work, at=self.at, onto=self.onto, weigh=self.weigh, wide=self.wide)

    def first_batch(self) -> Any:
        return self.replica.read_piece(self.work, self.weigh, self.at)[0]


ComputeJob = TrainJob | GradientJob
