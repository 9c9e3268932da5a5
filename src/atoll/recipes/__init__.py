"""Recipes: functions that return a Run. On the command line their names have dashes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from atoll.core.config.type_checks import shown
from atoll.core.errors import ConfigError
from atoll.recipes.demo import (
    demo_acco,
    demo_acco_free,
    demo_async,
    demo_async_naive,
    demo_ddp,
    demo_diloco,
    demo_dpu,
    demo_eager,
    demo_muloco,
    demo_sparseloco,
    demo_streaming,
    demo_two_level,
    demo_wp,
    demo_zero1,
)
from atoll.recipes.finetune import finetune
from atoll.recipes.papers import acco_36m, acco_125m, async_20m, async_60m, async_150m, diloco_60m, diloco_150m, diloco_400m
from atoll.recipes.toy import toy_async, toy_sync
from atoll.runs.run_settings import Run

# In the order of their sources, which `atoll recipes` reads.
_DEMOS = (
    *(demo_ddp, demo_zero1, demo_acco, demo_acco_free, demo_dpu, demo_wp, demo_diloco, demo_streaming, demo_eager),
    *(demo_sparseloco, demo_muloco, demo_two_level, demo_async, demo_async_naive),
)
_PAPERS = (diloco_60m, diloco_150m, diloco_400m, async_20m, async_60m, async_150m, acco_36m, acco_125m)
_MAKERS = (*_DEMOS, *_PAPERS, toy_async, toy_sync, finetune)

ALL: Mapping[str, Callable[[], Run]] = {make.__name__.replace("_", "-"): make for make in _MAKERS}

__all__ = ["ALL", "recipe", *(make.__name__ for make in _MAKERS)]  # noqa: PLE0604


def recipe(name: str) -> Run:
    if name not in ALL:
        raise ConfigError(f"there is no recipe {shown(name)}. {suggestion(name)} `atoll recipes` describes all of them.")
    return ALL[name]()


def suggestion(name: str) -> str:
    """What to write instead of a name that no recipe has."""
    near = difflib.get_close_matches(name, ALL, n=1)
    return f"Did you mean {near[0]}?" if near else f"There are: {', '.join(ALL)}."
