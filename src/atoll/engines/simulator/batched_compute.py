"""Whether islands of one device compute together or one after the other: whichever was measured to be faster.

What islands have to compute lies here until the first of them is asked for. By then everybody who begins at the same virtual moment
has said what it has to do, and those who have the same kind of thing to do can do it in one stack.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from atoll.core.errors import ConfigError
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import ComputeJob, ComputeResult, GradientJob, LocalReplica, TrainJob
from atoll.replica.vmap_stack import RaggedBatches, VmapStack, uses_cuda_graphs, why_not_stackable

BatchMode = Literal["auto", "stacked", "apart"]
_WARM, _TIMED = 2, 3
"""Passes that are made to find out which is faster: the first ones compile."""
_FILLED_S = 0.1
"""A pass of a CPU that takes so long would gain nothing in a stack."""
_FILLED_SHARE = 0.5
"""A pass of a GPU that the host is through with telling it after this share of its time does not wait for the host, and would gain
nothing either."""


class BatchedCompute:
    """Computes for all islands of a run on one device.

    Args:
        how: `stacked`, one after the other (`apart`), or `auto` for what is faster, which is measured once.
        rows: how many islands may compute at a time.
        loss: the workload's, not compiled.
        compiled: whether islands compute with a compiled loss.
        tell: is told how they compute, once that is settled, and why.
    """

    def __init__(self, how: BatchMode, rows: int, loss: Loss, *, compiled: bool, tell: Callable[[str, str], object]) -> None:
        self.how = how
        """Settled when islands have first computed."""
        self._asked = how
        self._why, self._tell, self._untold = "it was asked for", tell, False
        self._rows, self._loss, self._compiled = rows, loss, compiled
        self._settled = how == "apart"
        self._one: VmapStack | None = None
        """For one island at a time, where a recorded pass is faster than the replica's own."""
        self._all: VmapStack | None = None
        self._pays_from = 2
        """So many islands are faster together than one after the other."""
        self._before: dict[str, Any] | None = None
        """What was settled before a run was interrupted."""

    def __call__(self, jobs: Sequence[ComputeJob]) -> list[tuple[Any, Any]]:
        """What each of these comes to, in order."""
        answers: dict[int, tuple[Any, Any]] = {}
        for group in _alike(jobs):
            for part in (group[at : at + self._rows] for at in range(0, len(group), self._rows)):
                found = self._compute([jobs[number] for number in part])
                answers.update(zip(part, found, strict=True))
        return [answers[number] for number in range(len(jobs))]

    def report(self) -> None:
        """Tell what was settled, if it is news."""
        if self._untold:
            self._untold = False
            self._tell(self.how, self._why)

    def close(self) -> None:
        """Gives back what stacks hold. Who computes again begins as was settled."""
        if self._settled and self._asked != "apart":
            self._before, self._settled = self.to_part(), False
        self._give_back()

    def _give_back(self) -> None:
        for stack in (self._one, self._all):
            if stack is not None:
                stack.close()
        self._one = self._all = None

    def to_part(self) -> dict[str, Any]:
        """What is settled, for a checkpoint: whoever goes on computes in the same way, and rounds alike."""
        stacks = {"one": self._one is not None, "all": self._all is not None}
        return self._before or {"how": self.how, "settled": self._settled, "pays_from": self._pays_from, **stacks}

    def from_part(self, part: dict[str, Any]) -> None:
        if part["settled"]:
            self.how, self._pays_from, self._before = part["how"], part["pays_from"], part

    def _compute(self, jobs: Sequence[ComputeJob]) -> Sequence[tuple[Any, Any]]:
        if not self._settled:
            self._settle(jobs)
        if self._all is not None and len(jobs) >= self._pays_from:
            return self._in(self._all, jobs)
        return [answer for job in jobs for answer in ([job()] if self._one is None else self._in(self._one, [job]))]

    def _in(self, stack: VmapStack, jobs: Sequence[ComputeJob]) -> Sequence[tuple[Any, Any]]:
        """What a stack makes of jobs of one kind. If it cannot, each goes on by itself, and so do all to come."""
        trainings = [job for job in jobs if isinstance(job, TrainJob)]
        try:
            if trainings:
                return [(None, trained) for trained in stack.train(trainings)]
            return stack.gradients([job for job in jobs if isinstance(job, GradientJob)])
        except RaggedBatches as ragged:
            if self._asked == "stacked":
                raise ConfigError(f"train.together=stacked: {ragged}. Use train.together=auto.") from ragged
            self._give_back()
            self.how, self._why, self._untold = "apart", str(ragged), True
            if not trainings:
                return [job() for job in jobs]
            return [(None, _rest(job, taken)) for job, taken in zip(trainings, ragged.taken, strict=True)]

    # ------------------------------------------------------------------------------------------------------------ the choice

    def _settle(self, jobs: Sequence[ComputeJob]) -> None:
        self._settled, self._untold = True, self._before is None  # else the log says so already
        refused = why_not_stackable(jobs[0].replica)
        if self.how == "stacked" and refused:
            raise ConfigError(f"train.together=stacked: {refused}. Use train.together=auto.")
        if self._before is not None:
            self._one = self._stack(jobs[0].replica, 1) if self._before["one"] else None
            self._all = self._stack(jobs[0].replica, self._rows) if self._before["all"] else None
            self._before = None
        elif self.how == "stacked":
            self._one = self._stack(jobs[0].replica, 1)
            self._all = self._stack(jobs[0].replica, self._rows) if self._rows > 1 else None
            if not jobs[0].replica.device.startswith("cuda"):
                self._pays_from = 1  # who computes at the same time, which depends on where a run was cut, changes no bits then
        else:
            self.how, self._why = "apart", refused
            if not refused:
                self._measure(jobs)

    def _stack(self, replica: LocalReplica, rows: int) -> VmapStack | None:
        """None of one row, if a replica does as well by itself."""
        if rows == 1 and not uses_cuda_graphs(replica, self._compiled):
            return None
        return VmapStack(replica, rows, self._loss, compiled=self._compiled)

    def _measure(self, jobs: Sequence[ComputeJob]) -> None:
        replica, batch = jobs[0].replica, jobs[0].first_batch()
        apart_s = _timed(lambda: replica.dry_run(batch), replica.device)
        if _fills(lambda: replica.dry_run(batch), replica.device, apart_s):
            self._why = "one island's batch fills the device"
            return
        self._why = "one island computes at a time"
        self._one, one_s = self._tried(replica, batch, 1, apart_s)
        self._all, all_s = self._tried(replica, batch, self._rows, self._rows * one_s) if self._rows > 1 else (None, 0.0)
        self._pays_from = max(2, int(all_s / one_s) + 1)
        if self._all is not None:
            self.how, self._why = "stacked", "it was measured to be faster"
        elif self._one is not None:
            self._why += "; passes of one island are recorded"

    def _tried(self, replica: LocalReplica, batch: Any, rows: int, otherwise_s: float) -> tuple[VmapStack | None, float]:
        """A stack and the seconds of a pass, if that is faster than what would be done otherwise."""
        stack = None
        try:
            stack = self._stack(replica, rows)
            if stack is None:
                return None, otherwise_s
            stack_s = _timed(lambda: stack.dry_run([batch] * rows), replica.device)
            stack.reserve_moments()
        except Exception as error:  # whatever a module does that cannot be stacked, or no room for it
            self._why = f"stacked it fails: {type(error).__name__} {str(error).partition(chr(10))[0]}"
            if stack is not None:
                stack.close()
            return None, otherwise_s
        self._why = "it was measured to be faster"
        if stack_s < otherwise_s:
            return stack, stack_s
        stack.close()
        return None, otherwise_s


def _rest(job: TrainJob, taken: ComputeResult) -> ComputeResult:
    """The steps of a replica that are left after those."""
    after = len(taken.losses)
    if after == job.steps:
        return taken
    rest = job.replica.train(job.steps, job.work, after)
    return ComputeResult([*taken.losses, *rest.losses], taken.tokens + rest.tokens)


def _alike(jobs: Sequence[ComputeJob]) -> list[list[int]]:
    """Numbers of jobs that can be computed together."""
    groups: dict[Any, list[int]] = {}
    for number, job in enumerate(jobs):
        kind = "training" if isinstance(job, TrainJob) else f"gradient of 1/{job.work.pieces}"
        groups.setdefault(kind, []).append(number)
    return list(groups.values())


def _timed(compute: Callable[[], object], device: str) -> float:
    """Seconds of one call, of several after those that warm up."""
    for _ in range(_WARM):
        compute()
    _wait_for(device)
    start_s = time.perf_counter()
    for _ in range(_TIMED):
        compute()
    _wait_for(device)
    return (time.perf_counter() - start_s) / _TIMED


def _fills(compute: Callable[[], object], device: str, pass_s: float) -> bool:
    """Whether one island's pass keeps the device busy."""
    if not device.startswith("cuda"):
        return pass_s > _FILLED_S
    start_s = time.perf_counter()
    compute()
    told_s = time.perf_counter() - start_s
    _wait_for(device)
    return told_s < _FILLED_SHARE * (time.perf_counter() - start_s)


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
