"""An ordinary script with torch's DDP beside its ports, while one random rank of each step is late.

    python benchmarks/reproduce/ported_script.py [--seeds 0,1,2] [--steps 40] [--eager-steps 64] [--straggle-s 1.6]

The programs are `examples/train_ddp.py`, `train_allreduce_sgd.py` and `train_eager_sgd.py`: 4 processes, a byte-level
Transformer on the standard library's sources, batches of different lengths, AdamW, warm-up and cosine, clipping, four
micro-batches a step. The rank drawn for a step sleeps for `--straggle-s`, about the length of a step. Losses are
those of rank 0 on the same held-out sequences. `time to DDP's loss` is the wall time until the loss is at most DDP's
last one, and its share of DDP's wall time. EagerSGD runs for more rounds: they are shorter, and have fewer gradients.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Record, numbers, parser

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
RANKS = 4
PROGRAMS = {"DDP, Gloo": "train_ddp", "AllreduceSGD": "train_allreduce_sgd", "EagerSGD": "train_eager_sgd"}
LINE = re.compile(r"step (\d+): validation loss (\S+), (\S+) s")


class Point(NamedTuple):
    """One line that a program has printed."""

    step: int
    loss: float
    wall_s: float


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--eager-steps", type=int, default=64, help="of EagerSGD, whose rounds are shorter")
    options.add_argument("--every", type=int, default=8)
    options.add_argument("--straggle-s", type=float, default=1.6)
    record = Record(options, "ported_script")
    chosen = record.arguments
    curves: dict[str, list[list[Point]]] = {name: [] for name in PROGRAMS}
    for seed in chosen.seeds:
        for name, program in PROGRAMS.items():
            steps = chosen.eager_steps if name == "EagerSGD" else chosen.steps
            flags = {"steps": steps, "every": chosen.every, "seed": seed, "straggle-s": chosen.straggle_s}
            curves[name].append(run(program, [f"--{flag}={value}" for flag, value in flags.items()]))
            print(f"# seed {seed}, {name}: {curves[name][-1][-1]}", flush=True)
    record.table(
        f"{RANKS} ranks, {chosen.steps} steps, one random rank {chosen.straggle_s:g} s late, seeds {chosen.seeds}",
        table(curves),
    )
    record.write(curves)


def run(program: str, flags: list[str]) -> list[Point]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "asyncoll", "launch", "-n", str(RANKS)]
        command += [str(EXAMPLES / f"{program}.py"), "--folder", folder, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\n{program} failed with exit code {done.returncode}")
    return [Point(int(step), float(loss), float(wall_s)) for step, loss, wall_s in LINE.findall(done.stdout)]


def table(curves: dict[str, list[list[Point]]]) -> list[list[str]]:
    base = curves["DDP, Gloo"]
    lines = [["", "last loss", "by seed", "wall time (s)", "time to DDP's loss (s)", "share of DDP's time", "by seed"]]
    lines[0].append("largest difference to DDP's losses")
    for name, each in curves.items():
        losses, times_s = [curve[-1].loss for curve in each], [curve[-1].wall_s for curve in each]
        reached_s = [reaches(curve, other[-1].loss) for curve, other in zip(each, base, strict=True)]
        shares = [
            None if time_s is None else time_s / other[-1].wall_s for time_s, other in zip(reached_s, base, strict=True)
        ]
        lines.append(
            [
                name,
                f"{statistics.median(losses):.4f}",
                " ".join(f"{loss:.4f}" for loss in losses),
                f"{statistics.median(times_s):.1f}",
                " ".join("-" if time_s is None else f"{time_s:.1f}" for time_s in reached_s),
                "-" if None in shares else f"{statistics.median(share for share in shares if share is not None):.2f}",
                " ".join("-" if share is None else f"{share:.2f}" for share in shares),
                f"{max(difference(curve, other) for curve, other in zip(each, base, strict=True)):.4f}",
            ]
        )
    return lines


def reaches(curve: list[Point], loss: float) -> float | None:
    """The wall time of the first point with at most this loss; None if there is none."""
    return next((point.wall_s for point in curve if point.loss <= loss), None)


def difference(curve: list[Point], other: list[Point]) -> float:
    """The largest difference of two losses after the same step."""
    losses = {point.step: point.loss for point in other}
    return max((abs(point.loss - losses[point.step]) for point in curve if point.step in losses), default=0.0)


if __name__ == "__main__":
    main()
