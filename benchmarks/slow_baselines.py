"""Baselines on the same link: torch's DistributedDataParallel, its ZeroRedundancyOptimizer, and torchft's DiLoCo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from atoll.core.optional_imports import require
from atoll.models.gpt import Decoder
from slow_island import INNER, IslandGroup, Spec, workload_of


class WithLoss(nn.Module):
    """A decoder whose forward pass returns its loss: DistributedDataParallel hooks only into `forward`."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder.loss(tokens)


class TorchDDP:
    """torch's data-parallel training, as in its tutorial. A slow_island.Loop.

    Args:
        sharded: with torch's ZeroRedundancyOptimizer, with parameters as views of buckets, as its page recommends.
        bucket_mib: of the buckets that are exchanged during the backward pass; None: torch's default, one of 1 and others of 25.
    """

    steps_per_round = exchanges_per_round = 1

    def __init__(self, spec: Spec, *, sharded: bool, bucket_mib: int | None = None) -> None:
        workload = workload_of(spec)
        self._tokens = workload.batches.tokens_of_a_batch
        self._model = DistributedDataParallel(WithLoss(workload.module()), bucket_cap_mb=bucket_mib)
        self._optimizer = _sharded_adamw(self._model) if sharded else adamw(self._model)

    def round(self) -> None:
        _step(self._model, self._optimizer, self._tokens)

    def close(self) -> None:
        pass


class TorchftDiLoCo:
    """torchft's `local_sgd.DiLoCo` with a Manager per island, and a lighthouse in the first island's process. All time limits are
    torchft's. A slow_island.Loop.

    Both islands start from the same weights, so that torchft sends none before the first round.
    """

    exchanges_per_round = 1

    def __init__(self, spec: Spec, group: IslandGroup) -> None:
        workload = workload_of(spec)
        self.steps_per_round = spec.inner_steps
        self._tokens = workload.batches.tokens_of_a_batch
        self._model = WithLoss(workload.module())
        self._optimizer = adamw(self._model)
        info = IslandInfo(group.rank, group.size, spec.address, group.store)
        self.outer = Torchft(self._model, self._optimizer, spec.inner_steps, info)

    def round(self) -> None:
        for _ in range(self.steps_per_round):
            _step(self._model, self._optimizer, self._tokens)
        self.outer.check()

    def close(self) -> None:
        self.outer.close()


class IslandInfo(NamedTuple):
    """The state of an island that torchft needs."""

    rank: int
    size: int  # number of islands
    address: str
    store: Store  # shared by all islands


class Torchft:
    """torchft's DiLoCo of a model. It hooks into the inner optimizer, and steps after every `inner_steps` of its steps."""

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer, inner_steps: int, info: IslandInfo) -> None:
        torchft = require("torchft", extra="torchft", purpose="torchft's own loops")
        local_sgd = require("torchft.local_sgd", extra="torchft", purpose="torchft's own loops")
        coordination = require("torchft.coordination", extra="torchft", purpose="torchft's own loops")
        address = info.address
        if info.rank == 0:
            self._lighthouse = coordination.LighthouseServer(bind=f"{address}:0", min_replicas=info.size, join_timeout_ms=1000)
            info.store.set("lighthouse", f"http://{address}:{self._lighthouse.address().rsplit(':', 1)[1]}")
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.manager: Any = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=info.size,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=bytes(info.store.get("lighthouse")).decode(),
            replica_id=f"island{info.rank}",
            hostname=address,
            init_sync=False,
        )
        self._rounds = 0
        self._hooked: Any = local_sgd.DiLoCo(self.manager, [model], inner, outer, sync_every=inner_steps)
        self._hooked.__enter__()

    def check(self) -> None:
        """Checks a round: torchft does not raise if an exchange fails, but continues from the start of the round."""
        self._rounds += 1
        error = self.manager.errored()
        if error is not None or self.manager.current_step() < self._rounds:
            raise RuntimeError(f"torchft did not commit round {self._rounds}: {error}")

    def close(self) -> None:
        self._hooked.__exit__(None, None, None)
        self.manager.shutdown(wait=False)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=float(INNER.lr),  # type: ignore[arg-type]
        weight_decay=INNER.weight_decay,
        fused=True,
    )


def _sharded_adamw(model: nn.Module) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import compiles a dozen scripts

    return ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=float(INNER.lr),  # type: ignore[arg-type]
        weight_decay=INNER.weight_decay,
        fused=True,
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    optimizer.zero_grad()
    loss: Tensor = model(tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
