"""What exists while a block is open: an algorithm's rounds over a user's module, and lines to the other islands."""

from __future__ import annotations

import atexit
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from atoll.engines.dist.clock import Limit
from atoll.engines.dist.driving import Line, Request
from atoll.engines.dist.peers import DistPeers
from atoll.engines.modules import ModuleWeights
from atoll.errors import CheckpointError, ConfigError
from atoll.loop.company import Company
from atoll.loop.optimizer import IslandsOptimizer, dialled
from atoll.loop.peers import LoopPeers
from atoll.loop.places import Place, find_place
from atoll.loop.replica import LoopReplica
from atoll.loop.rounds import Rounds
from atoll.loop.saving import Saved, unpack_state
from atoll.loop.settings import Settings
from atoll.loop.weights import SlicedWeights, Weights
from atoll.protocols import Work
from atoll.runs.pack import pack
from atoll.tree import Tree, forget_spare_buffers

_LOG = logging.getLogger("atoll")


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
        _check_precision(settings, self._module)
        self.place = find_place(settings.mesh)
        self._line = Line(str(self._module.device))
        self._weights = self._speaks_for()
        self._replica = LoopReplica(self._module, self._weights, settings.form)
        limit = Limit(settings.limit_s)
        company = self._company = _company(settings, self.place)
        peers = DistPeers(company, self._line, self._work, self._weights.layout, limit=limit)
        self._peers = LoopPeers(peers, company, self._replica)
        self._algorithm = settings.algorithm if optimizer is None else dialled(settings.algorithm, optimizer.dial)
        self._rounds = Rounds(self._algorithm, self._replica, self._peers, self._line, company, self._between)
        where = f"island {self.place.island} of {self.place.islands}"
        _LOG.info("%s: an exchange may take %g s (%s)", where, limit.limit_s, limit.why)
        try:
            self._agree_on_the_start(saved)
            self.begin(saved)
        except BaseException:
            self.abandon()
            raise

    def _speaks_for(self) -> Weights:
        inside = self.place.inside
        if self._module.sharded and inside is None:
            raise ConfigError(
                "the model is sharded by FSDP2, over processes that atoll takes for islands. Say which of them are one island: "
                'mesh=init_device_mesh("cuda", (islands, devices), mesh_dim_names=("island", "device")).'
            )
        return self._module if inside is None or self._module.sharded else SlicedWeights(self._module, inside, self._line)

    # -------------------------------------------------------------------------------------------------------------- beginning

    def _agree_on_the_start(self, saved: Saved | None) -> None:
        """All islands begin with the same settings and the same weights, or go on from the same round."""
        params = self._weights.read()
        text = f"{self._settings.text} {[(piece.name, piece.shape, piece.dtype) for piece in params.layout.pieces]}"
        mine = [_number(text.encode()), saved is not None, saved.rounds if saved else 0, self._fingerprint(params)]
        told = self._line.call(lambda: self.place.between.tell(*mine))
        if any(row[0] != told[0][0] for row in told):
            raise ConfigError(
                f"islands were given different models, algorithms or ways to finish; here it is {self._settings.text}."
            )
        _check_together([row[1:3] for row in told])
        differ = any(row[3] != told[0][3] for row in told)
        if self.place.inside is not None:  # what is handed out to one device concerns all of its island
            inside = self.place.inside
            differ = any(row[0] for row in self._line.call(lambda: inside.tell(differ)))
        if differ and saved is None:
            self._hand_out(params)

    def _hand_out(self, params: Tree) -> None:
        """The first island's weights are everybody's, those that are not trained too."""
        between = self.place.between
        self._line.call(lambda: between.hand_out(params.flat))
        self._weights.write(params)
        with torch.no_grad():
            for tensor in self._module.others():
                flat = tensor.reshape(-1).contiguous()
                self._line.call(lambda flat=flat: between.hand_out(flat))  # type: ignore[misc]
                tensor.copy_(flat.view(tensor.shape))

    def _fingerprint(self, params: Tree) -> float:
        state = hashlib.blake2b(params.digest().encode())
        for tensor in self._module.others():
            state.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return _number(state.digest())

    def load(self, saved: Saved) -> None:
        """Go on from what was saved, with the weights that the module has now. All islands do so together."""
        _check_together(self._line.call(lambda: self.place.between.tell(True, saved.rounds)))
        self.begin(saved)

    def begin(self, saved: Saved | None) -> None:
        """Begin, or go on from what was saved, up to where the user is waited for."""
        place, params = self.place, self._weights.read().wide()
        state = self._algorithm.init(params, self._peers)
        if saved is not None:
            state = unpack_state(
                saved, state, island=place.island, islands=place.islands, device=place.device, devices=place.devices
            )
            if self._settings.form == "train":
                self._replica.go_on_from(saved.taken)
        if self._settings.sharded:
            self._replica.load(self._line.drive(self._peers.all_gather(self._algorithm.held(state))))
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
        if self._optimizer is not None:
            self._optimizer.read_dial()
            self._optimizer.show(rounds)

    def _check_sound(self) -> None:
        if not self._rounds.waits:
            raise ConfigError("an exchange failed before, and this island has come apart from the others. Leave the block.")

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
        place, taken = self.place, self._replica.taken
        where = {"island": place.island, "islands": place.islands, "device": place.device, "devices": place.devices}
        return Saved(rounds=self.rounds, steps=steps, taken=taken, packed=pack(self.state), **where)

    # ---------------------------------------------------------------------------------------------------------------- leaving

    def finish(self) -> None:
        """Play to the end with the others, and leave the agreed weights in the module."""
        self._check_sound()
        self._rounds.finish()
        params: Tree = self.state.params
        if self._settings.sharded:
            params = self._line.drive(self._peers.all_gather(params.cast(self._weights.layout.dtype)))
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
            self._line.launch(self._goodbye())
        self._rounds.close()
        self._line.close(wait=False)
        forget_spare_buffers()

    async def _goodbye(self) -> None:
        words = await Request(self._company.say_goodbye)
        # Kept until the process ends, which waits for nobody: the others then find in the store that it left.
        atexit.register(_let_go, words)


def _check_together(told: Sequence[Sequence[float]]) -> None:
    """Whether each island goes on from something saved, and from which round."""
    if any(row != told[0] for row in told):
        rounds = [f"round {number:g}" if saved else "nothing" for saved, number in told]
        raise CheckpointError(f"islands would go on from {', '.join(rounds)}. Load on all of them what was saved at one time.")


def _let_go(words: object) -> None:
    """Of last words, when there is nobody left to say them."""


def _company(settings: Settings, place: Place) -> Company:
    needs_all = None
    if settings.sharded:
        needs_all = "its slice of the optimizer's state went with it"
    elif place.devices > 1:
        needs_all = "with several devices per island the others cannot tell whether all of them left"
    together, given = settings.finish == "together", settings.limit_s is not None
    return Company(place.between, left=place.departures.has_left, together=together, needs_all=needs_all, limit_given=given)


def _check_precision(settings: Settings, module: ModuleWeights) -> None:
    dtypes = {piece.dtype for piece in module.layout.pieces}
    if settings.sharded and len(dtypes) > 1 and getattr(settings.algorithm, "wire", "") == "own":
        raise ConfigError(
            f"the model has parameters in {sorted(map(str, dtypes))}, and slices of it travel in the precision of the model, which "
            f'differs from slice to slice. Give the algorithm wire="fp32".'
        )


def _number(data: bytes) -> float:
    """A fingerprint that a double holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(data, digest_size=6).digest()))
