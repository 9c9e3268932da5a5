"""The speed of the codecs on one core: megabytes of fp32 values per second, encoded and decoded.

    python benchmarks/codec_speed.py              20M values: half a minute
    python benchmarks/codec_speed.py --quick      smoke test at small sizes

Each codec encodes a buffer of normal values and decodes it, beside one copy of the buffer. Codecs
alternate, repetition by repetition; figures are medians. Needs an idle machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from atoll.optim.codecs import CODECS, CodecName
from atoll.replica.local_replica import torch_threads
from atoll.telemetry.units import human_count
from progress import CellProgress, timed
from record import Record, benchmark_parser, holds_text, markdown_table, open_record, script

REQUIRED: Mapping[CodecName, float] = {"int8": 500.0, "int4": 500.0, "topk": 125.0}
"""The least speed of encoding, in MB/s of fp32 values."""
PARTS = ("encode", "decode")


def seconds(name: CodecName, values: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """Seconds of a copy of these values into `target`, and of each part of the codec, on one thread."""
    codec = CODECS[name]
    assert codec is not None
    with torch_threads(1):
        copy_s, _ = timed(lambda: target.copy_(values))
        encode_s, data = timed(lambda: codec.encode(values))
        decode_s, _ = timed(lambda: codec.decode(data, len(values), out=target))
    return {"copy": copy_s, "encode": encode_s, "decode": decode_s}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, "codec_speed", quick=True)
    parser.add_argument("--values", type=int, default=20_000_000, help="fp32 values per buffer")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each codec")
    options = parser.parse_args(arguments)
    count, repeats = (200_000, 2) if options.quick else (options.values, options.repeats)
    record = open_record(options, "codec_speed")
    cells = _measured(record, count, repeats, quiet=options.quiet)
    lines, table = outcome(cells)
    note = (
        f"{human_count(count)} values, one thread; medians of {repeats} repetitions. MB/s: megabytes of fp32 values. Copies: the "
        f"time over that of one copy of the buffer. Bytes: of the encoded form over those of fp32."
    )
    outcomes = "\n".join(f"- {line}" for line in lines)
    record.publish("The speed of the codecs", [f"## Outcome\n\n{outcomes}", f"## Figures\n\n{table}", note])


def _measured(record: Record, count: int, repeats: int, *, quiet: bool) -> dict[CodecName, list[dict[str, Any]]]:
    """The cells of each codec: a warm-up, then repetitions in turn."""
    names = [name for name, codec in CODECS.items() if codec is not None]
    keys = {(name, number): f"{name}, {count} values, {number}" for number in range(repeats) for name in names}
    missing = [number for number in range(repeats) if any(record.get(keys[name, number]) is None for name in names)]
    values = torch.randn(count if missing else 1, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(values)
    with CellProgress("codec speed", len(missing), quiet=quiet) as progress:
        for number in missing:
            progress.begin(f"repetition {number + 1}")
            for name in names:
                if number == missing[0]:
                    seconds(name, values, target)
                if record.get(keys[name, number]) is None:
                    record.add(keys[name, number], {"codec": name, "values": count, "seconds": seconds(name, values, target)})
            progress.end(f"repetition {number + 1} of {repeats}")
    return {name: [record[keys[name, number]] for number in range(repeats)] for name in names}


def speed(cells: Sequence[Mapping[str, Any]], part: str) -> float:
    """MB/s of fp32 values."""
    return median(4e-6 * cell["values"] / cell["seconds"][part] for cell in cells)


def outcome(cells: Mapping[CodecName, Sequence[Mapping[str, Any]]]) -> tuple[list[str], str]:
    """The verdicts, and the table."""
    lines = [
        f"{holds_text(speed(cells[name], 'encode') >= least)}: {name} encodes {speed(cells[name], 'encode'):.0f} MB of fp32 values "
        f"per second on one core (required: {least:.0f})."
        for name, least in REQUIRED.items()
    ]
    rows = []
    for name, mine in cells.items():
        codec = CODECS[name]
        assert codec is not None
        ratios = [f"{median(cell['seconds'][part] / cell['seconds']['copy'] for cell in mine):.1f}" for part in PARTS]
        figures = zip((f"{speed(mine, part):.0f}" for part in PARTS), ratios, strict=True)
        count = mine[0]["values"]
        rows.append([name, *(text for pair in figures for text in pair), f"{codec.nbytes(count) / (4 * count):.3f}"])
    headings = ["codec", *(text for part in PARTS for text in (f"{part}, MB/s", "copies")), "bytes"]
    return lines, markdown_table(headings, rows)


if __name__ == "__main__":
    script(main)
