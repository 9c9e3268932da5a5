"""Batched computing of islands that share one device: stacked by vmap or one after the other, as measured to be faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from atoll.core.errors import ConfigError
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import ComputeJob, ComputeResult, GradientJob, LocalReplica, TrainJob
from atoll.replica.vmap_stack import RaggedBatches, VmapStack, uses_cuda_graphs, why_not_stackable

BatchMode = Literal["auto", "stacked", "apart"]
_WARMUP_PASSES, _TIMED_PASSES = 2, 3
"""Passes of a measurement. The first ones compile."""
_FILLED_S = 0.1  # a pass that takes a CPU this long gains nothing in a stack
_FILLED_SHARE = 0.5
"""A pass whose kernels the host has launched within this share of its time keeps the GPU busy, and gains nothing in a stack."""


class BatchedCompute:
    """Computes the jobs of all islands on one device: `stacked`, one after the other (`apart`), or `auto` for the faster one. At
    most `rows` islands compute at a time. `loss` is the workload's; `compiled`: stacks compile it. `on_decision` is called
    once with the decision and its reason."""

    def __init__(self, how: BatchMode, rows: int, loss: Loss, *, compiled: bool, on_decision: Callable[[str, str], object]) -> None:
        self.how = how  # decided at the first jobs
        self._requested = how
        self._why, self._on_decision, self._unreported = "it was asked for", on_decision, False
        self._rows, self._loss, self._compiled = rows, loss, compiled
        self._decided = how == "apart"
        self._one: VmapStack | None = None  # for one island at a time, where a CUDA graph is faster than the replica's own passes
        self._all: VmapStack | None = None
        self._min_jobs = 2  # the fewest jobs that are faster in a stack
        self._restored: dict[str, Any] | None = None  # the decision of a run before it was interrupted

    def __call__(self, jobs: Sequence[ComputeJob]) -> list[tuple[Any, Any]]:
        """The results of these jobs, in order."""
        groups: dict[int, list[int]] = {}  # training, or gradients of equal pieces, fit in one stack
        for number, job in enumerate(jobs):
            groups.setdefault(0 if isinstance(job, TrainJob) else job.work.pieces, []).append(number)
        answers: dict[int, tuple[Any, Any]] = {}
        for group in groups.values():
            for start in range(0, len(group), self._rows):
                part = group[start : start + self._rows]
                answers.update(zip(part, self._compute([jobs[number] for number in part]), strict=True))
        return [answers[number] for number in range(len(jobs))]

    def report(self) -> None:
        """Reports a new decision."""
        if self._unreported:
            self._unreported = False
            self._on_decision(self.how, self._why)

    def close(self) -> None:
        """Frees the stacks. A later job makes them again, as decided."""
        if self._decided and self._requested != "apart":
            self._restored, self._decided = self.to_part(), False
        self._free_stacks()

    def _free_stacks(self) -> None:
        for stack in (self._one, self._all):
            if stack is not None:
                stack.close()
        self._one = self._all = None

    def to_part(self) -> dict[str, Any]:
        """The decision, for a checkpoint: a resumed run computes in the same way, with the same rounding."""
        stacks = {"one": self._one is not None, "all": self._all is not None}
        return self._restored or {"how": self.how, "decided": self._decided, "min_jobs": self._min_jobs, **stacks}

    def from_part(self, part: dict[str, Any]) -> None:
        if part["decided"]:
            self.how, self._min_jobs, self._restored = part["how"], part["min_jobs"], part

    def _compute(self, jobs: Sequence[ComputeJob]) -> Sequence[tuple[Any, Any]]:
        if not self._decided:
            self._decide(jobs)
        if self._all is not None and len(jobs) >= self._min_jobs:
            return self._in(self._all, jobs, self._min_jobs)
        return [self._alone(job) for job in jobs]

    def _alone(self, job: ComputeJob) -> tuple[Any, Any]:
        return job() if self._one is None else self._in(self._one, [job])[0]

    def _in(self, stack: VmapStack, jobs: Sequence[ComputeJob], least: int = 1) -> Sequence[tuple[Any, Any]]:
        """Computes jobs of one kind in a stack. Islands that train longer than the others take the steps that fewer than `least`
        have left one after the other. If batches differ in shape, these jobs and all later ones run apart."""
        trainings = [job for job in jobs if isinstance(job, TrainJob)]
        try:
            if trainings:
                taken = stack.train(trainings, least)
                return [job.result(self._rest(job, before)) for job, before in zip(trainings, taken, strict=True)]
            return stack.gradients([job for job in jobs if isinstance(job, GradientJob)])
        except RaggedBatches as ragged:
            if self._requested == "stacked":
                raise ConfigError(f"train.together=stacked: {ragged}. Use train.together=auto.") from ragged
            self._free_stacks()
            self.how, self._why, self._unreported = "apart", str(ragged), True
            if not trainings:
                return [job() for job in jobs]
            return [job.result(self._rest(job, before)) for job, before in zip(trainings, ragged.results, strict=True)]

    def _rest(self, job: TrainJob, taken: ComputeResult) -> ComputeResult:
        """Takes the steps of a job that are left after those `taken`."""
        after = job.after + len(taken.losses)
        if after == job.steps:
            return taken
        rest: ComputeResult = self._alone(replace(job, after=after))[1]
        return ComputeResult([*taken.losses, *rest.losses], taken.tokens + rest.tokens)

    def _decide(self, jobs: Sequence[ComputeJob]) -> None:
        self._decided, self._unreported = True, self._restored is None  # the log has a restored decision already
        replica = jobs[0].replica
        refused = why_not_stackable(replica)
        if self.how == "stacked" and refused:
            raise ConfigError(f"train.together=stacked: {refused}. Use train.together=auto.")
        if self._restored is not None:
            self._one = self._stack(replica, 1) if self._restored["one"] else None
            self._all = self._stack(replica, self._rows) if self._restored["all"] else None
            self._restored = None
        elif self.how == "stacked":
            self._one, self._all = self._stack(replica, 1), self._stack(replica, self._rows) if self._rows > 1 else None
            if not replica.device.startswith("cuda"):
                self._min_jobs = 1  # so that the number of jobs, which depends on where a run was resumed, changes no bits
            elif self._one is not None and self._all is not None:
                one_s, all_s = self._pass_s(self._one, jobs[0]), self._pass_s(self._all, jobs[0])
                self._min_jobs = fewest_jobs(one_s, all_s, self._rows)
        else:
            self.how, self._why = "apart", refused
            if not refused:
                self._measure(replica, jobs[0].first_batch())

    def _stack(self, replica: LocalReplica, rows: int) -> VmapStack | None:
        """None for one row, if a replica is as fast by itself."""
        if rows == 1 and not uses_cuda_graphs(replica, self._compiled):
            return None
        return VmapStack(replica, rows, self._loss, compiled=self._compiled)

    def _measure(self, replica: LocalReplica, batch: Any) -> None:
        apart_s = _seconds(lambda: replica.dry_run(batch), replica.device)
        if _fills(lambda: replica.dry_run(batch), replica.device, apart_s):
            self._why = "one island's batch fills the device"
            return
        self._why = "one island computes at a time"
        self._one, one_s = self._try_stack(replica, batch, 1, apart_s)
        self._all, all_s = self._try_stack(replica, batch, self._rows, self._rows * one_s) if self._rows > 1 else (None, 0.0)
        self._min_jobs = fewest_jobs(one_s, all_s, self._rows)
        if self._all is not None:
            self.how = "stacked"
        elif self._one is not None:
            self._why += "; passes of one island are CUDA graphs"

    def _pass_s(self, stack: VmapStack, job: ComputeJob) -> float:
        batch = job.first_batch()
        return _seconds(lambda: stack.dry_run([batch] * len(stack)), job.replica.device)

    def _try_stack(self, replica: LocalReplica, batch: Any, rows: int, otherwise_s: float) -> tuple[VmapStack | None, float]:
        """A stack and the seconds of its pass, if that is faster than `otherwise_s`."""
        stack = None
        try:
            stack = self._stack(replica, rows)
            if stack is None:
                return None, otherwise_s
            stack_s = _seconds(lambda: stack.dry_run([batch] * rows), replica.device)
            stack.reserve_moments()
            self._why = "it was measured to be faster"
            if stack_s < otherwise_s:
                return stack, stack_s
        except Exception as error:  # an operation without a vmap rule, or too little memory
            self._why = f"stacked it fails: {type(error).__name__} {str(error).partition(chr(10))[0]}"
        if stack is not None:
            stack.close()
        return None, otherwise_s


def fewest_jobs(one_s: float, all_s: float, rows: int) -> int:
    """The fewest jobs that a stack computes sooner than a pass for each. A pass of one island takes `one_s`, and one of all rows
    `all_s`, whether the rows have a job or not. As many jobs as there are rows are always stacked.

    >>> fewest_jobs(1.0, 2.5, rows=4), fewest_jobs(1.0, 4.2, rows=4), fewest_jobs(1.0, 0.8, rows=4)
    (3, 4, 2)
    """
    return min(max(2, rows), max(2, int(all_s / one_s) + 1))


def _seconds(compute: Callable[[], object], device: str) -> float:
    """Mean seconds of a call, after warm-up."""
    for _ in range(_WARMUP_PASSES):
        compute()
    _wait_for(device)
    start_s = time.perf_counter()
    for _ in range(_TIMED_PASSES):
        compute()
    _wait_for(device)
    return (time.perf_counter() - start_s) / _TIMED_PASSES


def _fills(compute: Callable[[], object], device: str, pass_s: float) -> bool:
    """Whether a pass of one island keeps the device busy."""
    if not device.startswith("cuda"):
        return pass_s > _FILLED_S
    start_s = time.perf_counter()
    compute()
    launched_s = time.perf_counter() - start_s
    _wait_for(device)
    return launched_s < _FILLED_SHARE * (time.perf_counter() - start_s)


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
