"""`python -m trainers list`: the algorithms, the workloads and the imbalances, each with its paper."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from trainers.algorithms import ALGORITHMS
from trainers.imbalance import IMBALANCES
from trainers.workloads import WORKLOADS

_NAME_WIDTH = max(len(name) for name in (*ALGORITHMS, *WORKLOADS, *IMBALANCES))


def listing() -> list[Table]:
    """Three tables."""
    return [
        _table("algorithms", ((name, entry.summary, entry.paper) for name, entry in ALGORITHMS.items())),
        _table("workloads", ((name, kind.summary, kind.paper) for name, kind in WORKLOADS.items())),
        _table("imbalances", ((form, *_split(summary)) for form, summary in IMBALANCES.items())),
    ]


def _table(title: str, rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("name", no_wrap=True, min_width=_NAME_WIDTH)
    table.add_column("summary", ratio=3)
    table.add_column("paper", ratio=2)
    for row in rows:
        table.add_row(*row)
    return table


def _split(summary: str) -> tuple[str, str]:
    """The text, and the source that stands in parentheses at its end."""
    text, _, source = summary.rstrip(".").partition(" (")
    return f"{text.rstrip('.')}.", source.rstrip(")")
