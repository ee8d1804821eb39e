"""Startup time of N ranks that import torch, to their first and to their last line: `asyncoll launch` and torchrun.

    python benchmarks/startup.py [--ranks 8] [--rounds 3]

The two take turns; every rank imports torch and prints one line.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Record, parser

# One write: torchrun has its ranks write without a buffer, so that the ends of two lines may meet.
SCRIPT = "import os, torch\nos.write(1, f'rank {os.environ[\"RANK\"]} {torch.__version__}\\n'.encode())\n"
ASYNCOLL = [sys.executable, "-m", "asyncoll", "launch", "-n"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--rounds", type=int, default=3)
    record = Record(options, "startup")
    chosen = record.arguments
    times: dict[str, list[tuple[float, float]]] = {"asyncoll launch": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first_output.py"
        script.write_text(SCRIPT)
        for _ in range(chosen.rounds):
            for name, command in (("asyncoll launch", ASYNCOLL), ("torchrun", TORCHRUN)):
                times[name].append(start([*command, str(chosen.ranks), str(script)], chosen.ranks))
    lines = [["", "first line: median", "all", "last line: median", "all"]]
    for name, runs in times.items():
        first, last = zip(*runs, strict=True)
        lines.append([name, *show(first), *show(last)])
    record.table(f"{chosen.ranks} ranks that import torch: seconds, every round", lines)
    medians = {name: map(statistics.median, zip(*runs, strict=True)) for name, runs in times.items()}
    record.write(
        times, {name: dict(zip(("first line", "last line"), each, strict=True)) for name, each in medians.items()}
    )


def show(seconds: tuple[float, ...]) -> tuple[str, str]:
    return f"{statistics.median(seconds):.2f}", " ".join(f"{value:.2f}" for value in seconds)


def start(command: list[str], ranks: int) -> tuple[float, float]:
    """Seconds until the first and the last rank's line."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        seconds = [time.perf_counter() - begin for line in process.stdout if "rank" in line]
    if process.returncode or len(seconds) != ranks:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}, {len(seconds)} lines")
    return seconds[0], seconds[-1]


if __name__ == "__main__":
    main()
