"""Write an algorithm and run its rounds with a fake model and a fake network.

SlowMo (Wang et al., arXiv 1910.00643) averages the islands' weights after `inner_steps` steps of rate `base_lr`. Then it applies a
slow momentum `u`, measured in gradients:

    u <- beta * u + (weights before - mean of weights after) / base_lr
    w <- w - alpha * base_lr * u
"""

from dataclasses import dataclass, replace

import torch

from atoll import DiLoCo, Momentum, Tree
from atoll.core.protocols import Peers, Replica, shared
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round


@dataclass(frozen=True)
class SlowMoState:
    params: Tree = shared()
    slow: Tree = shared()


@dataclass(frozen=True, kw_only=True)
class SlowMo:
    inner_steps: int
    base_lr: float
    alpha: float = 1.0
    beta: float = 0.7

    @property
    def steps_per_round(self) -> int:
        return self.inner_steps

    def init(self, params: Tree, peers: Peers) -> SlowMoState:
        return SlowMoState(params, params.zeros())

    async def round(self, state: SlowMoState, replica: Replica, peers: Peers) -> SlowMoState:
        state = await peers.catch_up(state)
        replica.load(state.params)
        await replica.train(self.inner_steps, peers.work(self.inner_steps))
        mean = await peers.mean(state.params - replica.params())
        if not mean.heard:
            return state
        slow = self.beta * state.slow + mean.value / self.base_lr
        return replace(state, params=state.params.add(slow, -self.alpha * self.base_lr), slow=slow)


slowmo = SlowMo(inner_steps=4, base_lr=0.1)
diloco = DiLoCo(inner_steps=4, outer=Momentum(lr=1.0, momentum=0.7))
start = Tree.of({"w": torch.zeros(2)})
peers = ScriptedPeers(Tree.of({"w": torch.tensor([0.6, 0.2])}))  # one other island, which sends this delta in every round
slowmo_state, diloco_state = slowmo.init(start, peers), diloco.init(start, peers)
for number in range(3):  # the fake replica moves by -0.1 per step, so by -0.4 per round
    slowmo_state = one_round(slowmo, FakeReplica(moves_by=-0.1), peers, params=start, state=slowmo_state)
    diloco_state = one_round(diloco, FakeReplica(moves_by=-0.1), peers, params=start, state=diloco_state)
    print(f"round {number}: SlowMo {slowmo_state.params['w'].tolist()}, DiLoCo with Momentum {diloco_state.params['w'].tolist()}")
assert torch.allclose(slowmo_state.params["w"], diloco_state.params["w"]), "at a constant rate SlowMo is DiLoCo with Momentum"
