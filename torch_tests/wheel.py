"""Runs `torch/testing/_internal/distributed/distributed_test.py` of the installed wheel with one backend.

    python -m torch_tests.wheel gloo|asyncoll|floats gloo|nccl RANKS RESULTS [TEST...]

`floats` is asyncoll with results that are off by one. The second argument selects the tests: those that the wheel runs
for Gloo, or those that it runs for NCCL. Calls to CUDA are mapped to the CPU (see `cpu.py`). A line of JSON for each
test is appended to the file RESULTS.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import types
import unittest
from typing import Any, TextIO

LIMIT_S = 150  # of each test: profiles of DDP take one of four ranks on two busy cores more than 60
TOO_LONG = {"test_ddp_uneven_inputs"}  # many minutes of convolutions on a CPU: `features` has the same with less
DEVICES = 8


class Name(str):
    """The name of a backend: torch reads the text itself, the wheel's tests find it equal to another name as well."""

    __slots__ = ("alias",)
    alias: str

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == self.alias

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str, selection: str, ranks: int) -> type[unittest.TestCase]:
    """The wheel's tests, with the decorators that select those of `selection`, to be run by `backend`."""
    _set_environment(selection, ranks)

    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    from torch_tests.cpu import map_cuda
    from torch_tests.features.sabotage import named

    torch.set_num_threads(1)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    if selection == "nccl":
        dist.is_nccl_available = lambda: True
        common_distributed.requires_nccl_version = lambda *_: lambda test: test
    from torch.testing._internal.distributed import distributed_test as wheel

    map_cuda(DEVICES)
    os.environ["BACKEND"] = "mpi"  # by the wheel's rule, only this one runs the tests of small groups in small worlds
    name = Name(named(backend))
    name.alias = selection
    wheel.BACKEND = name
    wheel.Barrier.sync.__func__.__defaults__ = (None, LIMIT_S)  # seconds
    _replace_names(name)

    class Wheel(wheel.TestDistBackend, wheel.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, test: Any, elapsed_s: float) -> None:
            """The wheel looks at the first rank's exit status; here all ranks' statuses count."""
            super()._check_return_codes(test, elapsed_s)
            statuses = [process.exitcode for process in self.processes]
            if test not in self.skip_return_code_checks:
                assert set(statuses) == {0}, f"the exit statuses of the ranks are {statuses}"

    return Wheel


def _set_environment(selection: str, ranks: int) -> None:
    """Set what the wheel's tests read from the environment when they are imported, and make their folders."""
    folder = tempfile.mkdtemp()
    os.environ |= {
        "BACKEND": selection,
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": folder,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT_S),
    }
    os.environ.setdefault("INIT_METHOD", f"file://{folder}/shared_init_file")
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, name))


def _replace_names(name: Name) -> None:
    """Let `name` take the place of the backends that the wheel's tests, or torch, ask for by name."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    new_group = dist.new_group
    dist.new_group = lambda ranks=None, timeout=None, backend=None, **settings: new_group(
        ranks, timeout, name if backend == "nccl" else backend, **settings
    )
    # torch.distributed.monitored_barrier refuses any name but Gloo's before it calls the group.
    known = {**vars(c10d), "get_backend": lambda group=None: "gloo"}
    dist.monitored_barrier = types.FunctionType(  # type: ignore[assignment]
        c10d.monitored_barrier.__code__, known, argdefs=c10d.monitored_barrier.__defaults__
    )


class Recorder(unittest.TestResult):
    """Writes each test's result when it is over."""

    def __init__(self, results: TextIO) -> None:
        super().__init__()
        self.results = results
        self.began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self.began = time.monotonic()

    def _write(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        line = {
            "test": test.id().rsplit(".", 1)[-1],
            "outcome": outcome,
            "text": text,
            "seconds": round(time.monotonic() - self.began, 1),
        }
        print(json.dumps(line), file=self.results, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._write(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._write(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802
        self._write(test, "failed", self._exc_info_to_string(error, test))  # type: ignore[attr-defined]

    addError = addFailure  # noqa: N815


def main(backend: str, selection: str, ranks: int, path: str, names: list[str]) -> None:
    cases = load(backend, selection, ranks)
    names = names or unittest.TestLoader().getTestCaseNames(cases)  # type: ignore[assignment]
    with open(path, "a") as results:
        recorder = Recorder(results)
        for name in names:
            if name in TOO_LONG:
                continue
            cases(name).run(recorder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:])
