"""torch's own optimizers for inner rules: fused where there are fused ones, and with matrices, which decay, in their own group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atoll.optim.adam import Adam, AdamW
from atoll.optim.schedules import at
from atoll.optim.sgd import SGD, Nesterov
from atoll.replica.master_weights import InnerRule


def torch_optimizer(rule: InnerRule, matrices: Sequence[nn.Parameter], rest: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer for an inner rule. Two groups: what decays, and what does not."""
    lr = at(rule.lr, 0)
    if isinstance(rule, AdamW):
        spared = rule.weight_decay if rule.decay == "all" else 0.0
        groups = [{"params": matrices, "weight_decay": rule.weight_decay}, {"params": rest, "weight_decay": spared}]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=lr, betas=rule.betas, eps=rule.eps, fused=True)
    parameters = [*matrices, *rest]
    if isinstance(rule, Adam):
        return torch.optim.Adam(parameters, lr=lr, betas=rule.betas, eps=rule.eps, fused=True)
    momentum = 0.0 if isinstance(rule, SGD) else rule.momentum
    nesterov = isinstance(rule, Nesterov)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=rule.weight_decay)
