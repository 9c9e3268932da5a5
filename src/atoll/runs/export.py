"""Trained weights for use elsewhere: a folder with a model in it, and nothing of how it was trained.

    model.safetensors   the weights, by the module's own names
    config.json         what to build: of a pretrained model its own config; else the model's settings, for `load_exported`
    tokenizer.json      the tokenizer, and what belongs to it; none for bytes

What began as a Hugging Face model is one again: `AutoModelForCausalLM.from_pretrained` loads the folder.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.core.config.json_records import from_json, to_json
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.flat_tree import Tree, trainable
from atoll.core.serialization import load_tree, read_tensors, write_tensors
from atoll.data.gaussians import Gaussians
from atoll.data.instructions import Instructions, load_model_tokenizer
from atoll.data.text import Text
from atoll.data.tokenizer import ByteTokenizer, load_tokenizer
from atoll.models.gpt import GPT
from atoll.models.mlp import MLP
from atoll.models.pretrained import Pretrained, silent_transformers
from atoll.runs.folder import RunFolder
from atoll.runs.run import Run

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def export(folder: str | Path, out: str | Path) -> Path:
    """Writes the final weights of a run as a model of their own.

    Args:
        folder: the run's folder.
        out: a folder that does not exist yet, or is empty. It appears when it is complete.

    Raises:
        ConfigError: the run is not finished, trained a workload of its own, or `out` holds something.
    """
    run, module = trained(folder)
    with _appearing(Path(out).expanduser()) as place:
        if isinstance(run.model, Pretrained):
            _export_pretrained(run, module, place)
        else:
            _export_own(run, module, RunFolder.open(folder), place)
    return Path(out).expanduser()


def trained(folder: str | Path) -> tuple[Run, nn.Module]:
    """The run in this folder, with nothing left open, and its module with the final weights, on the CPU and in evaluation mode."""
    opened = RunFolder.open(folder)
    opened.check_workload(None)
    run = opened.run.resolved
    if not opened.final.exists():
        raise ConfigError(f"{folder} has no final weights yet: its run is not finished. Finish it: atoll run --resume {folder}")
    module = run.model.build() if isinstance(run.model, Pretrained) else _built(run.model, _sizes(run, opened), run.seed)
    _load(module, load_tree(opened.final), opened.final)
    return run, module.eval()


def load_exported(folder: str | Path) -> nn.Module:
    """The decoder or perceptron that `export` wrote, in evaluation mode. A pretrained model is loaded by its own library."""
    place = Path(folder).expanduser()
    try:
        config = json.loads((place / CONFIG).read_text("utf-8"))
        model, sizes = from_json(config["atoll"]), config["sizes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place} holds no model that atoll exported ({type(error).__name__}: {error}). Give the folder that `atoll export` "
            f"wrote; a Hugging Face model is loaded with `AutoModelForCausalLM.from_pretrained`."
        ) from error
    module = _built(model, sizes, seed=0)
    tensors, _ = read_tensors(place / WEIGHTS)
    module.load_state_dict(tensors)
    return module.eval()


# --------------------------------------------------------------------------------------------------------------- building


def _sizes(run: Run, folder: RunFolder) -> dict[str, int]:
    """What a model of atoll's own must be told besides its settings."""
    if isinstance(run.data, Gaussians):
        return {"inputs": run.data.dimensions, "outputs": run.data.classes}
    assert isinstance(run.data, Text)
    kept = folder.tokenizer
    tokenizer = load_tokenizer(str(kept)) if kept.exists() else ByteTokenizer()
    return {"vocab_size": tokenizer.vocab_size, "seq_len": run.data.seq_len}


def _built(model: GPT | MLP, sizes: dict[str, int], seed: int) -> nn.Module:
    if isinstance(model, MLP):
        return model.build(sizes["inputs"], sizes["outputs"], seed)
    return model.build(sizes["vocab_size"], sizes["seq_len"], seed)


def _load(module: nn.Module, params: Tree, path: Path) -> None:
    parameters = trainable(module)
    if {name: tuple(parameter.shape) for name, parameter in parameters.items()} != {
        name: tuple(params[name].shape) for name in params
    }:
        raise CheckpointError(
            f"the weights in {path} are not those of the model that its run.json describes: the model's folder or its frozen "
            f"parameters have changed since. Bring back what it was trained with."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(params[name])


# ---------------------------------------------------------------------------------------------------------------- writing


def _export_pretrained(run: Run, module: Any, place: Path) -> None:
    assert isinstance(run.data, Instructions)
    with silent_transformers():
        module.save_pretrained(place)
    assert run.data.tokenizer is not None, "a resolved run names its tokenizer"
    load_model_tokenizer(run.data.tokenizer).save_pretrained(place)


def _export_own(run: Run, module: nn.Module, folder: RunFolder, place: Path) -> None:
    config = {"atoll": to_json(run.model), "sizes": _sizes(run, folder)}
    (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    write_tensors(place / WEIGHTS, module.state_dict(), {"format": "pt"})
    if folder.tokenizer.exists():
        shutil.copyfile(folder.tokenizer, place / folder.tokenizer.name)


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `out` when it is complete, and is removed if it fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and an export would overwrite it. Use another --out.")
    place = out.with_name(f".{out.name}.{secrets.token_hex(4)}.unfinished")
    try:
        place.mkdir(parents=True)
        yield place
        os.replace(place, out)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror or error}. Make room there, or use another --out.") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
