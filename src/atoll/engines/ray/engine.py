"""The process that drives a run on Ray: it starts the hub and the workers, looks after them, shows what happens, and judges.

The hub keeps the books and the log, beside this process on the same machine. Judging is done here, so that the hub is free, and in
a thread of its own, so that whoever dies meanwhile is noticed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from torch import Tensor

from atoll.core.errors import ExchangeFailed, TrainingDiverged
from atoll.core.events import Progress, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink
from atoll.engines.ray.actors import start_hub
from atoll.engines.ray.hub_client import Reach
from atoll.engines.ray.hub_spec import HubOrder, News, ToJudge
from atoll.engines.ray.messages import own_tree, tensors_of
from atoll.engines.ray.worker import WorkerOrder
from atoll.engines.ray.worker_pool import Crew

_PATIENCE_S = 0.5
_LAST_SAVE_S = 30.0
_MOST_RESTARTS = 5  # of the hub in a row, without a newer checkpoint in between


class _Judging(NamedTuple):
    """What is being judged now: of which hub, under which number, and what it comes to."""

    epoch: int
    number: int
    metrics: Future[Mapping[str, float]]


class RayEngine:
    """Runs one asynchronous algorithm by real processes.

    Args:
        ray: the library, connected.
        order: what the hub is made of.
        worker: what the worker of this place and life is made of.
        most: how many workers there may be, if the cluster has room.
        cpus: of each worker.
        gpus: of each worker.
        evaluate: judges weights.
        sink: takes events; the log is the hub's.
        steps: inner steps per island, for progress.
        limit_s: how long a hub that does not answer is waited for.
        say: takes lines on who has died and who is waited for.
    """

    def __init__(
        self,
        *,
        ray: Any,
        order: HubOrder,
        worker: Callable[[int, int], WorkerOrder],
        most: int,
        cpus: float,
        gpus: float,
        evaluate: Callable[[Tree, Mapping[str, Tensor]], Mapping[str, float]],
        sink: Sink,
        steps: int,
        limit_s: float,
        say: Callable[[str], object],
    ) -> None:
        self._ray, self._order, self._worker = ray, order, worker
        self._most, self._cpus, self._gpus = most, cpus, gpus
        self._evaluate, self._sink, self._steps, self._say = evaluate, sink, steps, say
        self._hub = start_hub(ray, order)
        self._reach = Reach(ray, self._hub, limit_s=limit_s, say=say)
        self._crew: Crew | None = None
        self._epoch, self._heard, self._handed = -1, 0, 0
        self._restarts, self._newest = 0, 0
        """Of the hub since it last had a newer checkpoint, and the local updates in that."""
        self._to_judge: deque[ToJudge] = deque()
        self._judging: _Judging | None = None

    def run(self) -> tuple[RunFinished, Tree, dict[str, Tensor]]:
        """Until the run has its local updates. The figures, the hub's weights, and buffers."""
        order = self._order
        self._crew = Crew(
            self._ray,
            self._hub,
            workers=order.workers,
            most=self._most,
            order=self._worker,
            cpus=self._cpus,
            gpus=self._gpus,
            say=self._say,
        )
        while True:
            while not self._turn(self._crew):
                pass
            epoch, finished = self._epoch, self._reach.ask("finish")
            weights, buffers = self._reach.ask("outcome")
            bits = self._reach.fetch(weights)
            self._show(self._news(0.0))
            # Else that hub is gone, and the next begins where it had saved; or its weights are lost, and it publishes them again.
            if finished is not None and bits is not None and self._epoch == epoch:
                return finished, own_tree(bits, order.layout, order.dtype, "cpu"), tensors_of(buffers)

    def _turn(self, crew: Crew) -> bool:
        """Hear the news, and do what they ask for. Whether the run is over."""
        before, news = self._epoch, self._news(self._reach.patience_s(_PATIENCE_S))
        if news.epoch != before and before != -1:
            self._count_restart(news)
            self._reach.ask("census", crew.lives)  # another hub may believe in workers that have died since
        self._show(news)
        if news.error is not None:
            raise news.error
        self._judge()
        if not news.done:
            crew.look_after(news.seats, lambda number, life: self._reach.ask("left", number, life))
            crew.mention(news.silent)
        elif self._judging is not None:
            wait([self._judging.metrics], timeout=_PATIENCE_S)
        return news.done and news.judged

    def _news(self, patience_s: float) -> News:
        news: News = self._reach.ask("news", self._epoch, self._heard, self._handed, patience_s)
        if news.epoch != self._epoch:
            self._epoch, self._handed = news.epoch, 0
            self._to_judge.clear()
        self._heard = news.heard
        for one in news.to_judge:
            self._to_judge.append(one)
            self._handed = one.number
        return news

    def _count_restart(self, news: News) -> None:
        """What kills a hub may be what the next will be brought again."""
        self._restarts = 0 if news.local_updates > self._newest else self._restarts + 1
        self._newest = news.local_updates
        if self._restarts >= _MOST_RESTARTS:
            raise ExchangeFailed(
                f"the hub has died {self._restarts} times in a row before it could save anything new: it goes on from "
                f"{news.local_updates} local updates again and again. What was saved stands. Look at logs/hub.log, and at how much "
                f"memory there is; save more often (--save-every), and resume."
            )

    def _show(self, news: News) -> None:
        for event in news.events:
            self._sink.emit(event)
        done = news.local_updates * self._steps // max(1, self._order.updates)
        self._sink.emit(Progress(phase="training", done=min(done, self._steps), total=self._steps))

    # ------------------------------------------------------------------------------------------------------------- judging

    def _judge(self) -> None:
        """Tell the hub of what was judged, and go on with the next. Whatever is asked of Ray is asked in this thread."""
        if self._judging is not None and self._judging.metrics.done():
            epoch, number, metrics = self._judging
            self._judging = None
            self._reach.ask("judged", epoch, number, dict(metrics.result()))
        if self._judging is None and self._to_judge:
            one = self._to_judge.popleft()
            bits = self._reach.fetch(one.weights)
            if bits is None:
                self._reach.ask("leave_unjudged", self._epoch, one.number)
            else:
                params = own_tree(bits, self._order.layout, self._order.dtype, "cpu")
                self._judging = _Judging(self._epoch, one.number, _aside(lambda: self._judged(one, params)))

    def _judged(self, one: ToJudge, params: Tree) -> Mapping[str, float]:
        if not params.is_finite():
            raise TrainingDiverged(
                f"the hub's weights are no longer finite after {one.due.round} arrivals, though every delta was. The run stops; "
                f"what was saved stands. Lower the outer learning rate, or the weight of each arrival."
            )
        metrics = self._evaluate(params, tensors_of(dict(one.buffers)))
        params.release()
        return metrics

    # ------------------------------------------------------------------------------------------------------------- the end

    def close(self, *, save: bool) -> None:
        """Ends workers and hub; before that, one that has not finished is asked to save."""
        if self._crew is not None:
            self._crew.dismiss()
        if save:
            try:
                saved = self._ray.get(self._hub.save.remote(), timeout=_LAST_SAVE_S)
                why = "" if saved else "it could not; logs/hub.log says why"
            except Exception as error:  # the run ends for another reason, and an older checkpoint stands
                why = f"{type(error).__name__} after up to {_LAST_SAVE_S:g} s"
            if why:
                self._say(
                    f"the hub was asked to save before it ends: {why}. The last checkpoint stands, and what came after is lost."
                )
        self._ray.kill(self._hub)


def _aside(compute: Callable[[], Mapping[str, float]]) -> Future[Mapping[str, float]]:
    """What this computes, in a thread of its own, for which nobody waits when the process ends."""
    future: Future[Mapping[str, float]] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
