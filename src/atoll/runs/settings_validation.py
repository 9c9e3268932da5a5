"""Checks of settings that are sound one by one but do not fit together, or that would be set and never read.

Every message names the settings by their paths and the values that fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atoll.algorithms.acco import ACCO
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.sharded_optimizer import Sharded
from atoll.algorithms.weight_prediction import WP
from atoll.core.errors import ConfigError
from atoll.core.protocols import Algorithm, AsyncAlgorithm, Rebases
from atoll.data.gaussians import Gaussians
from atoll.data.instructions import Instructions
from atoll.data.text_dataset import Text
from atoll.models.gpt import GPT
from atoll.models.mlp import MLP
from atoll.models.pretrained import Pretrained
from atoll.optim.torch_optimizers import check_takes_slices
from atoll.runs.cluster import Cluster

if TYPE_CHECKING:
    from atoll.runs.run_settings import Run, Train

_SHOWN = 4  # values that would fit, of many


def check_run(run: Run) -> None:
    """Refuse a Run whose settings do not fit together."""
    if not 0 <= run.seed < 2**48:
        raise ConfigError(f"seed={run.seed} is outside [0, 2**48). Use a smaller number.")
    if run.train.precision == "bf16" and run.train.device == "cpu":
        raise ConfigError(
            "train.precision=bf16 with train.device=cpu: autocast needs CUDA. Use fp32, all-bf16 for a module in bfloat16, or "
            "device=auto or cuda."
        )
    _check_model_fits_data(run.model, run.data)
    if run.inside is not None:
        check_two_level(run.algorithm, run.inside)
    _check_round_start(run)
    _check_stacked(run.train)
    _check_link_inside(run.cluster, run.inside)
    for path, algorithm in (("algorithm", run.algorithm), ("inside", run.inside)):
        _check_batch_divides(algorithm, path, run.train)
        _check_warmup(algorithm, path, run.train)
        if isinstance(algorithm, Sharded) and algorithm.optimizer is None:
            check_takes_slices(run.optimizer, algorithm)
    if isinstance(run.algorithm, AsyncAlgorithm):
        run.cluster.check_asynchronous()
        _check_speeds(run, run.algorithm.plan.speeds)
    else:
        run.cluster.check_synchronous()
        _check_quorum(getattr(run.algorithm, "quorum", None), run.effective_cluster.islands)
        check_whole_rounds(run.train.steps, run.algorithm.steps_per_round)


def _check_speeds(run: Run, speeds: Sequence[float]) -> None:
    each = run.cluster.devices_per_island
    if speeds and len(speeds) != run.effective_cluster.islands:
        devices = f" of {each} devices, each of which is an island" if each > 1 else ""
        raise ConfigError(
            f"algorithm.speeds has {len(speeds)} figures for cluster.islands={run.cluster.islands}{devices}: give one per "
            f"island, or leave it empty to use those of cluster.step_time_s."
        )


def _check_quorum(quorum: int | None, islands: int) -> None:
    if quorum is not None and quorum > islands:
        raise ConfigError(
            f"algorithm.quorum={quorum} of {islands} islands: a round would never have so many deltas. Use {islands} or less, or "
            f"none to wait for all."
        )


def check_whole_rounds(steps: int, per_round: int) -> None:
    """Refuse a number of steps that is not one round or more."""
    if steps < 1 or steps % per_round:
        fit = max(1, round(steps / per_round)) * per_round
        raise ConfigError(
            f"train.steps={steps} is not a multiple of the {per_round} inner steps of a round: the last round would "
            f"be cut short. Use train.steps={fit}, or another length of a round."
        )


def _check_model_fits_data(model: Any, data: Any) -> None:
    pairs = ((GPT, Text), (MLP, Gaussians), (Pretrained, Instructions), (Pretrained, Text))
    if any(isinstance(model, model_type) and isinstance(data, data_type) for model_type, data_type in pairs):
        return
    fit = [f"data={data_type.__name__}" for model_type, data_type in pairs if isinstance(model, model_type)]
    fit += [f"model={model_type.__name__}(...)" for model_type, data_type in pairs if isinstance(data, data_type)]
    raise ConfigError(
        f"model is {type(model).__name__} and data is {type(data).__name__}: a GPT reads Text, an MLP reads Gaussians, and a "
        f"Pretrained reads Text or Instructions. Set {', or '.join(fit)}."
    )


def check_two_level(algorithm: Algorithm[Any] | AsyncAlgorithm[Any], inside: Algorithm[Any]) -> None:
    """Refuse an algorithm between islands and one between the devices of each that cannot work together."""
    outer, inner = type(algorithm).__name__, type(inside).__name__
    if isinstance(algorithm, AsyncAlgorithm | Rebases):  # an algorithm that trains the devices of an island cannot train islands
        raise ConfigError(
            f"inside={inner} trains an island's devices between two exchanges of islands, and {outer} exchanges every gradient "
            f"between islands, or uses a hub. Use algorithm=DiLoCo(...), or inside=none, so that every device is an island."
        )
    if not isinstance(inside, Rebases):
        raise ConfigError(
            f"inside={inner} cannot continue from weights that islands have averaged: it has no `rebase`. "
            f"Use DDP, ZeRO1, FSDP, ACCO, DPU or WP inside."
        )
    if getattr(algorithm, "weighting", "uniform") == "tokens":
        raise ConfigError(
            f"algorithm.weighting=tokens with inside={inner}: each device of an island knows its own tokens only. Use "
            f"weighting=uniform or examples, or inside=none."
        )
    if getattr(algorithm, "moments", "own") == "averaged":
        raise ConfigError(
            f"algorithm.moments=averaged with inside={inner}: the devices of an island hold its moments, as {inner} decides. Use "
            f"moments=own, or inside=none."
        )
    if algorithm.steps_per_round % inside.steps_per_round:
        raise ConfigError(
            f"a round between islands has {algorithm.steps_per_round} steps, which is not a multiple of the "
            f"{inside.steps_per_round} of a round of {inner} inside. Use {inside.steps_per_round} steps, or a multiple."
        )


def _check_batch_divides(algorithm: Any, at: str, train: Train) -> None:
    """Refuse a batch that the algorithm cannot cut into equal pieces with an example for every micro-batch."""
    pieces, size = getattr(algorithm, "pieces", 1), train.batch_size
    name = "pieces_per_half" if hasattr(algorithm, "pieces_per_half") else "pieces"
    given = f"{at}.{name}={getattr(algorithm, name, 1)}"
    if size % pieces:
        below = size // pieces * pieces
        batches = f"{below} or {below + pieces}" if below else f"{pieces}"
        halves = _divisors(size // 2, near=pieces // 2) if size % 2 == 0 and name == "pieces_per_half" else []
        other = f", or {at}.{name}={_either(halves)}" if halves else ""
        raise ConfigError(
            f"train.batch_size={size} cannot be cut into the {pieces} equal pieces of {given}. "
            f"Use train.batch_size={batches}{other}."
        )
    if train.micro_batches * pieces > size:
        most = size // pieces
        raise ConfigError(
            f"train.micro_batches={train.micro_batches} is more than the {most} examples in each of the {pieces} pieces into which "
            f"{given} cuts train.batch_size={size}. Use train.micro_batches={most} or less, or fewer pieces."
        )


def _check_warmup(algorithm: Any, at: str, train: Train) -> None:
    """Refuse a run that ends before an algorithm with background exchanges starts its first."""
    if isinstance(algorithm, ACCO | DPU | WP) and algorithm.warmup >= train.steps:
        name = type(algorithm).__name__
        raise ConfigError(
            f"{at}.warmup={algorithm.warmup} is not less than train.steps={train.steps}: every update would be ZeRO-1's, and "
            f"{name} would hide no exchange. Use {at}.warmup={train.steps // 4} or another number below {train.steps}, or "
            f"{at}=ZeRO1."
        )


def _check_round_start(run: Run) -> None:
    """Refuse settings of the inner optimizer's round start where islands have no inner optimizer of their own."""
    defaults = {"fresh_optimizer": False, "peak_first": False, "joiner_moments": "empty"}
    for name, default in defaults.items():
        if getattr(run.train, name) == default:
            continue
        instead = f"train.{name}={str(default).lower()}"
        if run.inside is not None:
            raise ConfigError(
                f"train.{name} is for islands of one device, and with inside={type(run.inside).__name__} the devices of an island "
                f"train together. Use {instead}, or inside=none."
            )
        if hasattr(run.algorithm, "optimizer"):
            raise ConfigError(
                f"train.{name} is for islands that each train with an inner optimizer, and "
                f"algorithm={type(run.algorithm).__name__} has one optimizer for the gradients of all. Use {instead}, or an "
                f"algorithm such as DiLoCo."
            )
    if run.train.joiner_moments == "donor" and isinstance(run.algorithm, AsyncAlgorithm):
        raise ConfigError(
            "train.joiner_moments=donor with a hub: a worker gets its weights from the hub, which has no inner optimizer. Use "
            "train.joiner_moments=empty."
        )
    if run.train.joiner_moments == "donor" and run.train.fresh_optimizer:
        raise ConfigError(
            "train.joiner_moments=donor and train.fresh_optimizer=true: moments that the first round resets would be sent for "
            "nothing. Use one of the two."
        )


def _check_stacked(train: Train) -> None:
    """Refuse to stack islands in one pass where settings exclude it."""
    if train.together != "stacked":
        return
    if train.micro_batches > 1:
        raise ConfigError(
            f"train.together=stacked and train.micro_batches={train.micro_batches}: micro-batches are for a batch that fills the "
            f"device, and stacking is for one that does not. Use train.together=auto, or train.micro_batches=1."
        )
    if train.precision == "all-bf16":
        raise ConfigError(
            "train.together=stacked and train.precision=all-bf16: each island has master weights of its own then. Use "
            "train.together=auto, or train.precision=bf16."
        )


def _check_link_inside(cluster: Cluster, inside: Any) -> None:
    """Refuse settings about the devices of an island that would change nothing, or would be wrong."""
    several = cluster.devices_per_island > 1
    if inside is not None and not several:
        raise ConfigError(
            f"inside={type(inside).__name__} is for the devices of an island, and cluster.devices_per_island=1: there is one "
            f"device. Use cluster.devices_per_island=2 or more, or inside=none."
        )
    if inside is not None or cluster.inside == Cluster().inside:
        return
    if not several:
        raise ConfigError(
            "cluster.inside is the link between the devices of an island, and cluster.devices_per_island=1: there is no such link. "
            "Use cluster.devices_per_island=2 or more with inside=ACCO or another algorithm, or leave cluster.inside as it was."
        )
    # In a ring the slowest link sets the pace, so a faster link inside may be given: it changes nothing.
    if cluster.islands == 1 or _slower_inside(cluster):
        why = "there is one island" if cluster.islands == 1 else "it is slower than the links between islands"
        raise ConfigError(
            f"cluster.inside is given and {why}, but without an algorithm inside every device is an island on cluster.link, and "
            f"the link inside is never used. Set inside=ACCO or another algorithm with algorithm=DiLoCo(...), or describe the "
            f"devices as islands: cluster.islands={cluster.devices}, cluster.devices_per_island=1, and this link as cluster.link."
        )


def _slower_inside(cluster: Cluster) -> bool:
    links = [cluster.link_of(island) for island in range(cluster.islands)]
    return (
        cluster.inside.latency_s > max(link.latency_s for link in links)
        or cluster.inside.up_bytes_per_s < min(link.up_bytes_per_s for link in links)
        or cluster.inside.down_bytes_per_s < min(link.down_bytes_per_s for link in links)
    )


def check_devices_share_batch(run: Run, devices: int) -> None:
    """Refuse batches without an example for each of the devices that share them."""
    pieces = devices * run.train.micro_batches
    if run.train.batch_size < pieces:
        each = f", in {run.train.micro_batches} micro-batches each" if run.train.micro_batches > 1 else ""
        raise ConfigError(
            f"train.batch_size={run.train.batch_size}: {devices} devices share each batch{each}, so it needs at least {pieces} "
            f"examples. Use larger batches, or fewer engine.devices."
        )


def check_model_inputs(run: Run) -> None:
    """Refuse a Hugging Face model without its folder, or fine-tuning without examples, with the command that names them."""
    if not isinstance(run.model, Pretrained):
        return
    wanted = {"model.path": "FOLDER", "data.path": "FILE.jsonl"}
    given = {"model.path": run.model.path, "data.path": getattr(run.data, "path", None)}
    missing = [name for name, path in given.items() if path == ""]
    if missing and isinstance(run.data, Instructions):
        settings = " ".join(f"--set {name}={what}" for name, what in wanted.items())
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given: fine-tuning needs the folder of a Hugging "
            f"Face model and a file of examples. Give their paths: atoll run {run.recipe} {settings}"
        )
    run.model.check()  # before the data are loaded: an error about the model's tokenizer would hide that of the model


def _divisors(number: int, near: int) -> list[int]:
    """The divisors of `number` that are nearest to `near`."""
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    found = {*small, *(number // part for part in small)}
    return sorted(sorted(found, key=lambda part: abs(part - near))[:_SHOWN])


def _either(values: list[int]) -> str:
    """
    >>> _either([1]), _either([1, 2, 4])
    ('1', '1, 2 or 4')
    """
    return " or ".join(filter(None, (", ".join(map(str, values[:-1])), str(values[-1]))))
