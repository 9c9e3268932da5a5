"""The process that drives a run on Ray: it starts the hub and the workers, looks after them, shows what happens, and judges.

The hub keeps the books and the log, beside this process on the same machine. Judging is done here, so that the hub is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from atoll.engines.ray.actors import start_hub
from atoll.engines.ray.crew import Crew
from atoll.engines.ray.orders import HubOrder, News, ToJudge
from atoll.engines.ray.reaching import Reach
from atoll.engines.ray.wire import own_tree, tensors_of
from atoll.engines.ray.worker import WorkerOrder
from atoll.errors import TrainingDiverged
from atoll.events import Progress, RunFinished
from atoll.protocols import Sink
from atoll.tree import Tree

_PATIENCE_S = 0.5
_LAST_SAVE_S = 30.0


class RayEngine:
    """Runs one asynchronous algorithm by real processes.

    Args:
        ray: the library, connected.
        order: what the hub is made of.
        worker: what the worker of this place and life is made of.
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
        cpus: float,
        gpus: float,
        evaluate: Callable[[Tree, Mapping[str, Tensor]], Mapping[str, float]],
        sink: Sink,
        steps: int,
        limit_s: float,
        say: Callable[[str], object],
    ) -> None:
        self._ray, self._order, self._worker = ray, order, worker
        self._cpus, self._gpus = cpus, gpus
        self._evaluate, self._sink, self._steps, self._say = evaluate, sink, steps, say
        self._hub = start_hub(ray, order)
        self._reach = Reach(ray, self._hub, limit_s=limit_s, say=say)
        self._crew: Crew | None = None
        self._epoch, self._heard, self._handed = -1, 0, 0

    def run(self) -> tuple[RunFinished, Tree, dict[str, Tensor]]:
        """Until the run has its local updates. The figures, the hub's weights, and buffers."""
        order = self._order
        self._crew = Crew(
            self._ray,
            self._hub,
            workers=order.workers,
            order=self._worker,
            cpus=self._cpus,
            gpus=self._gpus,
            say=self._say,
        )
        while True:
            while not self._turn(self._crew):
                pass
            epoch, finished = self._epoch, self._reach.ask("finish")
            (reference,), buffers = self._reach.ask("outcome")
            self._show(self._news(0.0))
            if finished is not None and self._epoch == epoch:  # else that hub is gone, and the next begins where it had saved
                params = own_tree(self._ray.get(reference), order.layout, order.dtype, "cpu")
                return finished, params, tensors_of(buffers)

    def _turn(self, crew: Crew) -> bool:
        """Hear the news, and do what they ask for. Whether the run is over."""
        before, news = self._epoch, self._news(_PATIENCE_S)
        if news.epoch != before and before != -1:  # another hub, which may believe in workers that have died since
            self._reach.ask("census", crew.lives)
        self._show(news)
        if news.error is not None:
            raise news.error
        for one in news.to_judge:
            self._judge(one)
            self._handed = one.number
        if not news.done:
            crew.look_after(news.local_updates, news.seats, lambda number, life: self._reach.ask("left", number, life))
        return news.done and news.judged

    def _news(self, patience_s: float) -> News:
        news: News = self._reach.ask("news", self._epoch, self._heard, self._handed, patience_s)
        if news.epoch != self._epoch:
            self._epoch, self._handed = news.epoch, 0
        self._heard = news.heard
        return news

    def _show(self, news: News) -> None:
        for event in news.events:
            self._sink.emit(event)
        done = news.local_updates * self._steps // max(1, self._order.updates)
        self._sink.emit(Progress(phase="training", done=min(done, self._steps), total=self._steps))

    def _judge(self, one: ToJudge) -> None:
        """Weights that are lost with a dead hub are not judged."""
        try:
            bits = self._ray.get(one.weights[0])
        except self._reach.gone:
            return
        params = own_tree(bits, self._order.layout, self._order.dtype, "cpu")
        if not params.is_finite():
            raise TrainingDiverged(
                f"the hub's weights are no longer finite after {one.due.round} arrivals, though every delta was. The run stops; "
                f"what was saved stands. Lower the outer learning rate, or the weight of each arrival."
            )
        metrics = self._evaluate(params, tensors_of(dict(one.buffers)))
        self._reach.ask("judged", one.number, dict(metrics))
        params.release()

    def close(self, *, save: bool) -> None:
        """Ends workers and hub; before that, one that has not finished is asked to save."""
        if self._crew is not None:
            self._crew.dismiss()
        if save:
            with suppress(Exception):  # the run ends for another reason, and an older checkpoint stands
                self._ray.get(self._hub.save.remote(), timeout=_LAST_SAVE_S)
        self._ray.kill(self._hub)
