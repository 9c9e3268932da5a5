"""A causal language model of the Hugging Face library, from a folder on disk without using the network.

The folder is one that `save_pretrained` wrote, or a copy of a model's repository: `config.json` and weights. Weights are loaded in
float32, whatever their saved dtype. Or the config alone is read, and the library draws the weights. Tied weights stay tied. Dropout
is as the config says.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from atoll.core.config.type_checks import check_types, shown
from atoll.core.errors import ConfigError
from atoll.core.optional_imports import require
from atoll.core.verified_files import expanded

_WEIGHTS = ("*.safetensors", "*.bin")
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each weight file, for the fingerprint


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """The folder of a model, where its weights come from, and patterns of parameters to freeze.

    In a pattern such as `transformer.wte.*`, `*` also matches dots. A tied parameter matches by any of its names.

    Args:
        path: the folder of the model, in Hugging Face's format.
        frozen: patterns of the names of parameters that are not trained.
        weights: `loaded` from the folder, or `random`: drawn by the library from config.json and the run's seed.
    """

    path: str = ""
    frozen: tuple[str, ...] = ()
    weights: Literal["loaded", "random"] = "loaded"

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.frozen, str):
            raise ConfigError(f"model.frozen={shown(self.frozen)} is not a list. Give one, such as [{shown(self.frozen)}].")

    def check(self) -> Path:
        """The model's folder. Raises ConfigError if it is missing or holds no model."""
        if not self.path:
            raise ConfigError("model.path is not given: it is the folder of a Hugging Face model. Set it: --set model.path=FOLDER.")
        folder = expanded(self.path)
        if not folder.is_dir():
            raise ConfigError(
                f"model.path={self.path!r} is not a folder (the path is relative to {Path.cwd()}). Give the folder of a model on "
                f"this disk, as `save_pretrained` or `hf download NAME --local-dir FOLDER` writes it."
            )
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} has no config.json, so it holds no model. Give the folder that does.")
        if self.weights == "loaded" and not _weight_files(folder):
            raise ConfigError(
                f"{folder} has a config.json but no weights ({' or '.join(_WEIGHTS)}). Copy them there, save the model with "
                f"`save_pretrained`, or start from random weights: model.weights=random."
            )
        return folder

    def build(self, seed: int = 0) -> nn.Module:
        """A new module in float32 with the folder's weights, or with random ones by this seed, in training mode. The global RNG
        keeps its state.

        Raises ConfigError if the folder's files are incomplete, or if all parameters are frozen.
        """
        folder = self.check()
        module = (_load(folder) if self.weights == "loaded" else _draw(folder, seed)).float().train()
        self._freeze(module)
        return module

    def check_reads(self, module: nn.Module, largest_id: int, longest: int, tokenizer: str, length: str) -> None:
        """Refuse data with ids or lengths that the module cannot read. `tokenizer` and `length` are the settings to change."""
        rows = cast(Any, module).get_input_embeddings().weight.shape[0]
        if largest_id >= rows:
            raise ConfigError(
                f"the data hold the token {largest_id}, and the model in {self.path} has {rows} tokens, counted from 0: the "
                f"tokenizer is another model's. {tokenizer}"
            )
        max_positions = getattr(module.config, "max_position_embeddings", None)
        if max_positions is not None and longest > max_positions:
            raise ConfigError(
                f"an example has {longest} tokens, and the model in {self.path} reads at most {max_positions}. "
                f"Set {length}={max_positions}."
            )

    def fingerprint(self) -> str:
        """A digest of the config and of samples of the weights: equal for folders that hold the same model."""
        folder, state = self.check(), blake2b(digest_size=16)
        state.update((folder / "config.json").read_bytes())
        for path in _weight_files(folder) if self.weights == "loaded" else ():
            size = path.stat().st_size
            state.update(f"{path.name}/{size}".encode())
            with open(path, "rb") as file:
                for sample in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    state.update(file.read(_SAMPLE_BYTES))
        return state.hexdigest()

    def _freeze(self, module: nn.Module) -> None:
        named = list(module.named_parameters(remove_duplicate=False))
        for pattern in self.frozen:
            matches = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
            if not matches:
                names = [name for name, _ in named]
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
                raise ConfigError(
                    f"model.frozen: {pattern!r} matches no parameter of {self.path}. It has {len(names)}; similar names: "
                    f"{', '.join(near)}. A * matches anything."
                )
            for parameter in matches:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for _, parameter in named):
            raise ConfigError(
                f"model.frozen={list(self.frozen)} leaves no parameter of {self.path} to train. Freeze fewer: leave out a pattern."
            )


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def _load(folder: Path) -> nn.Module:
    transformers = require("transformers", extra="hf", purpose="pretrained models")
    with torch.random.fork_rng(devices=[]), silent_transformers():
        try:
            module, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
        except Exception as error:  # the library raises errors of many kinds, for damaged files too
            raise ConfigError(
                f"{folder} could not be loaded as a causal language model ({type(error).__name__}: {error}). "
                f"Check that its files are whole and that it is a decoder."
            ) from error
    if missing := sorted(loading["missing_keys"]):
        # The library would draw them at random, differently at every call.
        raise ConfigError(
            f"{folder} lacks the weights of {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}: it is cut "
            f"short, or another kind of model. Copy it again from its source."
        )
    return cast(nn.Module, module)


def _draw(folder: Path, seed: int) -> nn.Module:
    transformers = require("transformers", extra="hf", purpose="models of the Hugging Face library")
    with torch.random.fork_rng(devices=[]), silent_transformers():
        torch.default_generator.manual_seed(seed)
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            config.torch_dtype = torch.float32  # in which weights are drawn; the config may name another
            module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except Exception as error:  # the library raises errors of many kinds
            raise ConfigError(
                f"{folder / 'config.json'} describes no causal language model that transformers can build "
                f"({type(error).__name__}: {error}). Give the config of a decoder."
            ) from error
    return cast(nn.Module, module)


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Suppress the library's progress bars and reports: a run loads the same folder once per island."""
    logging = require("transformers", extra="hf", purpose="pretrained models").utils.logging
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
