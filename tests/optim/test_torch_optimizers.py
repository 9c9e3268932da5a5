"""Inner optimizers that torch computes: Muon with AdamW, and any class of torch.optim by name."""

from __future__ import annotations

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import FSDP, ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.optim.schedules import Cosine
from atoll.optim.torch_optimizers import Muon, TorchOptimizer, TorchState

NAMES = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"embedding.weight": torch.randn(7, 4), "up.weight": torch.randn(8, 4), "norm.weight": torch.randn(4)}


def gradients(steps: int) -> list[Tree]:
    return [Tree.of(weights(100 + step)) for step in range(steps)]


def after(rule, steps: int) -> Tree:
    params = Tree.of(weights())
    state = rule.init(params)
    for gradient in gradients(steps):
        params, state = rule.update(params, gradient, state)
    return params


def by_torch(make, steps: int) -> dict[str, torch.Tensor]:
    own = {name: torch.nn.Parameter(value) for name, value in weights().items()}
    optimizers = make(own)
    for gradient in gradients(steps):
        for name, parameter in own.items():
            parameter.grad = gradient[name].clone()
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in own.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_named_class_has_the_bits_of_torchs_own_loop(name):
    found = after(TorchOptimizer(name=name, lr=0.01), 4)
    expected = by_torch(lambda own: [getattr(torch.optim, name)(list(own.values()), lr=0.01)], 4)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_options_reach_torchs_class_also_those_of_its_first_step():
    found = after(TorchOptimizer(name="SGD", lr=0.1, options="momentum=0.9, dampening=0.5, weight_decay=0.1"), 3)
    sgd = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
    expected = by_torch(lambda own: [torch.optim.SGD(list(own.values()), **sgd)], 3)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_muon_has_the_bits_of_torchs_muon_on_hidden_matrices_and_of_adamw_elsewhere():
    def two(own):
        rest = [{"params": own["embedding.weight"], "weight_decay": 0.1}, {"params": own["norm.weight"], "weight_decay": 0.0}]
        return [
            torch.optim.Muon([own["up.weight"]], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), fused=True),
        ]

    found, expected = after(Muon(lr=0.02), 4), by_torch(two, 4)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("name", "by_muon"),
    [
        ("layers.0.multihead_attn.in_proj_weight", True),
        ("encoder.multi_head_attention.out.weight", True),
        ("blocks.0.flowtensor.weight", True),
        ("head.weight", False),
        ("LM_head.weight", False),
        ("model.head", False),
        ("transformer.wte.weight", False),
        ("model.embed_tokens.weight", False),
        ("embeddings.word_embeddings.weight", False),
    ],
)
def test_muon_takes_matrices_of_attention_heads_but_no_embeddings_and_no_head_of_the_model(name, by_muon):
    assert Muon().takes(name, torch.ones(4, 4)) is by_muon


def muon_step(gradient: torch.Tensor) -> torch.Tensor:
    """The orthogonalised update of a zero matrix: without the scale and the learning rate."""
    params = Tree.of({"w": torch.zeros_like(gradient)})
    rule = Muon(lr=1.0, weight_decay=0.0)
    new, _ = rule.update(params, Tree.of({"w": gradient}), rule.init(params))
    return -new["w"] / (0.2 * max(gradient.shape) ** 0.5)


def test_singular_values_of_muons_update_are_near_one():
    values = torch.linalg.svdvals(muon_step(torch.randn(6, 12, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_muons_update_of_a_rank_one_gradient_is_that_of_its_directions():
    u, v = torch.ones(4) / 2, torch.tensor([0.6, 0.8])
    update = muon_step(5.0 * torch.outer(u, v))
    assert torch.allclose(update / update.norm(), torch.outer(u, v), atol=0.02)


def test_muons_update_does_not_depend_on_the_gradients_scale():
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(muon_step(gradient), muon_step(1024 * gradient))  # a power of two loses no bits


def test_the_schedule_sets_the_rate_of_torchs_class():
    params, gradient = Tree.of({"w": torch.zeros(2)}), Tree.of({"w": torch.ones(2)})
    rule = TorchOptimizer(name="SGD", lr=Cosine(lr=1.0, steps=4, warmup=2))
    first, state = rule.update(params, gradient, rule.init(params))
    assert torch.equal(first["w"], torch.full((2,), -0.5))
    assert state == TorchState(1, ())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "os.system"}, "Allowed: ASGD"),
        ({"name": "LBFGS"}, "one gradient per step"),
        ({"name": "Muon"}, "Use Muon"),
        ({"name": "SGD", "options": "momentun=0.9"}, "It has: momentum"),
        ({"name": "SGD", "options": "momentum=__import__('os')"}, "cannot be read"),
        ({"name": "SGD", "options": "momentum=-1"}, "refuses them"),
        ({"name": "SGD", "options": "0.9"}, "no name"),
        ({"name": "Adam", "options": "betas=[0.9, 0.99]"}, "tuple"),
        ({"name": "SGD", "lr": -1.0}, "at least 0"),
    ],
)
def test_a_class_or_option_that_cannot_be_used_is_refused_with_what_can(settings, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        TorchOptimizer(**{"lr": 0.1, **settings})


@pytest.mark.parametrize("algorithm", [ACCO, DPU, WP, ZeRO1, FSDP])
def test_an_algorithm_that_steps_slices_refuses_an_optimizer_of_whole_tensors(algorithm):
    with pytest.raises(ConfigError, match="whole tensors"):
        algorithm(optimizer=Muon())
