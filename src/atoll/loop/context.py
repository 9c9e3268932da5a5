"""What exists while a block is open: the algorithm's rounds, the user's module, and the links to the other islands."""

from __future__ import annotations

import atexit
from collections.abc import Coroutine
from threading import Event
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree, forget_spare_buffers
from atoll.core.protocols import Work
from atoll.core.pytree import recycle
from atoll.core.state_packing import pack
from atoll.engines.processes.communication_thread import CommunicationThread, Request
from atoll.engines.replicated_state import borrowed, owned
from atoll.engines.wall_clock import ExchangeTimeout
from atoll.loop.handshake import check_same_round, handshake
from atoll.loop.nonfinite_guard import NonFiniteGuard
from atoll.loop.optimizer import IslandsOptimizer
from atoll.loop.process_groups import find_topology, log_info
from atoll.loop.replica import LoopReplica, UserStep, WeightSlice
from atoll.loop.settings import LoopSettings
from atoll.loop.state_dict import LoopCheckpoint
from atoll.loop.uneven_inputs import UnevenPeers
from atoll.replica.flat_parameters import ModuleWeights
from atoll.replica.master_weights import check_exchange_dtype

_LEAVE_MESSAGE_S = 1.0
"""How long an ending process waits until its leave message is posted. It is posted at once, unless an exchange is stuck."""


class LoopContext:
    """An open block. Runs the algorithm's rounds as far as the user's steps allow.

    The user's thread computes; a communication thread exchanges. `optimizer` is what the user steps, if the algorithm steps.
    """

    def __init__(self, settings: LoopSettings, optimizer: IslandsOptimizer | None, checkpoint: LoopCheckpoint | None) -> None:
        self._settings, self._optimizer = settings, optimizer
        self._module = ModuleWeights(settings.model)
        check_exchange_dtype(settings.algorithm, self._module.layout)
        settings.check_parameters(self._module, optimizer)
        self.topology = find_topology(settings)
        intra_island = self.topology.intra_island
        if self._module.sharded and intra_island is None:
            raise ConfigError(
                "the model is sharded by FSDP2 over processes that atoll treats as islands. Assign them to islands: "
                'mesh=init_device_mesh("cuda", (islands, devices), mesh_dim_names=("island", "device")).'
            )
        self._thread = CommunicationThread(str(self._module.device))
        self._weights: ModuleWeights | WeightSlice = self._module
        if intra_island is not None and not self._module.sharded:
            self._weights = WeightSlice(self._module, intra_island, self._thread)
        self._replica = LoopReplica(self._module, self._weights, settings.stepped_by)
        self._timeout = ExchangeTimeout(settings.limit_s)
        self._logged_limit_s: float | None = None
        self._collectives = self.topology.inter_island
        self._guard = NonFiniteGuard(self.topology.position.island, settings.user_optimizer, intra_island)
        layout, timeout = self._weights.layout, self._timeout
        self._peers = UnevenPeers(self._collectives, self._thread, self._work, layout, timeout, self._replica, self._guard)
        self._algorithm = settings.algorithm if optimizer is None else optimizer.attach(settings.algorithm)
        self._round: Coroutine[Any, Any, Any] | None = None
        self._waits_for_user = False
        self.state: Any = None
        """The State at the start of the present round. No exchange overwrites it, so it can be saved at any time."""
        self.rounds = 0
        """Completed rounds that changed the weights."""
        self._log_limit()
        try:
            handshake(settings, checkpoint, self.topology, self._module, self._weights, self._thread)
            self._start(checkpoint)
        except BaseException:
            self.abandon()
            raise

    def _work(self, steps: int, batches: int, pieces: int) -> Work:
        """The user's loader chooses the data, so positions are not used."""
        island = self.topology.position.island
        return Work(shard=island, start=0, schedule=0, examples=self._settings.examples or 1, pieces=pieces)

    def load(self, checkpoint: LoopCheckpoint) -> None:
        """Resume from a checkpoint with the weights that the module holds now. All islands call it together."""
        check_same_round(checkpoint, self.topology, self._thread)
        self._start(checkpoint)

    def _start(self, checkpoint: LoopCheckpoint | None) -> None:
        params = self._weights.read().wide()
        state = self._algorithm.init(params, self._peers)
        if checkpoint is not None:
            state = checkpoint.unpack_state(state, self.topology.position)
            if self._settings.stepped_by == "user":
                checkpoint.check_module(self._module.read(), self.topology.position)
                self._replica.resume_round(checkpoint.steps_in_round)
        if self._settings.sharded:
            self._replica.load(self._thread.run(self._peers.all_gather(self._algorithm.held(state))))
        self._sent_before = self._collectives.sent_bytes
        if self._optimizer is not None:
            self._optimizer.read_lr()
        self._close_round()
        self.state, self.rounds = state, checkpoint.rounds if checkpoint else 0
        self._begin_round()
        self._advance()

    def user_stepped(self) -> None:
        """The user's optimizer has taken a step."""
        self._check_usable()
        self._advance()

    def user_computed(self, tokens: int | None) -> None:
        """The user has computed the gradients of a micro-batch."""
        assert self._optimizer is not None
        self._check_usable()
        self._replica.accept_gradients(tokens)
        if not self._peers.launched:  # a running background exchange belongs to an update with the old rate
            self._optimizer.read_lr()
        self._advance()

    def _advance(self) -> None:
        """Runs rounds until one waits for the user, or this island has finished."""
        self._waits_for_user = False
        while self._complete_round():
            self._log_limit()
            if self._optimizer is not None:
                self._optimizer.read_lr()
                self._optimizer.show_lr(self.rounds)
            if self._collectives.finished:
                return
            self._begin_round()
        self._waits_for_user = True

    def _begin_round(self) -> None:
        self._replica.begin_round()
        self._peers.begin_round()
        self._round = self._algorithm.round(borrowed(self.state), self._replica, self._peers)

    def _complete_round(self) -> bool:
        """Runs the round until it ends or waits for the user. Returns whether it ended."""
        assert self._round is not None, "no round has begun"
        value: Any = None
        try:
            while not isinstance(request := self._round.send(value), UserStep):
                value = request.call() if request.waits else self._thread.call(request.call)
        except StopIteration as end:
            self._round = None
            self._guard.check_state(end.value)
            before, self.state = self.state, owned(end.value)
            self.rounds += self.state.params is not before.params
            recycle([before], [self.state, self._replica.loaded])
            return True
        return False

    def _close_round(self) -> None:
        if self._round is not None:
            self._round.close()
            self._round = None

    def _log_limit(self) -> None:
        """The first process logs the timeout on entry, and when it has changed by a factor of 2."""
        limit_s, logged_s, position = self._timeout.timeout_s, self._logged_limit_s, self.topology.position
        if position.islands == 1 or position.island or position.device or (logged_s and logged_s / 2 < limit_s < logged_s * 2):
            return
        self._logged_limit_s = limit_s
        log_info(f"timeout of an exchange of {position.islands} islands: {limit_s:g} s ({self._timeout.reason}). Set by limit_s.")

    def _check_usable(self) -> None:
        if not self._waits_for_user:
            raise ConfigError("an exchange failed or training diverged before, so this island is out of step. Leave the block.")

    @property
    def sent_bytes(self) -> int:
        return self._collectives.sent_bytes - self._sent_before

    def checkpoint(self, steps: int) -> LoopCheckpoint:
        in_round = self._replica.steps_done
        digest = self._module.read().digest() if in_round and self._settings.stepped_by == "user" else ""
        position, packed = self.topology.position, pack(self.state)
        return LoopCheckpoint(
            rounds=self.rounds, steps=steps, steps_in_round=in_round, position=position, module_digest=digest, packed=packed
        )

    def finish(self) -> None:
        """Complete the rounds together with the other islands, and leave the agreed weights in the module."""
        try:
            self._check_usable()
            self._replica.exhausted = True
            self._advance()
            params: Tree = self.state.params
            if self._settings.sharded:
                params = self._thread.run(self._peers.all_gather(params.cast(self._weights.layout.dtype)))
            self._replica.begin_round()
            self._replica.load(params)
            self._thread.close()
            self.topology.close()
            forget_spare_buffers()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Leave at once after an exception. The peers learn of it at their next exchange; this process does not wait for them."""
        self._collectives.record_departure()
        # No status message precedes a gather of slices: an island that stops inside of one has no message to replace.
        if self._waits_for_user or not self._settings.sharded:
            posted = Event()
            self._thread.launch(self._post_leave_message(posted))
            # A thread that is inside of torch at interpreter shutdown aborts the process.
            atexit.register(posted.wait, _LEAVE_MESSAGE_S)
        self._close_round()
        self._thread.close(wait=False)
        forget_spare_buffers()

    async def _post_leave_message(self, posted: Event) -> None:
        try:
            handle = await Request(self._collectives.post_leave_message)
            # Holds the message until this process ends. Peers that read later find the record in the store.
            atexit.register(lambda held: None, handle)
        finally:
            posted.set()
