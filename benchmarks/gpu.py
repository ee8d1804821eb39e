"""The acceptance of GPU staging: everything that only a GPU can show, with one command.

    python benchmarks/gpu.py --all [--ranks 2,4,8]     all checks, and all measurements
    python benchmarks/gpu.py --list                    their names
    python benchmarks/gpu.py bits killed copies        some of them

One GPU is enough: all ranks share it. With several, ranks take them in turn. A check prints pass, FAIL with the reason,
or "not here" with what is missing. A measurement prints its figures with their targets, and pass or FAIL. The exit
status is 1 if anything has failed, and 2 without a GPU: then nothing is checked. All results go to the folder `--out`,
with the machine and the command.

The checks are in `gpu_checks.py` and `gpu_torch.py`, the measurements in `gpu_times.py`. A check runs in new processes
under `asyncoll launch`, with a limit of time, because a fault of a driver may hang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RANK, Record, numbers, parser
from gpu_checks import CHECKS, SANITIZER, Check, NotHereError, sanitize_threads
from gpu_times import SIZES, TIMES, Measurement
from gpu_torch import GROUP_CHECKS, GroupCheck

from asyncoll.bench.claims import Cells

Acceptance = Check | GroupCheck | Measurement
LIMIT_S = 300  # of one check with one number of ranks
NOT_HERE = "not here: "


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check or a measurement has shown."""

    name: str
    ranks: int
    found: str  # "pass", "FAIL: why" or "not here: why"

    @property
    def has_failed(self) -> bool:
        return self.found.startswith("FAIL")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", help="the checks and measurements to run")
    options.add_argument("--all", action="store_true", help="run all of them")
    options.add_argument("--list", action="store_true", help="name them, and run none")
    options.add_argument("--ranks", type=numbers, default=[2, 4, 8])
    known = {each.name: each for each in [*CHECKS, *GROUP_CHECKS, *TIMES]}
    record = Record(options, "gpu")
    given = record.arguments
    if given.list:
        print("\n".join(f"{name:<12} {each.what}" for name, each in known.items()))
        return
    if unknown := [name for name in given.names if name not in known]:
        options.error(f"{', '.join(unknown)}: no such check; see --list")
    if not given.names and not given.all:
        options.error("name checks or measurements, or use --all")
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: nothing was checked", file=sys.stderr)
        sys.exit(2)
    chosen = list(known.values()) if given.all else [known[name] for name in given.names]
    sys.exit(carry_out(record, chosen, given.ranks))


def carry_out(record: Record, chosen: list[Acceptance], ranks: list[int]) -> int:
    """Run the checks and measurements, and print and keep what they show. Returns the exit status."""
    record.table("GPUs", [["device", "name", "memory (GiB)"], *gpus()])
    outcomes, raw = [], {}
    for each in chosen:
        for size in each.ranks or ranks:
            outcome, values = run(each, size)
            print(f"{each.name:<12} {size} ranks  {outcome.found}", flush=True)
            outcomes.append(outcome)
            raw[f"{each.name}, {size} ranks"] = {"result": outcome.found, "values": values}
            record.keep(raw, cells(raw))  # after each: the machine may be lent for a limited time
    rows = [[outcome.name, str(outcome.ranks), outcome.found] for outcome in outcomes]
    record.table("results", [["check", "ranks", "result"], *rows])
    failed = sum(outcome.has_failed for outcome in outcomes)
    print(f"\n{failed} of {len(outcomes)} have failed")
    record.write(raw, cells(raw))
    return int(failed > 0)


def cells(raw: dict[str, Any]) -> Cells:
    """The allreduces of two ranks, as claims.toml names them."""
    found = (raw.get("allreduce, 2 ranks") or {}).get("values") or {}
    return {
        name: {"asyncoll": found[f"{name}: us"] / 1e6, "Gloo": found[f"{name}: us of Gloo"] / 1e6}
        for name in SIZES
        if f"{name}: us" in found
    }


def gpus() -> list[list[str]]:
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [[f"cuda:{index}", each.name, f"{each.total_memory / 2**30:.0f}"] for index, each in enumerate(properties)]


def run(each: Acceptance, size: int) -> tuple[Outcome, Any]:
    """Run it in `size` new processes. Returns the outcome, and rank 0's values."""
    before = leftovers()
    with tempfile.TemporaryDirectory(prefix="asyncoll-gpu-") as folder:
        found, values = verdict(each, size, *started(each, size, folder), Path(folder))
    if left := leftovers() - before:
        found = f"FAIL: left in /dev/shm: {', '.join(sorted(left))}"
    return Outcome(each.name, size, found), values


def started(each: Acceptance, size: int, folder: str) -> tuple[int, str]:
    """The exit status of the processes, and what they have printed to stderr."""
    command = [sys.executable, "-m", "asyncoll", "launch", "-n", str(size), __file__, RANK, each.name, folder]
    try:
        ended = subprocess.run(
            command, env=os.environ | each.environment(), stderr=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return 124, f"nothing ended within {LIMIT_S} s"
    return ended.returncode, ended.stderr


def verdict(each: Acceptance, size: int, code: int, printed: str, folder: Path) -> tuple[str, Any]:
    answers = {rank: folder / str(rank) for rank in range(size)}
    told = {rank: json.loads(path.read_text()) for rank, path in answers.items() if path.exists()}
    if missing := [values for values in told.values() if isinstance(values, str) and values.startswith(NOT_HERE)]:
        return missing[0], None
    if silent := sorted(set(range(size)) - set(told) - set(each.lost)):
        reason = (printed.strip().splitlines() or [f"exit status {code}"])[-1]
        return f"FAIL: no answer of ranks {silent}: {reason}", None
    if survived := sorted(set(told) & set(each.lost)):
        return f"FAIL: ranks {survived} were to be lost, and have passed", None
    if code and not each.lost:
        return f"FAIL: exit status {code}", None
    return each.judge(told[0]), told[0]


def leftovers() -> set[str]:
    """The names that asyncoll may have left. A driver keeps names of its own there."""
    return {path.name for path in Path("/dev/shm").glob("*asyncoll*")}


# -- a rank ---------------------------------------------------------------------------------------


def rank(name: str, folder: str) -> None:
    """Run the check or measurement `name`. The file of this rank in `folder` gets its values once it has passed."""
    each = next(each for each in [*CHECKS, *GROUP_CHECKS, *TIMES] if each.name == name)
    answer = Path(folder) / os.environ["RANK"]
    if SANITIZER in os.environ:
        sanitize_threads()

    def tell(values: object) -> None:
        answer.write_text(json.dumps(values))

    try:
        each.run(tell)
    except NotHereError as reason:
        tell(f"{NOT_HERE}{reason}")


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        rank(*sys.argv[2:])
    else:
        main()
