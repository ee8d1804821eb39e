"""Prints a headline, and rows as a table on a terminal, as aligned text into a pipe, or as JSON objects."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import click

import asyncoll
from asyncoll.bench.plan import BenchPlan, Row
from asyncoll.bench.runs import TRANSPORTS
from asyncoll.testing.progress_bar import progress

ColumnForm = tuple[str, str, str]  # key, heading, format

_DENSE: list[ColumnForm] = [("size", "size (B)", "d"), ("count", "count", "d"), ("type", "type", "s")]
_TIMES: list[ColumnForm] = [("time_us", "time (us)", ".1f"), ("p99_us", "p99 (us)", ".1f")]
_WRONG: ColumnForm = ("wrong", "#wrong", "d")
COLUMNS: dict[str, list[ColumnForm]] = {
    "allreduce": [
        *_DENSE,
        ("redop", "redop", "s"),
        *_TIMES,
        ("algbw", "algbw (GB/s)", ".3f"),
        ("busbw", "busbw (GB/s)", ".3f"),
        _WRONG,
    ],
    "pingpong": [*_DENSE, *_TIMES, ("bandwidth", "bandwidth (GB/s)", ".3f"), _WRONG],
    "solo": [
        ("size", "size (B)", "d"),
        ("mode", "mode", "s"),
        ("mean_us", "mean wait (us)", ".0f"),
        ("median_us", "median (us)", ".0f"),
        ("expected_us", "expected mean (us)", ".0f"),
        ("nap", "NAP", ".2f"),
        ("expected_nap", "expected NAP", ".2f"),
        ("ratio", "full/this", ".2f"),
        ("bound", "bound", ".2f"),
        _WRONG,
    ],
}
COMMON = ("benchmark", "ranks", "transport", "device")  # of all rows, in JSON
NOTES = {
    "allreduce": "times: each rank's median, then the slowest rank's",
    "pingpong": "times: half a round trip, median at rank 0",
    "solo": "waits of all ranks; the expected values leave out the cost of communication; the bound has the draws",
}


def headline(plan: BenchPlan) -> str:
    """The machine, the versions and the method, which readers need to judge the numbers."""
    versions = " ".join(f"{package} {version(package)}" for package in ("numpy", "pyzmq", "uvloop"))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.machine()
    return (
        f"# {plan.benchmark}, {plan.ranks} ranks, {plan.transport} ({TRANSPORTS[plan.transport]}), {plan.device}; "
        f"{len(os.sched_getaffinity(0))} cores, {cpu}; "
        f"asyncoll {asyncoll.__version__}, Python {platform.python_version()}, {versions}; {NOTES[plan.benchmark]}"
    )


def show(plan: BenchPlan, rows: Generator[Row, None, None], *, as_json: bool) -> int:
    """Print the rows of a benchmark to stdout: what there is of them if the benchmark fails, or at Ctrl-C.

    Returns the exit code: 1 if an element is wrong.
    """
    columns, common = COLUMNS[plan.benchmark], {name: getattr(plan, name) for name in COMMON}
    cells: list[list[str]] = []
    wrong = 0
    try:
        with progress(f"{plan.benchmark}, {plan.ranks} ranks", plan.rows) as advance, closing(rows):
            for row in rows:
                wrong += row["wrong"]
                cells.append([format(row[key], form) for key, _, form in columns])
                advance(f"{plan.benchmark}, {plan.ranks} ranks, after {row['size']} bytes")
                if as_json:
                    click.echo(json.dumps(common | row))
    finally:
        if cells and not as_json:
            click.echo(headline(plan))
            print_table([heading for _, heading, _ in columns], cells)
    return int(wrong > 0)


def print_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print lines of text with right-aligned columns, on a terminal as a table with borders."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Column, Table

        table = Table(*(Column(heading, justify="right") for heading in headings))
        for line in lines:
            table.add_row(*line)
        Console().print(table)
    else:
        click.echo(aligned([headings, *lines]))


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of plain text with right-aligned columns."""

    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
