"""An island whose module torch's FSDP2 shards over its devices: weights, gradients and optimizer state, module by module.

This is inside=FSDP between real devices. To the algorithm between islands each device is a Replica of its own rows of every
parameter, which it exchanges with its counterparts in the other islands. FSDP2 communicates over a group of its own, from the
computing thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

from atoll.algorithms.zero import FSDP
from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.flat_tree import Tree, empty
from atoll.core.protocols import Work, Workload
from atoll.engines.group_collectives import LOST
from atoll.engines.processes.intra_island import IslandRole
from atoll.engines.processes.rank_context import RankContext
from atoll.engines.round_record import RoundRecord
from atoll.engines.timed_replica import ProcessReplica
from atoll.engines.training_setup import TrainingOnlyReplica
from atoll.optim.schedules import at
from atoll.replica.flat_parameters import ModuleWeights, copy_buffers, local, persistent_buffers
from atoll.replica.forward_backward import Loss, to_device
from atoll.replica.local_replica import ComputeResult, torch_optimizer


class ShardedModel:
    """A module that FSDP2 shards, and torch's optimizer for it.

    Args:
        algorithm: its settings: optimizer, clipping, accumulation.
        bf16: compute in bfloat16; weights, sums of gradients and optimizer state stay in single precision.
        seed: of this device's random numbers, for modules that draw some (dropout).
    """

    def __init__(
        self,
        workload: Workload,
        *,
        mesh: DeviceMesh,
        algorithm: FSDP,
        device: str,
        bf16: bool = False,
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        if algorithm.weigh == "tokens":
            raise ConfigError(
                "inside=FSDP with weigh=tokens: FSDP2 takes the plain mean over devices. Use weigh=batches, or ZeRO1."
            )
        if algorithm.wire != "own" or algorithm.sums != "own":
            raise ConfigError(
                f"inside=FSDP with wire={algorithm.wire} and sums={algorithm.sums}: FSDP2 has its own precisions. Leave both at "
                f"own, use train.precision=bf16, or ZeRO1."
            )
        self.on_step: Callable[[], object] = lambda: None  # called before each step, as that of a LocalReplica
        self._random = torch.Generator().manual_seed(seed).get_state()
        self.module = workload.module().to(device)
        self.device, self.mesh, self.steps_taken, self.batches_per_step = device, mesh, 0, algorithm.accumulation
        self._algorithm, self._batches, self._loss = algorithm, workload.batches, loss or workload.loss
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
        for blocks in [part for part in self.module.modules() if isinstance(part, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.module, mesh=mesh, mp_policy=policy)
        self.weights = ModuleWeights(self.module)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        matrices, others = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
        self._optimizer = torch_optimizer(algorithm.rule, matrices, others)  # type: ignore[arg-type]

    def step(self, assign: Callable[[], Work], schedule: int) -> tuple[float, int]:
        """One optimizer step, on the batches of an accumulation. Returns their mean loss, and their tokens."""
        self.on_step()
        with torch.random.fork_rng(devices=[self.device] if self.device.startswith("cuda") else []), _lost_device(self.mesh):
            torch.set_rng_state(self._random)
            if self.device.startswith("cuda"):  # seeded from the saved state, so that one state serves both generators
                torch.cuda.manual_seed(int(torch.randint(2**62, ()).item()))
            stepped = self._step(assign, schedule)
            self._random = torch.get_rng_state()
        return stepped

    def _step(self, assign: Callable[[], Work], schedule: int) -> tuple[float, int]:
        count, losses, tokens = self._algorithm.accumulation, [], 0
        assert isinstance(self.module, FSDPModule)
        for number in range(count):
            work = assign()
            batch = self._batches.batch(work.shard, work.start)
            tokens += self._batches.tokens(batch)
            self.module.set_requires_gradient_sync(number == count - 1)
            loss = self._loss(self.module, to_device(batch, self.device))
            (loss / count).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if self._algorithm.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._algorithm.clip_norm)
        rule: Any = self._algorithm.rule
        for group in self._optimizer.param_groups:
            group["lr"] = at(rule.lr, schedule)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps_taken += 1
        return float(torch.stack(losses).mean()), tokens

    def gather(self, shard: Tree) -> Tree:
        """The whole weights, of which each device holds a shard."""
        whole: dict[str, Tensor] = {}
        with _lost_device(self.mesh):
            for name, parameter in self.weights.parameters.items():
                mine = shard[name].reshape(-1, *parameter.shape[1:]).to(parameter.dtype)
                whole[name] = _as_dtensor(mine, self.mesh, [Shard(0)], parameter).full_tensor()
        return Tree.of(whole)

    def buffers(self) -> dict[str, Tensor]:
        return persistent_buffers(self.module)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def state(self) -> dict[str, Any]:
        """This device's rows of the optimizer state, by parameter; and the module's buffers."""
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters()]
        moments = [
            {name: local(value) if isinstance(value, Tensor) else value for name, value in state.items()} for state in states
        ]
        return {"optimizer": moments, "random": self._random, "buffers": self.buffers(), "steps": self.steps_taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._optimizer.state.clear()
        for parameter, moments in zip(self._parameters(), state["optimizer"], strict=True):
            if moments:
                self._optimizer.state[parameter] = {name: _sharded_like(parameter, value) for name, value in moments.items()}
        self._random, self.steps_taken = state["random"].clone(), state["steps"]
        copy_buffers(self.module, state["buffers"])


class FsdpDevice(IslandRole, TrainingOnlyReplica):
    """One device of an island that FSDP2 trains. An IslandRole, and the Replica that it trains. Arguments as of IslandDevice."""

    _model: ShardedModel

    def __init__(
        self,
        model: ShardedModel,
        replica: ProcessReplica,
        context: RankContext,
        params: Tree,
        assign: Callable[[int, int, int], Work],
        record: RoundRecord,
    ) -> None:
        super().__init__(model, self, f"device-{context.rank}")
        self._device_replica, self._assign, self._record = replica, assign, record
        model.weights.write(self.shard(params))

    def shard(self, params: Tree) -> Tree:
        layout = self._model.weights.layout
        flat = empty(layout.numel, params.flat.dtype, params.flat.device)
        for piece, start in zip(layout.pieces, layout.offsets.values(), strict=True):
            flat[start : start + piece.count] = params[piece.name].reshape(-1)[piece.start : piece.start + piece.count]
        return Tree(layout, flat)

    def gather(self, shard: Tree) -> Tree:
        return self._model.gather(shard)

    def load(self, params: Tree) -> None:
        self._model.weights.write(params)

    def params(self) -> Tree:
        return self._model.weights.borrowed()

    async def train(self, steps: int, work: Work) -> int:
        def compute() -> tuple[int, ComputeResult]:
            schedules = range(work.schedule, work.schedule + steps)
            stepped = [self._model.step(partial(self._assign, 1, 1, schedule), schedule) for schedule in schedules]
            tokens = sum(tokens for _, tokens in stepped)
            return tokens, ComputeResult([loss for loss, _ in stepped], tokens)

        tokens = self._device_replica.compute(compute, 0, float(steps * self._model.batches_per_step))
        self._record.island_updates += steps
        return tokens


@contextmanager
def _lost_device(mesh: DeviceMesh) -> Iterator[None]:
    """Turns an error of FSDP2's own communication into an ExchangeFailed."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        ranks = [rank for rank in mesh.mesh.flatten().tolist() if rank != dist.get_rank()]
        raise ExchangeFailed(
            f"rank {dist.get_rank()} lost a device of its island, one of ranks {ranks}, in an FSDP2 exchange: {LOST} for the "
            f"timeout of its group. What was saved before this round is valid. ({error})"
        ) from error


def _sharded_like(parameter: Tensor, value: Any) -> Any:
    """A moment as the optimizer keeps it: sharded as its parameter is, if it has the same shape."""
    if not isinstance(value, Tensor) or value.dim() == 0 or not isinstance(parameter, DTensor):
        return value
    return _as_dtensor(value.to(parameter.device), parameter.device_mesh, parameter.placements, parameter)


def _as_dtensor(mine: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> DTensor:
    return DTensor.from_local(mine, mesh, placements, shape=like.shape, stride=like.stride(), run_check=False)
