"""What exists while a block is open: the algorithm's rounds, the user's module, and the links to the other islands.

On entry islands compare settings and models, and start from the same weights or the same round. A checkpoint is a dictionary of
numbers, text and tensors, which torch.save writes and torch.load reads safely.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.flat_tree import Tree, free_buffer_pool
from atoll.core.layout import Layout, Piece
from atoll.core.nested_trees import recycle
from atoll.core.protocols import Owner, Work, fields_owned
from atoll.core.serialization import Packed, layout_from_json, layout_to_json, pack, unpack
from atoll.engines.communication_thread import CommunicationThread, Request
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.shared_and_sharded_state import borrowed, owned
from atoll.loop.event_recorder import EventRecorder
from atoll.loop.nonfinite_guard import NonFiniteGuard
from atoll.loop.replica import LoopReplica, UserStep, WeightSlice
from atoll.loop.rule_optimizer import IslandsOptimizer
from atoll.loop.settings import LoopSettings
from atoll.loop.topology import GridPosition, find_topology, log_info
from atoll.loop.uneven_inputs import UnevenPeers
from atoll.replica.flat_parameters import ModuleWeights
from atoll.replica.master_weights import check_exchange_dtype

_KIND = "atoll.islands"
_VERSION = 4
_OWN = "own weights"  # among the tensors of the State, whose names have no spaces


@dataclass(frozen=True, kw_only=True)
class LoopCheckpoint:
    """What one process needs to resume, besides the user's model and optimizer."""

    rounds: int
    steps: int  # of the user, in all rounds
    steps_in_round: int  # since the last completed round
    tokens_in_round: int  # that the user has logged for these steps
    position: GridPosition
    module_digest: str  # of the weights in the middle of a round; empty where the State has the weights
    packed: Packed  # the algorithm's State after the last completed round
    own: Tensor | None = None  # this process's weights in the middle of a round, if the module held the agreed ones

    def to_dict(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "packed"}
        tensors = {name: tensor.detach().clone() for name, tensor in self.packed.tensors.items()}
        packed = {"structure": self.packed.structure, "tensors": tensors}
        return {"kind": _KIND, "version": _VERSION, **fields, "position": list(self.position), **packed}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> LoopCheckpoint:
        if given.get("kind") != _KIND or given.get("version") != _VERSION:
            raise CheckpointError(
                f"this is no islands.state_dict() of this version: it has the keys {sorted(map(str, given))[:8]}. Load what "
                f"islands.state_dict() returned, or start without it."
            )
        numbers = {name: int(given[name]) for name in ("rounds", "steps", "steps_in_round", "tokens_in_round")}
        position, packed = GridPosition(*given["position"]), Packed(given["structure"], dict(given["tensors"]))
        own, digest = given.get("own"), str(given["module_digest"])
        return LoopCheckpoint(**numbers, position=position, module_digest=digest, packed=packed, own=own)

    def restore_module(self, module: ModuleWeights, position: GridPosition) -> None:
        """Checks that the module holds the weights of the checkpoint, after loading those that it has itself. Another island's
        checkpoint has a digest of other weights."""
        if self.own is not None and self.own.numel() == module.layout.numel:
            module.write(Tree(module.layout, self.own.to(module.device)))
        weights = module.read()
        if self.module_digest and position == self.position and weights.digest() != self.module_digest:
            raise CheckpointError(
                f"this state was saved in the middle of a round, {self.steps_in_round} steps after the last exchange, and the "
                f"model holds other weights. First load the model's state_dict that was saved with it."
            )

    def unpack_state(self, like: Any, position: GridPosition) -> Any:
        """The algorithm's State for this process; CheckpointError for another algorithm's, or another process's slice."""
        sliced = position.devices > 1 or bool(fields_owned(like, Owner.SHARDED))
        if (sliced and position != self.position) or position.devices != self.position.devices:
            raise CheckpointError(
                f"this state holds a slice, saved by {self.position}. This process is {position}. Load into each process the state "
                f"that it saved, with the same number of processes."
            )
        try:
            return unpack(self.packed, like)
        except CheckpointError as error:
            difference, _, _ = str(error).partition(": it is the checkpoint of")
            raise CheckpointError(
                f"this state was saved with another model or another algorithm ({difference}). Use those, or start without it."
            ) from error


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
        per_round = settings.algorithm.steps_per_round
        self._replica = LoopReplica(
            self._module, self._weights, settings.stepped_by, per_round, settings.weigh, self.topology.intra_island
        )
        self._timeout = ExchangeTimeout(settings.limit_s)
        self._collectives = self.topology.inter_island
        self._guard = NonFiniteGuard(self.topology.position.island, settings.user_optimizer, intra_island)
        self.recorder = EventRecorder(settings, self.topology.position, self.topology.store)
        given = self._work, self._weights.layout, self._timeout, self._replica, self._guard, self.recorder
        self._peers = UnevenPeers(self._collectives, self._thread, *given)
        self._algorithm = settings.algorithm if optimizer is None else optimizer.attach(settings.algorithm)
        self._round: Coroutine[Any, Any, Any] | None = None
        self._waits_for_user = False
        self.state: Any = None
        """The State at the start of the present round. No exchange overwrites it, so it can be saved at any time."""
        self.final_params: Tree | None = None
        """The agreed weights after the last round, once it is complete."""
        self._own: Tree | None = None
        """This island's weights while the module holds the agreed ones."""
        self._round_steps = 0
        """Of the user, since the last completed round."""
        self.rounds = 0
        """Completed rounds that changed the weights."""
        self._log_limit()
        try:
            self._handshake(checkpoint)
            params = sum(math.prod(piece.shape) for piece in self._module.layout.pieces)
            self.recorder.begin(params, resumes=checkpoint is not None)
            if checkpoint is not None and self.recorder.folder is not None:
                log_info(f"the events of the resumed training are in {self.recorder.folder.path}")
            self._start(checkpoint)
        except BaseException:
            self.abandon()
            raise

    def _work(self, steps: int, batches: int, pieces: int) -> Work:
        """The user's loader chooses the data: only seeds of codecs come from this position."""
        island, schedule = self.topology.position.island, self.rounds * self._algorithm.steps_per_round
        return Work(shard=island, start=schedule, schedule=schedule, examples=self._settings.examples or 1, pieces=pieces)

    def load(self, checkpoint: LoopCheckpoint) -> None:
        """Resume from a checkpoint with the weights that the module holds now. All islands call it together."""
        _check_rounds(self._thread.call(lambda: self._collectives.all_gather_on_entry(True, checkpoint.rounds)))
        self._start(checkpoint)

    def _handshake(self, checkpoint: LoopCheckpoint | None) -> None:
        """Compares settings, model and checkpoint. Without a checkpoint all islands then load island 0's weights, if any differ."""
        params, untrained = self._weights.read(), self._module.untrained_tensors()
        comparable, position, fresh = self._settings.comparable, self.topology.position, checkpoint is None
        trained = [(piece.name, piece.shape, piece.dtype) for piece in params.layout.pieces]
        fixed = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in untrained] if fresh else ""
        mine = [_fingerprint(comparable), _fingerprint(f"{trained} {fixed}")]
        mine += [not fresh, checkpoint.rounds if checkpoint else 0, _values_fingerprint(params, self._module) if fresh else 0]
        rows = self._thread.call(lambda: self._collectives.all_gather_on_entry(*mine))
        _check_rounds([row[2:4] for row in rows])
        _check_equal([row[0] for row in rows], "another algorithm or another finish", position, comparable)
        _check_equal([row[1] for row in rows], "another model or other buffers", position, _summary(params.layout))
        differ, intra_island = any(row[4] != rows[0][4] for row in rows), self.topology.intra_island
        if intra_island is not None:  # one device that differs makes all devices of its island take part
            differ = any(row[0] for row in self._thread.call(lambda: intra_island.all_gather_numbers(differ)))
        if differ:
            self._thread.call(lambda: self._collectives.broadcast(params.flat))
            self._weights.write(params)
            self._load_untrained()

    @torch.no_grad()
    def _load_untrained(self) -> None:
        """Loads island 0's frozen weights and buffers."""
        for _, tensor in self._module.untrained_tensors():
            received = tensor.clone(memory_format=torch.contiguous_format)
            self._thread.call(partial(self._collectives.broadcast, received.view(-1).view(torch.uint8)))
            if not torch.equal(received, tensor):
                tensor.copy_(received)

    def _start(self, checkpoint: LoopCheckpoint | None) -> None:
        params = self._weights.read().wide()
        state = self._algorithm.init(params, self._peers)
        if checkpoint is not None:
            state = checkpoint.unpack_state(state, self.topology.position)
            if self._settings.stepped_by == "user":
                checkpoint.restore_module(self._module, self.topology.position)
                self._replica.resume_round(checkpoint.steps_in_round)
        if self._settings.sharded:
            self._replica.load(self._thread.run(self._peers.all_gather(self._algorithm.held(state))))
        self._sent_before = self._collectives.sent_bytes
        if self._optimizer is not None:
            self._optimizer.read_lr()
        self._close_round()
        self.state, self.rounds = state, checkpoint.rounds if checkpoint else 0
        self._begin_round()
        self._replica.logged_tokens = checkpoint.tokens_in_round if checkpoint else 0
        self._advance()

    def log(self, loss: float | None, tokens: int) -> None:
        """The user logs the loss of a step, and the tokens of its batches."""
        self.recorder.log(loss, tokens)
        self._replica.logged_tokens += int(tokens)

    def user_stepped(self) -> None:
        """The user's optimizer has taken a step."""
        self._check_usable()
        self.recorder.user_stepped()
        self._round_steps += 1
        self._advance()

    def user_computed(self, tokens: int | None) -> None:
        """The user has computed the gradients of a micro-batch."""
        assert self._optimizer is not None
        self._check_usable()
        self._replica.accept_gradients(tokens)
        self.recorder.log(None, tokens or 0)
        self.recorder.user_stepped()
        self._round_steps += 1
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
        self.recorder.user_continues()

    def _begin_round(self) -> None:
        self._replica.begin_round(self.state.params)
        self._peers.begin_round()
        self._round = self._algorithm.round(borrowed(self.state), self._replica, self._peers)

    def _complete_round(self) -> bool:
        """Runs the round until it ends or waits for the user. Returns whether it ended."""
        assert self._round is not None, "no round has begun"
        value: Any = None
        try:
            while not isinstance(request := self._round.send(value), UserStep):
                self.recorder.close_span()
                value = self._thread.fulfil(request)
        except StopIteration as end:
            self._round = None
            before, self.state = self.state, owned(self._guard.end_round(end.value))
            self.rounds += self.state.params is not before.params
            self.recorder.end_round(self.state, self._collectives.names)
            if self._settings.average_buffers:
                self._thread.call(partial(self._average_buffers, self._round_steps))
            self._round_steps = 0
            recycle([before], [self.state, self._replica.loaded])
            return True
        return False

    @torch.no_grad()
    def _average_buffers(self, steps: int) -> None:
        """Give all islands the mean of their floating-point buffers, weighted by their steps in the round."""
        buffers = [buffer for buffer in self._module.module.buffers() if buffer.is_floating_point()]
        weights = [row[0] for row in self._collectives.all_gather_numbers(steps)]
        if not buffers or not (total := sum(weights)):
            return
        flat = torch.cat([buffer.reshape(-1).float() for buffer in buffers])
        self._collectives.reduce_scatter(flat, weights, divide_by=total)
        self._collectives.all_gather(flat)
        for buffer, mean in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """The module holds the last agreed weights, and then its own again."""
        self._own = own = self._module.read()  # whole, so that each device of the island restores it by itself
        self._weights.write(self.state.params)
        try:
            yield
        finally:
            self._own = None
            self._module.write(own)
            own.release()

    def _close_round(self) -> None:
        if self._round is not None:
            self._round.close()
            self._round = None

    def _log_limit(self) -> None:
        """The first process logs the timeout on entry, and when it has changed by a factor of 2."""
        timeout, position = self._timeout, self.topology.position
        if position.islands > 1 and position.island == position.device == 0 and timeout.is_news():
            what = f"timeout of an exchange of {position.islands} islands"
            log_info(f"{what}: {timeout.timeout_s:g} s ({timeout.reason}). Set by limit_s.")

    def _check_usable(self) -> None:
        if self.final_params is not None:
            raise ConfigError("a step after islands.finish(), which has completed the last round. Call finish() after the loop.")
        if not self._waits_for_user:
            raise ConfigError("an exchange failed or training diverged before, so this island is out of step. Leave the block.")

    @property
    def sent_bytes(self) -> int:
        return self._collectives.sent_bytes - self._sent_before

    def checkpoint(self, steps: int) -> LoopCheckpoint:
        in_round = self._replica.steps_done
        if in_round and self._waits_for_user and self._replica.uses_weights and self._settings.stepped_by == "user":
            name, count = type(self._algorithm).__name__, self._algorithm.steps_per_round
            raise CheckpointError(
                f"{name} exchanges in the middle of its rounds of {count} steps, and has done so in this round. It cannot be saved "
                f"{in_round} steps after the last round. Save after a whole round: where islands.steps is a multiple of {count}."
            )
        digest, own = "", None
        if in_round and self._settings.stepped_by == "user":
            digest = (self._own or self._module.read()).digest()
            own = None if self._own is None else self._own.flat.clone()
        given: dict[str, Any] = {
            "position": self.topology.position,
            "module_digest": digest,
            "packed": pack(self.state),
            "own": own,
        }
        given["tokens_in_round"] = self._replica.logged_tokens
        return LoopCheckpoint(rounds=self.rounds, steps=steps, steps_in_round=in_round, **given)

    def gather_from_devices(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """What `LoopCheckpoint.to_dict` returned on every device of this island, on its first one; nothing on the others. Tensors
        travel as bytes, and everything else as JSON."""
        intra_island, own = self.topology.intra_island, state["own"]
        if intra_island is None:
            return [state]
        sent: dict[str, Tensor] = dict(state["tensors"]) if intra_island.rank else {}
        if sent and own is not None and self._module.sharded:  # otherwise the first device holds the same weights
            sent[_OWN] = own
        layout = Layout(tuple(Piece(name, tuple(t.shape), t.dtype, 0, t.numel()) for name, t in sent.items()))
        plain = {name: value for name, value in state.items() if name not in ("tensors", "own")}
        header = json.dumps({**plain, "tensors": layout_to_json(layout)})
        headers = [json.loads(text) for text in self._thread.call(lambda: intra_island.all_gather_text(header))]
        layouts = [layout_from_json(found["tensors"]) for found in headers]
        lengths = [sum(piece.count * piece.dtype.itemsize for piece in found.pieces) for found in layouts]
        mine = torch.cat([torch.empty(0, dtype=torch.uint8), *(t.cpu().reshape(-1).view(torch.uint8) for t in sent.values())])
        received = self._thread.call(lambda: intra_island.gather(mine, lengths))
        if intra_island.rank:
            return []
        states = [{**headers[rank], "tensors": _cut(data, layouts[rank])} for rank, data in received.items()]
        return [state, *({**other, "own": other["tensors"].pop(_OWN, own)} for other in states)]

    def complete(self) -> None:
        """Complete the rounds together with the other islands, and leave the agreed weights in the module."""
        if self.final_params is not None:
            return
        self._check_usable()
        self._replica.exhausted = True
        self._advance()
        params: Tree = self.state.params
        if self._settings.sharded:
            params = self._thread.run(self._peers.all_gather(params.cast(self._weights.layout.dtype)))
        self._replica.begin_round(params)
        self._replica.load(params)
        self.final_params = params

    def finish(self) -> None:
        """Complete the rounds, and close."""
        try:
            self.complete()
            assert self.final_params is not None, "the rounds are complete"
            self.recorder.finish(self.final_params)
            self._thread.close()
            self.topology.close()
            free_buffer_pool()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Leave at once after an exception. The peers learn of it at their next exchange; this process does not wait for them."""
        self.recorder.close()
        self._collectives.record_departure()
        # No status message precedes a gather of slices: an island that stops inside of one has no message to replace.
        if self._waits_for_user or not self._settings.sharded:
            posted = Event()
            self._thread.launch(self._post_leave_message(posted))
            # A thread that is inside of torch at interpreter shutdown aborts the process.
            atexit.register(posted.wait, _LEAVE_MESSAGE_S)
        self._close_round()
        self._thread.close(wait=False)
        free_buffer_pool()

    async def _post_leave_message(self, posted: Event) -> None:
        try:
            handle = await Request(self._collectives.post_leave_message)
            # Holds the message until this process ends. Peers that read later find the record in the store.
            atexit.register(lambda held: None, handle)
        finally:
            posted.set()


def _check_equal(fingerprints: Sequence[float], what: str, position: GridPosition, here: str) -> None:
    others = [f"island {island}" for island, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if others:
        raise ConfigError(
            f"{', '.join(others)} entered with {what} than island 0. Island {position.island} has {here}. Give the same on all "
            f"islands."
        )


def _cut(data: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors whose bytes lie one after the other, each in memory of its own."""
    parts = torch.split(data, [piece.count * piece.dtype.itemsize for piece in layout.pieces])
    return {p.name: part.clone().view(p.dtype).view(p.shape) for p, part in zip(layout.pieces, parts, strict=True)}


def _values_fingerprint(params: Tree, module: ModuleWeights) -> float:
    digest = hashlib.blake2b(params.digest().encode())
    for _, tensor in module.untrained_tensors():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return _fingerprint(digest.hexdigest())


def _check_rounds(rows: Sequence[Sequence[float]]) -> None:
    """Each row: whether the island has a checkpoint, and its round."""
    if any(row != rows[0] for row in rows):
        rounds = [f"round {number:g}" if saved else "no checkpoint" for saved, number in rows]
        raise CheckpointError(f"islands would resume from {', '.join(rounds)}. Load checkpoints of the same round on all of them.")


def _summary(layout: Layout) -> str:
    first = layout.pieces[0]
    return f"{len(layout.pieces)} trained tensors with {layout.numel} numbers, first {first.name} {first.shape} {first.dtype}"


def _fingerprint(text: str) -> float:
    """48 bits, which a double holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()))
