"""An island whose module torch's own FSDP2 has cut over its devices: weights, gradients and moments, module by module.

It is what `inside=FSDP()` means between real devices. To the algorithm between islands each device is a Replica of its own rows of
every parameter, which it exchanges with its counterparts in the other islands. FSDP2 communicates by a group of its own, from the
thread that computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from atoll.algorithms.fsdp import FSDP
from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.flat_tree import Tree, empty
from atoll.core.protocols import Gradient, Replica, Weigh, Work, Workload
from atoll.engines.processes.collectives import LOST
from atoll.engines.processes.island_role import CheckpointPart, PartLoader
from atoll.engines.processes.process_group import RankContext
from atoll.engines.round_record import ComputeRecord, RoundRecord
from atoll.engines.wall_clock import WallClock
from atoll.optim.schedules import at
from atoll.replica.flat_parameters import ModuleWeights, copy_buffers
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import torch_optimizer
from atoll.replica.micro_batches import to_device


class ShardedModel:
    """A module that FSDP2 has cut, and torch's optimizer for it.

    Args:
        workload: what is trained.
        mesh: the devices of the island.
        algorithm: the settings: optimizer, clipping, accumulation.
        device: where this process computes.
        bf16: compute in bfloat16; weights, sums of gradients and moments keep single precision.
        loss: the workload's, perhaps compiled.
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
        _check(algorithm)
        self.stopped: Callable[[], bool] = lambda: False
        """Called before each step, as a replica's."""
        self._random = torch.Generator().manual_seed(seed).get_state()
        self.module = workload.module().to(device)
        self.device, self.mesh, self.steps_taken = device, mesh, 0
        self._algorithm, self._batches, self._loss = algorithm, workload.batches, loss or workload.loss
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
        for blocks in [part for part in self.module.modules() if isinstance(part, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.module, mesh=mesh, mp_policy=policy)
        self.weights = ModuleWeights(self.module)
        self._optimizer = torch_optimizer(algorithm.rule, *self.groups())  # type: ignore[arg-type]

    @property
    def batches_per_step(self) -> int:
        return self._algorithm.accumulation

    def groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters that decay, matrices, and the rest."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        return [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]

    def step(self, deal: Callable[[int], Work], schedule: int) -> tuple[float, int]:
        """One optimizer step, on as many batches as are accumulated: their mean loss, and tokens."""
        self.stopped()
        with torch.random.fork_rng(devices=[self.device] if self.device.startswith("cuda") else []), _lost(self.mesh):
            torch.set_rng_state(self._random)
            if self.device.startswith("cuda"):  # drawn from the saved state, so that one state serves both generators
                torch.cuda.manual_seed(int(torch.randint(2**62, ()).item()))
            stepped = self._step(deal, schedule)
            self._random = torch.get_rng_state()
        return stepped

    def _step(self, deal: Callable[[int], Work], schedule: int) -> tuple[float, int]:
        count, losses, tokens = self._algorithm.accumulation, [], 0
        assert isinstance(self.module, FSDPModule)
        for number in range(count):
            work = deal(1)
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

    def whole(self, share: Tree) -> Tree:
        """The weights of which all devices hold a share."""
        full: dict[str, Tensor] = {}
        with _lost(self.mesh):
            self._put_together(share, full)
        return Tree.of(full)

    def _put_together(self, share: Tree, full: dict[str, Tensor]) -> None:
        for name, parameter in self.weights.parameters.items():
            mine = share[name].reshape(-1, *parameter.shape[1:]).to(parameter.dtype)
            cut = DTensor.from_local(mine, self.mesh, [Shard(0)], shape=parameter.shape, stride=parameter.stride(), run_check=False)
            full[name] = cut.full_tensor()

    def buffers(self) -> dict[str, Tensor]:
        kept = self.module.state_dict().keys()
        return {name: buffer.detach() for name, buffer in self.module.named_buffers() if name in kept}

    def state(self) -> dict[str, Any]:
        """Moments by parameter, this device's rows of each; and what the module keeps besides."""
        moments = []
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            kept = self._optimizer.state.get(parameter, {})
            moments.append({name: _mine(value) for name, value in kept.items()})
        return {"optimizer": moments, "random": self._random, "buffers": self.buffers(), "steps": self.steps_taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._optimizer.state.clear()
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for parameter, moments in zip(parameters, state["optimizer"], strict=True):
            if moments:
                self._optimizer.state[parameter] = {name: _as_before(value, parameter) for name, value in moments.items()}
        self._random, self.steps_taken = state["random"].clone(), state["steps"]
        copy_buffers(self.module, state["buffers"])


class FsdpDevice:
    """This process's device of an island that FSDP2 trains. A seats.IslandRole, and the Replica that islands train.

    Args:
        model: what it trains.
        world: this process among all.
        params: the weights to begin with, as a whole.
        deal: hands out batches, pieces of them, at a position of the schedule.
        diary: the one of the moment.
        clock: of the run.
        pause_s: so long it sleeps for each batch besides.
    """

    def __init__(
        self,
        model: ShardedModel,
        world: RankContext,
        params: Tree,
        *,
        deal: Callable[[int, int, int], Work],
        diary: Callable[[], RoundRecord],
        clock: WallClock,
        pause_s: float = 0.0,
    ) -> None:
        self.replica, self._pause_s = model, pause_s
        self._rank, self._deal, self._diary, self._clock = world.rank, deal, diary, clock
        self._tokens = 0
        model.weights.write(self.share(params))

    def trained(self) -> Replica:
        return self

    def share(self, params: Tree) -> Tree:
        layout = self.replica.weights.layout
        flat = empty(layout.numel, params.flat.dtype, params.flat.device)
        for piece, start in zip(layout.pieces, layout.offsets.values(), strict=True):
            flat[start : start + piece.count] = params[piece.name].reshape(-1)[piece.start : piece.start + piece.count]
        return Tree(layout, flat)

    def whole(self, share: Tree) -> Tree:
        return self.replica.whole(share)

    def tokens(self, read: int) -> int:
        tokens, self._tokens = self._tokens, 0
        return tokens

    def load(self, params: Tree) -> None:
        self.replica.weights.write(params)

    def params(self) -> Tree:
        return self.replica.weights.read()

    async def train(self, steps: int, work: Work) -> None:
        start_s, losses, tokens = self._clock.now_s(), [], 0
        for step in range(steps):
            schedule = work.schedule + step
            loss, read = self.replica.step(lambda batches, at=schedule: self._deal(batches, 1, at), schedule)  # type: ignore[misc]
            losses.append(loss)
            tokens += read
        if not all(map(math.isfinite, losses)):
            raise TrainingDiverged(
                f"a loss is not finite within {steps} inner steps. The run stops; the last checkpoint stands. Lower the "
                f"learning rate, set train.clip_norm, or look at the data there."
            )
        if self._pause_s:
            time.sleep(self._pause_s * steps * self.replica.batches_per_step)
        diary, self._tokens = self._diary(), self._tokens + tokens
        diary.island_updates += steps
        batches = float(steps * self.replica.batches_per_step)
        diary.computed.append(ComputeRecord(start_s, self._clock.now_s(), 0, batches, tokens, math.fsum(losses) / steps, True))

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        raise ConfigError("an island that FSDP2 trains has no gradient to give. Use DiLoCo between islands, or inside=none.")

    def parts(self) -> dict[str, CheckpointPart]:
        return {f"device-{self._rank}": CheckpointPart(self.replica.state())}

    def restore(self, load: PartLoader) -> None:
        state = load(f"device-{self._rank}", CheckpointPart(None))
        if state is not None:
            self.replica.restore(state)


def _check(algorithm: FSDP) -> None:
    if algorithm.weigh == "tokens":
        raise ConfigError("inside=FSDP with weigh=tokens: FSDP2 takes the plain mean over devices. Use weigh=batches, or ZeRO1.")
    if algorithm.wire != "own" or algorithm.sums != "own":
        raise ConfigError(
            f"inside=FSDP with wire={algorithm.wire} and sums={algorithm.sums}: FSDP2 has its own precisions. Leave both at own, "
            f"use train.precision=bf16, or ZeRO1."
        )


@contextmanager
def _lost(mesh: DeviceMesh) -> Iterator[None]:
    """Says in our words that a device was missed in an exchange of FSDP2's own."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        ranks = [rank for rank in mesh.mesh.flatten().tolist() if rank != dist.get_rank()]
        raise ExchangeFailed(
            f"rank {dist.get_rank()} lost a device of its island, one of ranks {ranks}, in an FSDP2 exchange: {LOST} for the "
            f"limit of its group. What was saved before this round stands. ({error})"
        ) from error


def _mine(value: Any) -> Any:
    """What this process holds of a moment."""
    return value.to_local().detach() if isinstance(value, DTensor) else value


def _as_before(value: Any, parameter: Tensor) -> Any:
    """A moment as the optimizer has it: cut as its parameter is, if it is as large."""
    if not isinstance(value, Tensor) or value.dim() == 0 or not isinstance(parameter, DTensor):
        return value
    mine = value.to(parameter.device)
    return DTensor.from_local(
        mine, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride(), run_check=False
    )
