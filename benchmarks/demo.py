"""The trainings of `make demo` as a record: the time to its target, of all rounds, and the accuracy.

python benchmarks/demo.py [--ranks 4] [--seed 0]
"""

from __future__ import annotations

import json
from pathlib import Path

from common import Record, parser

from trainers.demo import RUNS, demo


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--seed", type=int, default=0)
    record = Record(options, "demo")
    chosen = record.arguments
    folder: Path = chosen.out / "runs"
    demo(chosen.ranks, chosen.seed, "cpu", folder)
    reports = {rule: json.loads((folder / f"{rule}.json").read_text()) for rule in RUNS}
    cells = {
        rule: {
            f"to {100 * report['settings']['target']:.0f} %": report["time_to_target_s"],
            f"{report['rounds']} rounds": report["wall_s"],
            "final accuracy": report["final_score"],
        }
        for rule, report in reports.items()
    }
    record.write(reports, cells)


if __name__ == "__main__":
    main()
