"""The names by which checkpoints refer to types."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import torch

from atoll.core.config.json_records import _own_records, find_type, type_name
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Rule
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.sgd import SGD
from atoll.optim.torch_optimizers import TorchOptimizer
from atoll.runs.run_settings import candidates

SAVED_RECORDS = {
    "ACCOState": "params optimizer steps committed first dropped",
    "AdamState": "step mean square",
    "AsyncState": "params outer",
    "BufferedState": "waiting total inner",
    "DDPState": "params optimizer",
    "DPUState": "params optimizer steps waiting",
    "DelayedState": "step velocity total",
    "DiLoCoState": "params outer local unsent tokens late",
    "EagerState": "params outer begin momentum delta share",
    "StreamingState": "params outer local unsent unloaded",
    "Gradient": "sum weight tokens",
    "MomentumState": "step velocity",
    "SGDState": "step",
    "TorchState": "step moments",
    "WPState": "params optimizer ahead steps waiting",
    "ZeRO1State": "params optimizer",
}


def rule_states() -> list[type]:
    """The types of the states of all rules."""
    special = {
        DelayedNesterov: {"period": 2},
        Buffered: {"rule": SGD(lr=0.1), "size": 2},
        TorchOptimizer: {"name": "SGD", "lr": 0.1},
    }
    params = Tree.of({"w": torch.zeros(1)})
    return [type(kind(**special.get(kind, {"lr": 0.1})).init(params)) for kind in candidates[Rule]]


def test_the_names_and_fields_of_saved_records_are_part_of_the_format():
    """A renamed class or field is a new format: raise FORMAT of engines/checkpoints.py, then change the table."""
    states = [kind for kind in _own_records().values() if is_dataclass(kind) and any("owner" in f.metadata for f in fields(kind))]
    found = {
        type_name(kind): " ".join(getattr(kind, "_fields", None) or [f.name for f in fields(kind)])
        for kind in (*states, *rule_states(), Gradient)
    }
    assert found == SAVED_RECORDS
    assert all(find_type(name) is not None for name in found)
