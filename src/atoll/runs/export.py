"""Exports the trained weights of a run as a folder with a model in it.

    model.safetensors   the weights, by the module's own names
    config.json         a pretrained model's own config; of other models the settings, which `load_exported` reads
    tokenizer.json      the tokenizer, with a pretrained model's further files; none for bytes

`AutoModelForCausalLM.from_pretrained` loads the folder of a fine-tuned Hugging Face model.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from atoll.core.config.json_records import from_json, to_json
from atoll.core.errors import CheckpointError, ConfigError, one_line
from atoll.core.flat_tree import trainable
from atoll.core.serialization import load_tree, read_tensors, write_tensors
from atoll.core.verified_files import expanded, read_record, write_record
from atoll.data.gaussians import Gaussians
from atoll.data.instructions import Instructions, load_model_tokenizer
from atoll.data.text import Text
from atoll.data.tokenizer import load_saved_tokenizer
from atoll.models.gpt import GPT
from atoll.models.mlp import MLP
from atoll.models.pretrained import Pretrained, silent_transformers
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import Run

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def export(folder: str | Path, out: str | Path) -> Path:
    """Writes the final weights of a run as a model of their own.

    Args:
        folder: the run's folder.
        out: a folder that does not exist yet, or is empty. It appears when it is complete.

    Raises:
        ConfigError: the run is not finished, trained a user's workload, or `out` is not empty.
    """
    run, module = trained(folder)
    out = expanded(out)
    with _new_folder(out) as unfinished:
        if isinstance(run.model, Pretrained):
            assert isinstance(run.data, Instructions)
            assert run.data.tokenizer is not None, "a resolved run names its tokenizer"
            with silent_transformers():
                cast(Any, module).save_pretrained(unfinished)
            load_model_tokenizer(run.data.tokenizer).save_pretrained(unfinished)
        else:
            opened = RunFolder.open(folder)
            config = {"atoll": to_json(run.model), "sizes": _sizes(run, opened)}
            write_record(unfinished / CONFIG, config)
            write_tensors(unfinished / WEIGHTS, module.state_dict(), {"format": "pt"})
            if opened.tokenizer.exists():
                shutil.copyfile(opened.tokenizer, unfinished / opened.tokenizer.name)
    return out


def trained(folder: str | Path) -> tuple[Run, nn.Module]:
    """The resolved run of this folder, and its module with the final weights, on the CPU and in evaluation mode."""
    opened = RunFolder.open(folder)
    opened.check_workload(None)
    run = opened.run.resolved
    if not opened.final.exists():
        raise ConfigError(f"{folder} has no final weights yet: its run is not finished. Finish it: atoll run --resume {folder}")
    sizes = {} if isinstance(run.model, Pretrained) else {**_sizes(run, opened), "seed": run.seed}
    module, params = run.model.build(**sizes), load_tree(opened.final)
    parameters = trainable(module)
    if {name: parameter.shape for name, parameter in parameters.items()} != {name: params[name].shape for name in params}:
        raise CheckpointError(
            f"the weights in {opened.final} are not those of the model that its run.json describes: the model's folder or its "
            f"frozen parameters have changed since. Restore the model that the run trained."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(params[name])
    return run, module.eval()


def _sizes(run: Run, folder: RunFolder) -> dict[str, int]:
    """The arguments of `build` of a decoder or perceptron that depend on the data."""
    if isinstance(run.data, Gaussians):
        return {"inputs": run.data.dimensions, "outputs": run.data.classes}
    assert isinstance(run.data, Text)
    return {"vocab_size": load_saved_tokenizer(folder.tokenizer).vocab_size, "seq_len": run.data.seq_len}


def load_exported(folder: str | Path) -> nn.Module:
    """The decoder or perceptron that `export` wrote, in evaluation mode. A pretrained model is loaded by its own library."""
    folder = expanded(folder)
    try:
        config = read_record(folder / CONFIG)
        module: nn.Module = from_json(config["atoll"], hint=GPT | MLP).build(**config["sizes"], seed=0)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{folder} holds no model that atoll exported ({one_line(error)}). Give the folder that `atoll export` "
            f"wrote; a Hugging Face model is loaded with `AutoModelForCausalLM.from_pretrained`."
        ) from error
    tensors, _ = read_tensors(folder / WEIGHTS)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / WEIGHTS} has other weights than {CONFIG} describes. Export the run again.") from error
    return module.eval()


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder to write to. It is renamed to `out` when the block ends, and removed if the block raises."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and an export would overwrite it. Use another --out.")
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(4)}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        os.replace(unfinished, out)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror or error}. Make room there, or use another --out.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
