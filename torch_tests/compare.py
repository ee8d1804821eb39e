"""The wheel's tests with Gloo and with asyncoll: runs both, and prints which tests pass with which."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections import Counter

from torch_tests.wheel import TOO_LONG

# Tests that pass with Gloo and need not pass with asyncoll, and why.
EXCUSED = {
    "test_ddp_profiling_torch_profiler": "asks for the profiler's titles, which torch's own backends write from C++",
}
BACKENDS = ("gloo", "asyncoll")
Results = dict[str, dict[str, str]]  # outcome and text of each test


def run(ranks: list[int], folder: pathlib.Path, again: bool) -> bool:
    """Run all tests in worlds of each of `ranks`; True if asyncoll passes all that Gloo passes.

    Results are kept in `folder`, a file for each run of one backend. Gloo's are used again unless `again`.
    """
    good = True
    for size in ranks:
        for selection in ("gloo", "nccl"):
            names = None if selection == "gloo" else _skipped(folder / f"wheel-gloo-gloo-{size}.jsonl")
            results = []
            for backend in BACKENDS:
                path = folder / f"wheel-{backend}-{selection}-{size}.jsonl"
                if backend != "gloo" or again or not path.exists():
                    _run(backend, selection, size, path, names)
                results.append(read(path))
            good = report(selection, size, *results) and good
    return good


def _run(backend: str, selection: str, size: int, path: pathlib.Path, names: list[str] | None) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch_tests.wheel",
        backend,
        selection,
        str(size),
        str(unfinished),
        *(names or ()),
    ]
    with path.with_suffix(".log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    unfinished.rename(path)


def _skipped(path: pathlib.Path) -> list[str]:
    return [test for test, result in read(path).items() if result["outcome"] == "skipped"]


def read(path: pathlib.Path) -> Results:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line.pop("test"): line for line in lines}


def report(selection: str, size: int, gloo: Results, ours: Results) -> bool:
    """Print the table of one selection at one size. True if it holds no surprise."""
    kinds: dict[tuple[bool, bool], list[str]] = {}
    for test in sorted(gloo | ours):
        passed = [results.get(test, {}).get("outcome") == "passed" for results in (gloo, ours)]
        skipped = all(results.get(test, {}).get("outcome") == "skipped" for results in (gloo, ours))
        if not skipped:
            kinds.setdefault((passed[0], passed[1]), []).append(test)
    skips = Counter(result["text"] for result in ours.values() if result["outcome"] == "skipped")
    of = {"gloo": "tests for Gloo", "nccl": "tests for NCCL alone"}[selection]
    print(f"== {size} ranks, {of}: {len(kinds.get((True, True), []))} pass with both, {skips.total()} are skipped")
    _print("with asyncoll alone", kinds.get((False, True), []), {})
    _print("with neither", kinds.get((False, False), []), gloo)
    excused = [test for test in kinds.get((True, False), []) if test in EXCUSED]
    _print("with Gloo alone, as is known", excused, {test: {"text": reason} for test, reason in EXCUSED.items()})
    surprises = [test for test in kinds.get((True, False), []) if test not in EXCUSED]
    _print("WITH GLOO ALONE", surprises, ours)
    for test in sorted(TOO_LONG) if selection == "gloo" else ():
        print(f"   not run, because it takes too long on a CPU: {test}")
    return not surprises


def _print(title: str, tests: list[str], reasons: Results) -> None:
    if tests:
        print(f"   {len(tests)} pass {title}:")
    for test in tests:
        lines = reasons.get(test, {}).get("text", "").strip().splitlines()
        errors = [line for line in lines if "Error" in line] or lines or [""]
        print(f"      {test}  {errors[-1][:150]}".rstrip())
