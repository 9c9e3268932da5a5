"""The DiLoCo paper's ablations on one small workload, and which of its claims hold there.

    python benchmarks/diloco_ablations.py                       all of them, three seeds: about ten minutes on two cores
    python benchmarks/diloco_ablations.py --only H --only k     some of them
    python benchmarks/diloco_ablations.py --quick               all of them in miniature, to see whether they work

Rows are in `diloco_rows.py`, claims in `diloco_claims.py`. Tables go into the record and, after a whole run, into docs/diloco.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from ablations import Study
from diloco_claims import claims
from diloco_rows import QUICK, Plan, default_row, groups
from diloco_tables import introduction, plot_lengths
from groups import DEFAULT
from record import script

STUDY = Study(
    name="diloco_ablations",
    title="DiLoCo's ablations",
    about=__doc__ or "",
    page="diloco.md",
    plan=Plan(),
    quick=QUICK,
    groups=groups,
    standing=lambda plan: {DEFAULT: default_row(plan)},
    introduction=introduction,
    claims=claims,
    plot=plot_lengths,
)


def main(arguments: Sequence[str] | None = None) -> None:
    STUDY.main(arguments)


if __name__ == "__main__":
    script(main)
