"""Exports the trained weights of a run as a folder with a model in it.

    model.safetensors    the weights: of a decoder by the names of transformers' Arcee, of others by the module's own
    config.json          the config of a model that transformers has; of a perceptron the settings, which `load_exported` reads
    tokenizer.json       the tokenizer, with further files

`AutoModelForCausalLM.from_pretrained` loads the folder of a language model, and `AutoTokenizer.from_pretrained` its tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.core.config.json_records import from_json, to_json
from atoll.core.errors import CheckpointError, ConfigError, one_line
from atoll.core.flat_tree import trainable
from atoll.core.serialization import load_tree, read_tensors, write_tensors
from atoll.core.verified_files import expanded, new_folder, read_record, write_record, write_text
from atoll.data.gaussians import Gaussians
from atoll.data.instructions import Instructions, load_model_tokenizer
from atoll.data.text_dataset import Text
from atoll.data.tokenizer import Tokenizer, huggingface_files, load_saved_tokenizer, tokenizer_in
from atoll.models.arcee import arcee_config, from_arcee, to_arcee
from atoll.models.gpt import GPT, Decoder
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
    with new_folder(out) as unfinished:
        if isinstance(run.data, Instructions):
            assert run.data.tokenizer is not None, "a resolved run names its tokenizer"
            _save_pretrained(module, unfinished)
            load_model_tokenizer(run.data.tokenizer).save_pretrained(unfinished)
        elif isinstance(run.data, Text):
            _export_text_model(run, module, load_saved_tokenizer(RunFolder.open(folder).tokenizer), unfinished)
        else:
            write_record(unfinished / CONFIG, {"atoll": to_json(run.model), "sizes": _sizes(run, RunFolder.open(folder))})
            write_tensors(unfinished / WEIGHTS, module.state_dict(), {"format": "pt"})
    return out


def _export_text_model(run: Run, module: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """A decoder as Arcee, whose config.json also has what `load_exported` reads; or a Hugging Face model as itself."""
    assert isinstance(run.data, Text)
    limits = generation_limits(module, tokenizer)
    if isinstance(module, Decoder):
        sizes = {"vocab_size": tokenizer.vocab_size, "seq_len": module.seq_len}
        config = {**arcee_config(module, tokenizer.end_of_text), "atoll": to_json(run.model), "sizes": sizes}
        write_record(out / CONFIG, config)
        write_text(out / "generation_config.json", json.dumps(limits, indent=2) + "\n")
        write_tensors(out / WEIGHTS, to_arcee(module.state_dict()), {"format": "pt"})
    else:
        assert isinstance(run.model, Pretrained)
        if run.model.weights == "random":  # else the model knows its ends
            _set_limits(module, limits)
        _save_pretrained(module, out)
        if run.model.weights == "loaded" and tokenizer_in(run.model.path) is not None:
            load_model_tokenizer(run.model.path).save_pretrained(out)  # the same ids, with what else the model's own knows
            return
    for name, content in huggingface_files(tokenizer, run.data.seq_len).items():
        write_text(out / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _save_pretrained(module: Any, out: Path) -> None:
    with silent_transformers():
        module.save_pretrained(out)


def _set_limits(module: Any, limits: Mapping[str, Any]) -> None:
    for name, value in limits.items():
        setattr(module.generation_config, name, value)
        if hasattr(module.config, name):
            setattr(module.config, name, value)


def generation_limits(module: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """How generation begins and ends. Rows that pad the vocabulary have no meaning and are never generated."""
    table = module.embedding if isinstance(module, Decoder) else module.get_input_embeddings()
    padding = list(range(tokenizer.vocab_size, table.weight.shape[0]))
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.end_of_text)
    return {**ends, **({"suppress_tokens": padding} if padding else {})}


def trained(folder: str | Path) -> tuple[Run, nn.Module]:
    """The resolved run of this folder, and its module with the final weights, on the CPU and in evaluation mode."""
    opened = RunFolder.open(folder)
    opened.refuse_own_workload()
    run = opened.run.resolved
    if not opened.final.exists():
        raise ConfigError(f"{folder} has no final weights yet: its run is not finished. Finish it: atoll run --resume {folder}")
    sizes = {} if isinstance(run.model, Pretrained) else _sizes(run, opened)
    module, params = run.model.build(**sizes, seed=run.seed), load_tree(opened.final)
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
    """The decoder or perceptron that `export` wrote, in evaluation mode. Other models are loaded by transformers alone."""
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
        if isinstance(module, Decoder) and "architectures" in config:  # older versions wrote the decoder's own names
            tensors = from_arcee(tensors, module.config.layers)
        module.load_state_dict(tensors)
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} has other weights than {CONFIG} describes. Export the run again.") from error
    return module.eval()
