"""Runs of the program under the launcher: their reports, read back from JSON, or their failures."""

from __future__ import annotations

import json
import os
import signal
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

    Raises RunFailedError. Ctrl-C kills the ranks; all are gone when it raises KeyboardInterrupt.
    """
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "asyncoll", "launch", "-n", str(ranks), "-m", "trainers"]
    launcher = subprocess.Popen(
        [*command, *arguments, "--report", str(path)],
        env={"ASYNCOLL_PRELOAD": PRELOAD, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with launcher:
        try:
            output, _ = launcher.communicate()
        except KeyboardInterrupt:
            for signum in (signal.SIGINT, signal.SIGTERM):  # the ranks get seconds to end, until a second signal
                launcher.send_signal(signum)
            launcher.communicate()
            raise
    if launcher.returncode or not path.exists():
        last = "\n".join(output.splitlines()[-_LAST_LINES:])
        raise RunFailedError(f"exit status {launcher.returncode}; the last lines of output:\n{last}")
    return Run(json.loads(path.read_text()))
