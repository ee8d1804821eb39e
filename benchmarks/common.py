"""Shared parts of the benchmarks: programs of ranks, and a record of the machine, the command and every number.

A benchmark is one script. Started by the user it is the driver; started by `ask` under the launcher it is one rank, and
the answer of rank 0 returns to the driver. The peers (Gloo) run under the same launcher as asyncoll,
so both are started, preloaded and limited to one thread a rank in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import asyncoll
from asyncoll.bench.claims import Cells
from asyncoll.bench.table import aligned
from asyncoll.launch import launch

RANK = "as-rank"
PACKAGES = ("numpy", "torch", "pyzmq", "uvloop")


def program(main: Callable[[], None], rank: Callable[[Any], Any]) -> None:
    """Run `main()`; in a process that `ask` has started as a rank, answer its question instead."""
    if sys.argv[1:2] == [RANK]:
        answer(rank)
    else:
        main()


def answer(rank: Callable[[Any], Any]) -> None:
    """Run `rank(question)` at every rank. Its result at rank 0 becomes the result of `ask`."""
    found = rank(json.loads(sys.argv[2]))
    if int(os.environ["RANK"]) == 0:
        Path(sys.argv[3]).write_text(json.dumps(found))


def ask(ranks: int, script: str, question: object, transport: str | None = None) -> Any:
    """Start `ranks` processes of `script` under the launcher; returns rank 0's answer. A failure ends the program."""
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        answer = Path(folder) / "answer"
        code = launch(ranks, [script, RANK, json.dumps(question), str(answer)], transport=transport)
        if code:
            sys.exit(f"{script}: {ranks} ranks failed with exit code {code} on {question}")
        return json.loads(answer.read_text())


class Record:
    """One run of a reproduction: its options, and its folder with a table, a plot and all raw numbers."""

    def __init__(self, parser: argparse.ArgumentParser, name: str) -> None:
        parser.add_argument("--out", type=Path, default=Path("runs/benchmarks") / name, help="folder for the results")
        self.arguments = parser.parse_args()
        self.name = name
        self._machine = machine()
        self._tables: list[dict[str, Any]] = []
        print(f"# {name}: {self._command()}")
        print("# " + "; ".join(f"{key} {value}" for key, value in self._machine.items()), flush=True)

    def table(self, title: str, lines: Sequence[Sequence[str]]) -> None:
        """Print lines of cells, the first of them the headings, and keep them."""
        self._tables.append({"title": title, "lines": [list(line) for line in lines]})
        print(f"\n{title}\n{aligned(lines)}", flush=True)

    def write(self, raw: object, cells: Cells | None = None) -> None:
        """Write all raw numbers, the tables, and the cells that claims.toml names, and tell where."""
        self.keep(raw, cells)
        print(f"\n# all numbers: {self._path('.json')}")

    def keep(self, raw: object, cells: Cells | None = None) -> None:
        """Write all raw numbers so far, and the tables and cells."""
        options = {key: str(value) for key, value in vars(self.arguments).items()}
        document = {
            "benchmark": self.name,
            "command": self._command(),
            "options": options,
            "machine": self._machine,
            "load average at the end": os.getloadavg(),
            "tables": self._tables,
            "cells": cells or {},
            "raw": raw,
        }
        self._path(".json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")

    @contextmanager
    def figure(self, panels: int = 1) -> Iterator[Sequence[Any]]:
        """A row of `panels` axes, written as a PNG at the end."""
        import matplotlib as mpl

        mpl.use("Agg")  # a backend that needs no display
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, panels, figsize=(7 * panels, 4.2), layout="constrained", squeeze=False)
        yield axes[0]
        path = self._path(".png")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
        print(f"# plot: {path}")

    def _path(self, suffix: str) -> Path:
        folder: Path = self.arguments.out
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self.name}{suffix}"

    def _command(self) -> str:
        return shlex.join(["python", *sys.argv])


def parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def machine() -> dict[str, str]:
    """The machine and the versions, which readers need to judge the numbers."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "load average at the start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "asyncoll": asyncoll.__version__,
        **{package: version(package) for package in PACKAGES},
    }


def numbers(text: str) -> list[int]:
    """`2,4,8` as a list."""
    return [int(part) for part in text.split(",")]
