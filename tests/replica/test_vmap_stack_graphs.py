"""On a GPU: passes that are compiled, recorded and stacked have the numbers of islands that compute by themselves."""

import pytest
import torch

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Work
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.replica.local_replica import LocalReplica, TrainJob
from atoll.replica.vmap_stack import _MAX_GRAPHS, CudaGraphCache, VmapStack
from benchmarks.decoder_workload import DecoderWorkload, RepeatedBatch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # a hint of the compiler: exact products are meant
]

DEVICE = "cuda"
STEPS = 6
MODEL = GPT(layers=2, width=64, heads=2, head_size=32)


class Positions(RepeatedBatch):
    """Other tokens at each position of each shard."""

    def batch(self, shard, position):
        generator = torch.Generator().manual_seed(100 * shard + position)
        return torch.randint(31, self.tokens_of_a_batch.shape, generator=generator)


def replicas(count, *, bf16):
    """Islands with different weights and a compiled loss."""
    work = DecoderWorkload(MODEL, Positions(torch.zeros(16, 9, dtype=torch.int64)), 31)
    compiled = torch.compile(work.loss, dynamic=False)
    made = [
        LocalReplica(work, optimizer=AdamW(lr=0.001), clip_norm=1.0, devices=(DEVICE,), autocast=bf16, loss=compiled)
        for _ in range(count)
    ]
    for number, replica in enumerate(made):
        noise = torch.randn(replica.params().numel, generator=torch.Generator().manual_seed(number))
        replica.load(replica.params() + 0.02 * Tree(replica.params().layout, noise.to(DEVICE)))
    return work, made


def trainings(made):
    return [TrainJob(replica, STEPS, Work(shard=shard, start=0, schedule=0, examples=1)) for shard, replica in enumerate(made)]


def trained_apart(bf16):
    """Losses of three islands, and how far each moved."""
    _, made = replicas(3, bf16=bf16)
    before = [replica.params().flat.clone() for replica in made]
    losses = [job.replica.train(job.steps, job.work).losses for job in trainings(made)]
    return losses, [replica.params().flat - start for replica, start in zip(made, before, strict=True)]


@pytest.mark.parametrize("rows", [1, 3], ids=["recorded", "stacked"])
@pytest.mark.parametrize(("bf16", "close", "along"), [(False, 1e-4, 0.9999), (True, 1e-2, 0.98)], ids=["fp32", "bf16"])
def test_captured_and_stacked_passes_train_like_single_islands(rows, bf16, close, along):
    expected, moved = trained_apart(bf16)
    work, made = replicas(3, bf16=bf16)
    before = [replica.params().flat.clone() for replica in made]
    stack = VmapStack(made[0], rows, work.loss, compiled=True)
    jobs = trainings(made)
    found = [one for at in range(0, len(jobs), rows) for one in stack.train(jobs[at : at + rows])]
    for number, one in enumerate(found):
        assert one.losses == pytest.approx(expected[number], rel=close)
        change = made[number].params().flat - before[number]
        assert torch.cosine_similarity(change, moved[number], dim=0) > along
    stack.close()


def test_a_captured_pass_reads_present_weights_and_further_shapes_are_not_captured():
    weights = torch.ones(4, device=DEVICE)
    replayed = CudaGraphCache(lambda batch: (weights * batch["x"]).sum())
    for turn in range(2):
        weights.fill_(turn + 2.0)
        for rows in range(1, _MAX_GRAPHS + 3):
            batch = {"x": torch.full((rows, 4), 3.0, device=DEVICE)}
            assert replayed(batch).item() == (turn + 2.0) * 3.0 * 4 * rows
    assert len(replayed._graphs) == _MAX_GRAPHS


def test_a_stack_that_does_not_fit_in_memory_is_freed_and_islands_compute_apart():
    work, made = replicas(2, bf16=False)
    for job in trainings(made):  # takes what an island needs by itself
        job.replica.pass_over(job.first_batch())
    limit_bytes = torch.cuda.memory_reserved() + 256 * 2**20
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    decisions = []
    try:
        together = BatchedCompute("auto", 4096, work.loss, compiled=True, on_decision=lambda *news: decisions.append(news))
        found = together(trainings(made))
        together.report()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [len(trained.losses) for _, trained in found] == [STEPS, STEPS]
    ((how, why),) = decisions
    assert how == "apart"
    assert "OutOfMemoryError" in why
