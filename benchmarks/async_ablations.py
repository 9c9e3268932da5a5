"""The asynchronous paper's tables and ablations on one small workload, and which of its claims hold there.

    python benchmarks/async_ablations.py                           all of them, three seeds: about twenty minutes on two cores
    python benchmarks/async_ablations.py --only level --only k     some of them
    python benchmarks/async_ablations.py --quick                   all of them in miniature, to see whether they work

Rows are in `async_rows.py`, claims in `async_claims.py`. Tables go into the record and, after a whole run, into
docs/async_local_sgd.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from ablations import Study
from async_claims import claims
from async_rows import QUICK, Plan, groups, standing
from async_tables import introduction, plot_levels
from record import script

STUDY = Study(
    name="async_ablations",
    title="Asynchronous Local-SGD's ablations",
    about=__doc__ or "",
    page="async_local_sgd.md",
    plan=Plan(),
    quick=QUICK,
    groups=groups,
    standing=standing,
    introduction=introduction,
    claims=claims,
    plot=plot_levels,
    share="of sync's",
)


def main(arguments: Sequence[str] | None = None) -> None:
    STUDY.main(arguments)


if __name__ == "__main__":
    script(main)
