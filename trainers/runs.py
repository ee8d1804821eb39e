"""Runs of the program under the launcher: their reports, read back from JSON, or their failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.report import Point

# Loaded once, before the launcher forks the ranks (torch.optim pulls in torch._dynamo): with eight ranks on
# two cores a run then starts in 6 s instead of 31 s.
PRELOAD = "numpy,torch,torch._dynamo,sklearn.datasets,sklearn.model_selection,asyncoll"
_LAST_LINES = 15


class RunFailedError(Exception):
    """A run that has ended with an error, or without a report; the text has its last lines of output."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: the report that rank 0 wrote."""

    report: dict[str, Any]

    @property
    def curve(self) -> list[Point]:
        """Score over time."""
        return [Point(*point) for point in self.report["curve"]]


def launch(ranks: int, arguments: Sequence[str], path: Path) -> Run:
    """Run `python -m trainers` with these arguments as `ranks` processes; the report goes to `path`.

    Raises RunFailedError.
    """
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "asyncoll", "launch", "-n", str(ranks), "-m", "trainers"]
    done = subprocess.run(
        [*command, *arguments, "--report", str(path)],
        env={"ASYNCOLL_PRELOAD": PRELOAD, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode or not path.exists():
        last = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        raise RunFailedError(f"exit status {done.returncode}; the last lines of output:\n{last}")
    return Run(json.loads(path.read_text()))
