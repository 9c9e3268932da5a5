"""What exists while a block is open: an algorithm's rounds over a user's module, and lines to the other islands."""

from __future__ import annotations

import atexit
from threading import Event
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree, forget_spare_buffers
from atoll.core.protocols import Work
from atoll.core.state_packing import pack
from atoll.engines.processes.communication_thread import CommunicationThread, Request
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.wall_clock import ExchangeTimeout
from atoll.loop.handshake import Entry, check_optimizer
from atoll.loop.module_weights import SlicedWeights, Weights
from atoll.loop.nonfinite_guard import Soundness
from atoll.loop.notices import say
from atoll.loop.optimizer import IslandsOptimizer, dialled
from atoll.loop.peers import LoopPeers
from atoll.loop.replica import LoopReplica
from atoll.loop.rounds import Rounds
from atoll.loop.settings import Settings
from atoll.loop.state_dict import Saved, unpack_state
from atoll.loop.topology import Place, find_place
from atoll.loop.uneven_inputs import Company
from atoll.replica.flat_parameters import ModuleWeights
from atoll.replica.master_weights import check_exchange_dtype

_LAST_WORDS_S = 1.0
"""How long a process that ends waits for its last words to be posted, which they are at once unless an exchange is stuck."""


class Live:
    """An open block.

    Args:
        settings: what was asked for.
        optimizer: what the user steps, where the algorithm steps by itself.
        saved: what to go on from; none to begin.
    """

    def __init__(self, settings: Settings, optimizer: IslandsOptimizer | None, saved: Saved | None) -> None:
        self._settings, self._optimizer = settings, optimizer
        self._module = ModuleWeights(settings.model)
        check_exchange_dtype(settings.algorithm, self._module.layout)
        check_optimizer(settings, self._module, optimizer)
        self.place = find_place(settings.mesh, settings.limit_s)
        self._check_whole()
        self._line = CommunicationThread(str(self._module.device))
        self._weights = self._speaks_for()
        self._replica = LoopReplica(self._module, self._weights, settings.form)
        self._limit = ExchangeTimeout(settings.limit_s)
        self._told_s: float | None = None
        """The limit that was last told."""
        company = self._company = _company(settings, self.place)
        soundness = Soundness(self.place.island, company, settings.counted, self.place.inside)
        peers = ProcessPeers(company, self._line, self._work, self._weights.layout, timeout=self._limit, on_exchange=soundness.note)
        self._peers = LoopPeers(peers, company, self._replica, soundness)
        self._algorithm = settings.algorithm if optimizer is None else dialled(settings.algorithm, optimizer.dial)
        self._rounds = Rounds(self._algorithm, self._replica, self._peers, self._line, company, soundness, self._between)
        self._entry = Entry(settings, self.place, self._module, self._weights, self._line)
        self._tell_limit()
        try:
            self._entry.agree(saved)
            self.begin(saved)
        except BaseException:
            self.abandon()
            raise

    def _check_whole(self) -> None:
        if self._module.sharded and self.place.inside is None:
            raise ConfigError(
                "the model is sharded by FSDP2, over processes that atoll takes for islands. Say which of them are one island: "
                'mesh=init_device_mesh("cuda", (islands, devices), mesh_dim_names=("island", "device")).'
            )

    def _speaks_for(self) -> Weights:
        inside = self.place.inside
        return self._module if inside is None or self._module.sharded else SlicedWeights(self._module, inside, self._line)

    # -------------------------------------------------------------------------------------------------------------- beginning

    def load(self, saved: Saved) -> None:
        """Go on from what was saved, with the weights that the module has now. All islands do so together."""
        self._entry.agree_on(saved)
        self.begin(saved)

    def begin(self, saved: Saved | None) -> None:
        """Begin, or go on from what was saved, up to where the user is waited for."""
        params = self._weights.read().wide()
        state = self._algorithm.init(params, self._peers)
        if saved is not None:
            state = unpack_state(saved, state, **self._where())
            if self._settings.form == "train":
                saved.check_module(self._module.read(), **self._where())
                self._replica.go_on_from(saved.taken)
        if self._settings.sharded:
            self._replica.load(self._line.run(self._peers.all_gather(self._algorithm.held(state))))
        self._sent_before = self.place.between.sent_bytes
        if self._optimizer is not None:
            self._optimizer.read_dial()
        self._rounds.begin(state, saved.rounds if saved else 0)

    def _work(self, steps: int, batches: int, pieces: int) -> Work:
        """The user's loader hands out the data."""
        return Work(shard=self.place.island, start=0, schedule=0, examples=self._settings.examples or 1, pieces=pieces)

    # ------------------------------------------------------------------------------------------------------------ in the block

    def stepped(self) -> None:
        """The user's optimizer has taken a step."""
        self._check_sound()
        self._rounds.go_on()

    def brought(self, tokens: int | None) -> None:
        """The user has brought the gradients of a micro-batch."""
        assert self._optimizer is not None
        self._check_sound()
        self._replica.bring(tokens)
        if not self._peers.launched:  # what is on its way was put there with the old rate
            self._optimizer.read_dial()
        self._rounds.go_on()

    def _between(self, rounds: int) -> None:
        self._tell_limit()
        if self._optimizer is not None:
            self._optimizer.read_dial()
            self._optimizer.show(rounds)

    def _tell_limit(self) -> None:
        """The first process says it on entry, and when it has changed a lot."""
        limit_s, place = self._limit.timeout_s, self.place
        if place.islands == 1 or place.island or place.device or (self._told_s and self._told_s / 2 < limit_s < self._told_s * 2):
            return
        self._told_s = limit_s
        say(f"an exchange of {place.islands} islands may take {limit_s:g} s ({self._limit.reason}). limit_s sets another limit.")

    def _check_sound(self) -> None:
        if not self._rounds.waits:
            raise ConfigError(
                "an exchange failed before, or training diverged, and this island has come apart from the others. Leave the block."
            )

    @property
    def state(self) -> Any:
        return self._rounds.state

    @property
    def rounds(self) -> int:
        return self._rounds.number

    @property
    def present(self) -> int:
        return self._company.size

    @property
    def sent_bytes(self) -> int:
        return self.place.between.sent_bytes - self._sent_before

    def saved(self, steps: int) -> Saved:
        taken = self._replica.taken
        weights = self._module.read().digest() if taken and self._settings.form == "train" else ""
        return Saved(rounds=self.rounds, steps=steps, taken=taken, weights=weights, packed=pack(self.state), **self._where())

    def _where(self) -> dict[str, int]:
        place = self.place
        return {"island": place.island, "islands": place.islands, "device": place.device, "devices": place.devices}

    # ---------------------------------------------------------------------------------------------------------------- leaving

    def finish(self) -> None:
        """Play to the end with the others, and leave the agreed weights in the module."""
        self._check_sound()
        self._rounds.finish()
        params: Tree = self.state.params
        if self._settings.sharded:
            params = self._line.run(self._peers.all_gather(params.cast(self._weights.layout.dtype)))
        self._replica.begin_round()
        self._replica.load(params)
        self._line.close()
        self.place.close()
        forget_spare_buffers()

    def abandon(self) -> None:
        """Leave at once. The others hear of it at their next exchange, and nobody waits for that here."""
        self.place.departures.announce()
        # Slices are gathered without a word before it: who breaks off in the middle of that has nothing left to say.
        if self._rounds.waits or not self._settings.sharded:
            said = Event()
            self._line.launch(self._goodbye(said))
            # A thread that is still in torch when Python is taken down takes the process down with it, by abort().
            atexit.register(said.wait, _LAST_WORDS_S)
        self._rounds.close()
        self._line.close(wait=False)
        forget_spare_buffers()

    async def _goodbye(self, said: Event) -> None:
        try:
            words = await Request(self._company.say_goodbye)
            # Kept until the process ends, which waits for nobody to hear them: the others then find in the store that it left.
            atexit.register(_let_go, words)
        finally:
            said.set()


def _let_go(words: object) -> None:
    """Of last words, when there is nobody left to say them."""


def _company(settings: Settings, place: Place) -> Company:
    needs_all = None
    if settings.sharded:
        needs_all = "its slice of the optimizer's state went with it"
    elif place.devices > 1:
        needs_all = "with several devices per island the others cannot tell whether all of them left"
    together = settings.finish == "together"
    return Company(place.between, left=place.departures.has_left, together=together, needs_all=needs_all)
