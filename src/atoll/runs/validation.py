"""What does not go together in a Run, although each part is sound by itself, and what would be set and never read.

Every message names the settings by their paths and says which values fit.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from atoll.algorithms.acco import ACCO
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.weight_prediction import WP
from atoll.core.errors import ConfigError
from atoll.runs.cluster import Cluster

if TYPE_CHECKING:
    from atoll.runs.run import Run, Train

_SHOWN = 4  # values that would fit, of many


def check_pieces(algorithm: Any, at: str, train: Train) -> None:
    """Refuses batches that cannot be cut into equal pieces, each of which holds an example for every micro-batch."""
    pieces, size = getattr(algorithm, "pieces", 1), train.batch_size
    setting = f"{at}.pieces_per_half" if hasattr(algorithm, "pieces_per_half") else f"{at}.pieces"
    if size % pieces:
        below = size // pieces * pieces
        batches = f"{below} or {below + pieces}" if below else f"{pieces}"
        halves = _divisors(size // 2, near=pieces // 2) if size % 2 == 0 and hasattr(algorithm, "pieces_per_half") else []
        other = f", or {setting}={_either(halves)}" if halves else ""
        raise ConfigError(
            f"train.batch_size={size} cannot be cut into the {pieces} equal pieces that {_settings(algorithm, setting)} makes of a "
            f"batch. Use train.batch_size={batches}{other}."
        )
    if train.micro_batches * pieces > size:
        most = size // pieces
        raise ConfigError(
            f"train.micro_batches={train.micro_batches} is more than the {most} examples in each of the {pieces} pieces that "
            f"{_settings(algorithm, setting)} makes of train.batch_size={size}. Use train.micro_batches={most} or less, or fewer "
            f"pieces."
        )


def check_warmup(algorithm: Any, at: str, train: Train) -> None:
    """Refuses a run that would be over before an algorithm that hides exchanges hides its first."""
    if isinstance(algorithm, ACCO | DPU | WP) and algorithm.warmup >= train.steps:
        name = type(algorithm).__name__
        raise ConfigError(
            f"{at}.warmup={algorithm.warmup} is not less than train.steps={train.steps}: every update would be ZeRO-1's, and "
            f"{name} would hide nothing. Use {at}.warmup={train.steps // 4} or another number below {train.steps}, or {at}=ZeRO1."
        )


def check_habits(algorithm: Any, inside: Any, train: Train) -> None:
    """Refuses habits of islands that train alone, with an optimizer of their own, where they would never be read."""
    for name in ("fresh_optimizer", "peak_first"):
        if not getattr(train, name):
            continue
        if inside is not None:
            raise ConfigError(
                f"train.{name} is for islands that train alone, and with inside={type(inside).__name__} their devices "
                f"train together. Use train.{name}=false, or inside=none."
            )
        if has_optimizer(algorithm):
            kind = type(algorithm).__name__
            raise ConfigError(
                f"train.{name} is for rounds in which islands train alone, each with an optimizer of its own, and algorithm={kind} "
                f"has one optimizer for the gradients of all. Use train.{name}=false, or an algorithm such as DiLoCo."
            )


def check_stacked(train: Train) -> None:
    """Refuses a stack of what cannot be stacked, as far as settings tell."""
    if train.together != "stacked":
        return
    if train.micro_batches > 1:
        raise ConfigError(
            f"train.together=stacked and train.micro_batches={train.micro_batches}: batches are cut where one fills the device, "
            f"and islands are stacked where it does not. Use train.together=auto, or train.micro_batches=1."
        )
    if train.precision == "all-bf16":
        raise ConfigError(
            "train.together=stacked and train.precision=all-bf16: each island has masters of its own then. Use "
            "train.together=auto, or train.precision=bf16."
        )


def check_lines(cluster: Cluster, inside: Any) -> None:
    """Refuses what is said about the inside of islands and would change nothing, or would be wrong."""
    several = cluster.devices_per_island > 1
    if inside is not None and not several:
        raise ConfigError(
            f"inside={type(inside).__name__} is for the devices of an island, and cluster.devices_per_island=1: there is nobody to "
            f"work with. Use cluster.devices_per_island=2 or more, or inside=none."
        )
    if inside is not None or cluster.inside == Cluster().inside:
        return
    if not several:
        raise ConfigError(
            "cluster.inside is the line between the devices of an island, and cluster.devices_per_island=1: there is no such line. "
            "Use cluster.devices_per_island=2 or more with inside=ACCO or another algorithm, or leave cluster.inside as it was."
        )
    # In a ring of equals the slowest line sets the pace, so a faster one inside may be told: it changes nothing.
    if cluster.islands == 1 or _slower_inside(cluster):
        why = "there is one island" if cluster.islands == 1 else "it is slower than the lines between islands"
        raise ConfigError(
            f"cluster.inside is given and {why}, but without an algorithm inside every device is an island on cluster.link, and "
            f"the line inside is never used. Set inside=ACCO or another algorithm with algorithm=DiLoCo(...), or describe the "
            f"devices as islands: cluster.islands={cluster.devices}, cluster.devices_per_island=1, and this line as cluster.link."
        )


def has_optimizer(algorithm: Any) -> bool:
    """Whether the algorithm steps with the gradients of all, such as DDP; else replicas train by themselves."""
    return any(field.name == "optimizer" for field in fields(algorithm))


def _slower_inside(cluster: Cluster) -> bool:
    lines = [cluster.line(island) for island in range(cluster.islands)]
    return (
        cluster.inside.latency_s > max(line.latency_s for line in lines)
        or cluster.inside.up_bytes_per_s < min(line.up_bytes_per_s for line in lines)
        or cluster.inside.down_bytes_per_s < min(line.down_bytes_per_s for line in lines)
    )


def _settings(algorithm: Any, setting: str) -> str:
    name = setting.rpartition(".")[2]
    return f"{setting}={getattr(algorithm, name)}"


def _divisors(number: int, near: int) -> list[int]:
    """Some divisors of the number, those nearest to another."""
    found = [part for part in range(1, number + 1) if number % part == 0]
    return sorted(sorted(found, key=lambda part: abs(part - near))[:_SHOWN])


def _either(values: list[int]) -> str:
    """
    >>> _either([1]), _either([1, 2, 4])
    ('1', '1, 2 or 4')
    """
    return " or ".join(filter(None, (", ".join(map(str, values[:-1])), str(values[-1]))))


def check_devices_share_batch(run: Run, devices: int) -> None:
    """Refuse batches that have no example for each of the devices that share them."""
    pieces = devices * run.train.micro_batches
    if run.train.batch_size < pieces:
        each = f", in {run.train.micro_batches} micro-batches each" if run.train.micro_batches > 1 else ""
        raise ConfigError(
            f"train.batch_size={run.train.batch_size}: {devices} devices share each batch{each}, so it needs at least {pieces} "
            f"examples. Use larger batches, or fewer engine.devices."
        )
