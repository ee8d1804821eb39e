"""Runs tests with Gloo and with asyncoll, and prints which pass with which."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from torch_tests.wheel import TOO_LONG

# Tests that pass with Gloo and need not pass with asyncoll, and why.
EXCUSED: dict[str, str] = {}
# More ranks than cores compile and profile here: a process may get no time for the half second after which it counts as
# frozen. No test here is about that.
ENVIRONMENT = {"ASYNCOLL_FREEZE_S": "20"}
Results = dict[str, dict[str, str]]  # outcome and text of each test


class Runs:
    """Results of runs: a file for each in `folder`. Those of Gloo are used again unless `again`."""

    def __init__(self, folder: Path, again: bool) -> None:
        self.folder = folder
        self.again = again
        folder.mkdir(parents=True, exist_ok=True)

    def results(self, name: str, module: str, arguments: list[str], names: list[str] | None = None) -> Results:
        """What `python -m module arguments FILE names` writes; its output goes to a log beside the file."""
        path = self.folder / f"{name}.jsonl"
        if self.again or "gloo" not in arguments[:1] or not path.exists():
            part = path.with_suffix(".part")
            part.unlink(missing_ok=True)
            with path.with_suffix(".log").open("w") as log:
                command = [sys.executable, "-m", module, *arguments, str(part), *(names or ())]
                subprocess.run(command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, check=True)
            part.rename(path)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return {line.pop("test"): line for line in lines}


def wheel(runs: Runs, size: int) -> bool:
    """PyTorch's tests of Gloo, then those of NCCL alone. True if asyncoll passes all that Gloo passes."""
    good = True
    names: list[str] | None = None
    for selection, title in ("gloo", "PyTorch's tests of Gloo"), ("nccl", "PyTorch's tests of NCCL alone, on the CPU"):
        gloo = _of_gloo(runs, selection, size, names)
        ours = _of_wheel(runs, "asyncoll", selection, size, names)
        good = report(f"{title}, {size} ranks", gloo, ours) and good
        names = [test for test, result in gloo.items() if result["outcome"] == "skipped"]
    print(f"   not run, because they take too long on a CPU: {', '.join(sorted(TOO_LONG))}")
    return good


def _of_gloo(runs: Runs, selection: str, size: int, names: list[str] | None) -> Results:
    """Gloo's results. What fails is run once more: a busy machine must not excuse asyncoll."""
    found = _of_wheel(runs, "gloo", selection, size, names)
    failed = [test for test, result in found.items() if result["outcome"] == "failed"]
    return found | _of_wheel(runs, "gloo", selection, size, failed, "-again") if failed else found


def _of_wheel(
    runs: Runs, backend: str, selection: str, size: int, names: list[str] | None, suffix: str = ""
) -> Results:
    file = f"wheel-{backend}-{selection}-{size}{suffix}"
    return runs.results(file, "torch_tests.wheel", [backend, selection, str(size)], names)


def features(runs: Runs, size: int) -> bool:
    """Our tests of features. True if asyncoll passes all."""
    gloo, ours = (
        runs.results(f"features-{backend}-{size}", "torch_tests.features.run", [backend, str(size)])
        for backend in ("gloo", "asyncoll")
    )
    return report(f"Features, {size} ranks", gloo, ours) and _all_pass(ours)


def frameworks(runs: Runs, size: int) -> bool:
    """Training by frameworks. True if asyncoll passes all."""
    ours = runs.results(f"frameworks-asyncoll-{size}", "torch_tests.frameworks.run", ["asyncoll", str(size)])
    report(f"Frameworks, {size} ranks", {}, ours)
    return _all_pass(ours)


def sabotage(runs: Runs, size: int) -> bool:
    """Every check of values fails if the backend's results are off by one."""
    good = _sabotage_wheel(runs, size)
    for module in "features", "frameworks":
        for kind in ("floats", "bytes") if module == "features" else ("floats",):
            found = runs.results(f"{module}-{kind}-{size}", f"torch_tests.{module}.run", [kind, str(size)])
            passed = sorted(test for test, result in found.items() if result["outcome"] == "passed")
            failed = sum(result["outcome"] == "failed" for result in found.values())
            print(f"== {module.capitalize()} with results off by one ({kind}), {size} ranks: {failed} fail, as wanted")
            _print("ALL THE SAME", passed, {})
            good = good and failed > 0 and not passed
    return good


def _sabotage_wheel(runs: Runs, size: int) -> bool:
    """At least a third of PyTorch's tests fail then. The others, as those of all_reduce, check no values of floats."""
    gloo = _of_gloo(runs, "gloo", size, None)
    names = [test for test, result in gloo.items() if result["outcome"] == "passed"]
    found = _of_wheel(runs, "floats", "gloo", size, names)
    passed = sorted(test for test, result in found.items() if result["outcome"] == "passed")
    print(f"== PyTorch's tests of Gloo with results off by one, {size} ranks: {len(found) - len(passed)} of ", end="")
    print(f"{len(found)} that Gloo passes fail, as wanted")
    _print("all the same", passed, {})
    return len(passed) < len(found) * 2 / 3


def report(title: str, gloo: Results, ours: Results) -> bool:
    """Print which tests pass with which backend. True if all that pass with Gloo pass with asyncoll."""
    kinds: dict[tuple[bool, ...], list[str]] = {}
    for test in sorted(gloo | ours):
        outcomes = [results.get(test, {}).get("outcome", "not run") for results in (gloo, ours)]
        if outcomes[0] != "skipped":  # what asyncoll alone skips is no success
            kinds.setdefault(tuple(outcome == "passed" for outcome in outcomes), []).append(test)
    skips = Counter(result["text"] for result in ours.values() if result["outcome"] == "skipped")
    counts = {key: len(kinds.get(key, [])) for key in ((True, True), (True, False), (False, True), (False, False))}
    print(f"== {title}: pass with both {counts[True, True]}, with Gloo alone {counts[True, False]}, ", end="")
    print(f"with asyncoll alone {counts[False, True]}, with neither {counts[False, False]}; skipped {skips.total()}")
    _print("with asyncoll alone", kinds.get((False, True), []), gloo)
    _print("with neither", kinds.get((False, False), []), gloo or ours)
    alone = kinds.get((True, False), [])
    reasons = {test: {"text": reason} for test, reason in EXCUSED.items()}
    _print("with Gloo alone, for a known reason", [test for test in alone if test in EXCUSED], reasons)
    surprises = [test for test in alone if test not in EXCUSED]
    _print("WITH GLOO ALONE", surprises, ours)
    return not surprises


def _all_pass(ours: Results) -> bool:
    return all(result["outcome"] in ("passed", "skipped") for result in ours.values())


def _print(title: str, tests: list[str], reasons: Results) -> None:
    if tests:
        print(f"   {len(tests)} pass {title}:")
    for test in tests:
        lines = reasons.get(test, {}).get("text", "").strip().splitlines()
        errors = [line for line in lines if "Error" in line] or lines or [""]
        print(f"      {test}  {errors[-1][:150]}".rstrip())
