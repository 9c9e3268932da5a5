"""Batched training of several islands on one device: vmap over stacked weights, gradients and batches.

A small batch does not fill a GPU, which then waits for the host to launch one small kernel after the other. With `vmap`, one launch
computes a kernel for all islands, and a CUDA graph launches all kernels of a pass at once. Each island keeps its own optimizer
moments, and one optimizer steps all islands that have the same learning rate. Results equal those of one island at a time, within
rounding. A stack has a fixed number of rows, so that torch compiles it once. Rows without an island compute on another island's
batch, and their results are discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.core.flat_tree import Tree, empty
from atoll.core.protocols import Gradient
from atoll.optim.torch_optimizers import TorchRule
from atoll.replica.flat_parameters import FlatModule
from atoll.replica.forward_backward import Loss, batch_tensors, map_tensors, to_device
from atoll.replica.local_replica import ComputeResult, GradientJob, LocalReplica, TrainJob, torch_optimizer


def why_not_stackable(replica: LocalReplica) -> str:
    """Why replicas like this one cannot be stacked; empty if they can."""
    if not isinstance(replica.weights, FlatModule):
        return "the parameters have several precisions"
    if replica.weights.layout.dtype.itemsize < torch.float32.itemsize:
        return "the module is in half precision, and each island has its own master weights"
    if replica.micro_batches > 1:
        return "each batch is cut into micro-batches, because one fills the device"
    if replica.traits.draws_randomness:
        return "the module draws random numbers, and each island has its own generator"
    if replica.traits.changes_buffers:
        return "the module changes its buffers, and each island has its own"
    return ""


def uses_cuda_graphs(replica: LocalReplica, compiled: bool) -> bool:
    """Whether passes are captured as CUDA graphs, which makes a stack of one row worthwhile."""
    return compiled and replica.device.startswith("cuda")


class RaggedBatches(Exception):
    """Batches of different shapes cannot be stacked. `results` are those of the steps that each island took before; weights and
    moments are those after these steps."""

    def __init__(self, shapes: Iterable[object], results: Sequence[ComputeResult] = ()) -> None:
        super().__init__(f"batches have the shapes {sorted(map(str, shapes))}")
        self.results = results


class VmapStack:
    """Stacked weights and gradients of up to `rows` islands, whose replicas are all `like` this one. `loss` is not compiled; with
    `compiled` the stack compiles it, and on a GPU captures passes as CUDA graphs."""

    def __init__(self, like: LocalReplica, rows: int, loss: Loss, *, compiled: bool) -> None:
        assert isinstance(like.weights, FlatModule)
        self._like, self._layout = like, like.weights.layout
        self._params = like.weights.read().flat.repeat(rows, 1)
        self._grads = torch.zeros_like(self._params)
        self._leaves = {f"module.{name}": view.detach().requires_grad_() for name, view in self._views(self._params).items()}
        self._into = list(self._views(self._grads).values())
        shapes = [parameter.shape for parameter in like.optimizer_parameters]
        self._rows = [_StackRow(params, grads, shapes) for params, grads in zip(self._params, self._grads, strict=True)]
        self._weights = torch.ones(rows, device=like.device)
        loss_module = _LossModule(like.weights.module, loss)

        def losses(leaves: dict[str, Tensor], batches: Any) -> Tensor:
            each: Tensor = torch.vmap(lambda leaf, batch: functional_call(loss_module, leaf, (batch,)))(leaves, batches)
            return each

        if compiled:  # torch limits recompilations per function, and graphs of earlier stacks no longer need theirs
            torch._dynamo.eval_frame.reset_code(losses.__code__)  # type: ignore[attr-defined]
        # dynamic=False: torch cannot trace vmap with symbolic sizes.
        self._losses: Callable[[dict[str, Tensor], Any], Tensor] = torch.compile(losses, dynamic=False) if compiled else losses
        self._pass: Callable[[Any], Tensor] = CudaGraphCache(self._once) if uses_cuda_graphs(like, compiled) else self._once

    def _views(self, stacked: Tensor) -> dict[str, Tensor]:
        """Each parameter of all rows."""
        layout, rows = self._layout, stacked.shape[0]
        cuts = zip(layout.pieces, layout.offsets.values(), strict=True)
        return {piece.name: stacked[:, at : at + piece.count].view(rows, *piece.shape) for piece, at in cuts}

    def __len__(self) -> int:
        return len(self._rows)

    def close(self) -> None:
        """Frees the memory of CUDA graphs. The stack computes nothing afterwards."""
        self._pass = _closed

    def train(self, trainings: Sequence[TrainJob], least: int = 1) -> list[ComputeResult]:
        """Trains each replica, each its own number of steps. The stack ends when fewer than `least` replicas have steps left, since
        rows without an island take as long as the others. Raises RaggedBatches if batches differ in shape."""
        rows = self._rows[: len(trainings)]
        for row, training in zip(rows, trainings, strict=True):
            row.enter(training)
        readers = [_rest(training) for training in trainings]
        tokens, losses, shapes = [0] * len(trainings), list[Tensor](), set[object]()
        optimizers: dict[tuple[int, ...], torch.optim.Optimizer] = {}
        for step in range(max(training.steps - training.after for training in trainings)):
            if any(training.replica.cancelled() for training in trainings):
                raise CancelledError("the engine no longer needs these steps")
            active = [number for number, training in enumerate(trainings) if step < training.steps - training.after]
            if len(active) < least:
                break
            batches = {number: next(readers[number]) for number in active}
            shapes = {*shapes, *map(_shapes, batches.values())}
            if len(shapes) > 1:
                self._leave(trainings)
                raise RaggedBatches(shapes, _results(trainings, losses, tokens))
            losses.append(self._backward(batches))
            self._clip()
            rates = {number: _rate(trainings[number], step) for number in active}
            self._step(rates, optimizers)
            for number in active:
                trainings[number].replica.steps_taken += 1
                tokens[number] += self._like.batches.tokens(batches[number])
        self._leave(trainings)
        return _results(trainings, losses, tokens)

    def _step(self, rates: Mapping[int, float], optimizers: dict[tuple[int, ...], torch.optim.Optimizer]) -> None:
        """Steps the rows with these learning rates. One optimizer steps all rows of one rate, and is kept in `optimizers`."""
        for rate in dict.fromkeys(rates.values()):
            numbers = tuple(number for number in rates if rates[number] == rate)
            if numbers not in optimizers:
                optimizers[numbers] = self._optimizer([self._rows[number] for number in numbers])
            for group in optimizers[numbers].param_groups:
                group["lr"] = rate
            optimizers[numbers].step()

    def _optimizer(self, rows: Sequence[_StackRow]) -> torch.optim.Optimizer:
        rule, weights = self._like.rule, self._like.weights
        if isinstance(rule, TorchRule):
            names = weights.tensor_parameters()
            optimizer = rule.optimizer([pair for row in rows for pair in zip(names, row.parts, strict=True)])
        else:
            cut = len(weights.decay_groups()[0])
            matrices, rest = ([part for row in rows for part in row.parts[kind]] for kind in (slice(cut), slice(cut, None)))
            optimizer = torch_optimizer(rule, matrices, rest)
        for row in rows:
            for part, moments in zip(row.parts, row.moments, strict=True):
                optimizer.state[part] = moments
        return optimizer

    def _leave(self, trainings: Sequence[TrainJob]) -> None:
        for row, training in zip(self._rows, trainings, strict=False):
            row.leave(training.replica)

    def gradients(self, asked: Sequence[GradientJob]) -> list[tuple[Gradient, ComputeResult]]:
        """The gradient of each replica. Raises RaggedBatches if batches differ in shape."""
        read = [ask.replica.prepare_gradient(ask.work, ask.weigh, ask.at) for ask in asked]
        rows = self._rows[: len(asked)]
        torch._foreach_copy_([row.params for row in rows], [_flat_weights(ask.replica) for ask in asked])
        batches = {number: batch for number, (batch, _, _) in enumerate(read)}
        if len(shapes := {*map(_shapes, batches.values())}) > 1:
            raise RaggedBatches(shapes)
        losses = self._backward(batches, [weight for _, _, weight in read]).tolist()
        for number, (_, _, weight) in enumerate(read):
            if not weight:  # the mean loss of a batch without tokens need not be a number
                rows[number].grads.zero_()
                losses[number] = 0.0
        answers, totals = [], self._totals(rows, asked)
        for total, ask, (_, tokens, weight), loss in zip(totals, asked, read, losses, strict=False):
            gradient = ask.replica.finish_gradient(ask.work, total, weight, tokens, ask.onto)
            answers.append((gradient, ComputeResult([float(loss)], tokens, moved=False)))
        return answers

    def _totals(self, rows: Sequence[_StackRow], asked: Sequence[GradientJob]) -> list[Tree]:
        """The gradients of these rows, added to those that are given. One kernel copies all of them, and one adds all of them."""
        totals, copied, added = list[Tree](), list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for row, ask in zip(rows, asked, strict=True):
            if ask.onto is None:
                totals.append(Tree(self._layout, empty(self._layout.numel, row.grads.dtype, row.grads.device)))
                copied.append((totals[-1].flat, row.grads))
            else:
                totals.append(ask.onto.sum.claim())
                added.append((totals[-1].flat, row.grads))
        if copied:
            torch._foreach_copy_([into for into, _ in copied], [grads for _, grads in copied])
        if added:
            torch._foreach_add_([onto for onto, _ in added], [grads for _, grads in added])
        return totals

    def dry_run(self, batches: Sequence[Any]) -> None:
        """A forward and backward pass whose gradients are discarded."""
        self._backward(dict(enumerate(batches)))

    def reserve_moments(self) -> None:
        """Raises torch.OutOfMemoryError if the device has no memory for the islands' moments, which their first step allocates."""
        torch.empty(2, *self._params.shape, dtype=self._params.dtype, device=self._params.device)

    def _backward(self, batches: dict[int, Any], weights: Sequence[float] | None = None) -> Tensor:
        """Computes the gradient of each row's mean loss, times its weight. Returns the losses of all rows."""
        if weights is None:
            self._weights.fill_(1.0)
        else:
            self._weights.copy_(torch.tensor([*weights, *[0.0] * (len(self) - len(weights))]), non_blocking=True)
        idle = next(iter(batches.values()))
        each = [batches.get(number, idle) for number in range(len(self))]
        return self._pass(to_device(map_tensors(lambda *parts: torch.stack(parts), *each), self._like.device))

    def _once(self, batches: Any) -> Tensor:
        with self._like.forward_backward.precision(), _stackable_attention(self._like.device):
            losses = self._losses(self._leaves, batches)
        total = (losses * self._weights).sum()
        # A parameter that the loss does not use has a zero gradient, as in `FlatModule`.
        gradients = torch.autograd.grad(total, list(self._leaves.values()), materialize_grads=True)
        torch._foreach_copy_(self._into, gradients)
        return losses.detach()

    def _clip(self) -> None:
        if self._like.clip_norm is not None:
            norms = torch.linalg.vector_norm(self._grads, dim=1, keepdim=True)
            self._grads.mul_(torch.clamp(self._like.clip_norm / (norms + 1e-6), max=1.0))


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(part.shape) for part in batch_tensors(batch))


def _results(trainings: Sequence[TrainJob], losses: Sequence[Tensor], tokens: Sequence[int]) -> list[ComputeResult]:
    """The results of the steps taken so far. The host waits for the device once."""
    table: list[list[float]] = torch.stack(list(losses)).tolist() if losses else []
    return [
        ComputeResult([row[number] for row in table[: training.steps - training.after]], tokens[number])
        for number, training in enumerate(trainings)
    ]


def _rest(training: TrainJob) -> Iterator[Any]:
    """The batches of the steps that are left."""
    work = replace(training.work, start=training.work.start + training.after)
    return training.replica.read_batches(training.steps - training.after, work)


def _rate(training: TrainJob, step: int) -> float:
    """The learning rate of a step, counted from the first of those that are left."""
    return training.replica.learning_rate(training.after + step, training.work)


def _closed(batches: Any) -> Tensor:
    raise AssertionError("this stack is closed")


class _LossModule(nn.Module):
    """A module whose output is its loss, so that `functional_call` can give it other parameters."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.module, batch)


class _StackRow:
    """One row of the stack: the weights of the island that computes in it. The moments are those of its replica."""

    def __init__(self, params: Tensor, grads: Tensor, shapes: Sequence[torch.Size]) -> None:
        self.params, self.grads = params, grads
        sizes = [shape.numel() for shape in shapes]
        self.parts = [nn.Parameter(part.view(shape)) for part, shape in zip(torch.split(params, sizes), shapes, strict=True)]
        for part, grad in zip(self.parts, torch.split(grads, sizes), strict=True):
            part.grad = grad.view_as(part)
        self.moments: list[dict[str, Any]] = []

    def enter(self, training: TrainJob) -> None:
        """Begins a round of this replica in the row, or continues it."""
        replica = training.replica
        if not training.after:
            replica.begin_training(training.work)
        replica.stack_row = (self.grads.data_ptr(), self.grads.nbytes)
        self.params.copy_(_flat_weights(replica))
        # The same dict objects, so that the replica's own optimizer sees what this one stores.
        self.moments = [replica.optimizer.state[parameter] for parameter in replica.optimizer_parameters]

    def leave(self, replica: LocalReplica) -> None:
        replica.weights.load(Tree(replica.weights.layout, self.params))


def _flat_weights(replica: LocalReplica) -> Tensor:
    return replica.weights.borrowed().flat


def _stackable_attention(device: str) -> AbstractContextManager[None]:
    """The attention kernels that work under vmap. cuDNN's cannot be traced, the backward pass of the memory-efficient one fails
    ("LSE is not correctly aligned"), and the CPU's has no vmap rule. In single precision the math kernel remains."""
    on_cuda = [SDPBackend.FLASH_ATTENTION] if device.startswith("cuda") else []
    kernels: AbstractContextManager[None] = sdpa_kernel([*on_cuda, SDPBackend.MATH])
    return kernels


# ------------------------------------------------------------------------------------------------------------------- CUDA graphs

_WARMUP_PASSES = 2
_MAX_GRAPHS = 4  # Batch shapes that get a graph. Each graph holds memory of its own.


class CudaGraphCache:
    """Captures a function of a batch once per batch shape, and replays the graph from then on. The function does not wait for the
    device, launches the same kernels for every batch of a shape, and keeps its other inputs and its results in the same buffers."""

    def __init__(self, compute: Callable[[Any], Tensor]) -> None:
        self._compute = compute
        self._graphs: dict[tuple[Any, ...], Callable[[Any], Tensor]] = {}

    def __call__(self, batch: Any) -> Tensor:
        shapes = tuple((part.shape, part.dtype) for part in batch_tensors(batch))
        if shapes not in self._graphs:
            if len(self._graphs) >= _MAX_GRAPHS:
                return self._compute(batch)
            self._graphs[shapes] = _captured(self._compute, batch)
        return self._graphs[shapes](batch)


def _captured(compute: Callable[[Any], Tensor], example: Any) -> Callable[[Any], Tensor]:
    """The function as a CUDA graph, for batches of this shape."""
    inputs = map_tensors(torch.clone, example)
    before, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(before)
    with torch.cuda.stream(aside):
        for _ in range(_WARMUP_PASSES):  # these compile, so that the capture allocates nothing
            compute(inputs)
    before.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = compute(inputs)

    def replay(batch: Any) -> Tensor:
        map_tensors(lambda captured, new: captured.copy_(new, non_blocking=True), inputs, batch)
        graph.replay()
        return result.clone()

    return replay
