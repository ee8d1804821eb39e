"""Ranks as processes from a cell: `asyncoll.notebook.run`, called here as a kernel calls the code of a cell."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import inspect
import io
import logging
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll import notebook
from asyncoll.errors import PeerLostError, RemoteError, UsageError
from tests.launch.test_launch import await_ready, environment, pids, runs, until
from tests.project.test_docstrings import examples_in
from tests.support.places import SCRIPTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [1, 3])
def test_results_come_back_as_values_of_this_process(size):
    data = {"outside": np.arange(3)}  # what `main` refers to needs no copy, and is not changed

    async def main(comm, factor):
        x = torch.full((2000,), comm.rank * factor)
        await comm.allreduce(x)
        data["outside"] += 1
        numbers = np.full((3, 1000), comm.rank, "i2")
        return {
            "x": x,
            "numbers": numbers,
            "short": data["outside"],
            "plain": (comm.rank, "text", b"bytes", {None, 2j}),
        }

    results = notebook.run(main, 0.5, ranks=size)
    assert [result["plain"] for result in results] == [(rank, "text", b"bytes", {None, 2j}) for rank in range(size)]
    for rank, result in enumerate(results):
        assert torch.equal(result["x"], torch.full((2000,), sum(range(size)) * 0.5))
        assert np.array_equal(result["numbers"], np.full((3, 1000), rank, "i2"))
        assert result["short"].tolist() == [1, 2, 3]
        result["x"] += 1  # they are this process's own
    assert data["outside"].tolist() == [0, 1, 2]


def test_the_example_of_the_docstring():
    (source,) = examples_in(inspect.getdoc(notebook.run))
    space = {"asyncoll": asyncoll, "torch": torch}
    exec(source, space)
    assert space["first"].tolist() == [6.0] * 3
    assert len(space["others"]) == 3


def test_a_cell_has_a_running_loop_an_output_for_text_and_pools_of_threads(monkeypatch, capfd):
    """A fork of the thread that has a pool of OpenMP would wait for its threads for ever."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(builtins, "input", lambda prompt: pytest.fail("the kernel is asked"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.ones(400, 400)

    async def main(comm):
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        print("sum", (x @ x).sum().item())
        print("to stderr", file=sys.stderr)
        with pytest.raises(EOFError, match="ask in the notebook"):
            input("n? ")  # noqa: ASYNC250
        return threads

    async def cell():
        assert (x @ x).sum() == 400**3
        return notebook.run(main, ranks=2)

    try:
        assert asyncio.run(cell()) == [1, 1]
    finally:
        torch.set_num_threads(before)
    assert sorted(sys.stdout.getvalue().splitlines()) == ["0: sum 64000000.0", "1: sum 64000000.0"]
    assert sorted(capfd.readouterr().err.splitlines()) == ["0: to stderr", "1: to stderr"]


def test_handlers_of_logging_of_an_earlier_cell_write_as_a_rank(monkeypatch, capfd):
    """A kernel's own stream would show the line, and know of no rank."""
    of_kernel = io.StringIO()
    monkeypatch.setattr(sys, "stderr", of_kernel)
    handler, logger = logging.StreamHandler(), logging.getLogger("of a notebook")
    logger.addHandler(handler)

    async def main(comm):
        logger.warning("of rank %d", comm.rank)

    try:
        notebook.run(main, ranks=2)
        logger.warning("of the kernel")
    finally:
        logger.removeHandler(handler)
    assert sorted(of_kernel.getvalue().splitlines()) == ["0: of rank 0", "1: of rank 1", "of the kernel"]


def test_a_rank_that_replaces_its_output_keeps_the_descriptor():
    """The next socket of the rank would take it, and uvloop ends a process that closes such a socket."""

    async def main(comm):
        sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
        return [os.fstat(descriptor).st_ino > 0 for descriptor in range(3)]

    async def within(comm):
        return notebook.run(main, ranks=1) if comm.rank == 1 else None

    assert notebook.run(main, ranks=2) == [[True] * 3] * 2
    assert notebook.run(within, ranks=2) == [None, [[True] * 3]]


async def _raises(comm):
    await comm.barrier()
    if comm.rank == 1:
        raise ValueError("unwell: very")
    await comm.barrier()


async def _is_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await comm.barrier()


async def _is_ended(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)  # which the kernel handles while ranks run
    await comm.barrier()


async def _exits(comm):
    if comm.rank == 1:
        os._exit(3)
    await comm.barrier()


async def _exits_well(comm):
    if comm.rank == 1:
        os._exit(0)
    await comm.barrier()


async def _leaves(comm):
    if comm.rank == 1:
        sys.exit()
    await comm.barrier()


async def _leaves_last(comm):
    await comm.barrier()
    if comm.rank == 1:
        sys.exit("enough")


@dataclasses.dataclass
class Score:
    value: int


@pytest.mark.parametrize(
    ("main", "kind", "told"),
    [
        (_raises, RemoteError, r"(?s)^ValueError at rank 1: unwell: very\n\nTraceback.*in _raises"),
        (_is_killed, PeerLostError, r"(?m)^rank 1 \(host .*, pid \d+\) is gone: it was killed by SIGKILL$"),
        (_is_ended, PeerLostError, "(?m)it was killed by SIGTERM$"),
        (_exits, PeerLostError, r"(?m)is gone: it ended with exit code 3$"),
        (_exits_well, PeerLostError, r"^rank 1 \(host .*, pid \d+\) is gone: as rank [02] reports: rank 1 .* is gone"),
        (_leaves, RemoteError, r"(?s)^asyncoll.*UsageError at rank 1: main has raised SystemExit\(\),.*sys.exit"),
        (_leaves_last, RemoteError, r"^asyncoll.*UsageError at rank 1: main has raised SystemExit\('enough'\), "),
    ],
)
def test_the_root_cause_is_raised(main, kind, told):
    with pytest.raises(kind, match=told) as caught:
        notebook.run(main, ranks=3)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("result", "kind", "told"),
    [
        (object(), RemoteError, "the result of main is a <class 'object'>, which cannot be sent"),
        (Score(1), UsageError, "the result of rank 0: a dataclass .*Score"),
    ],
)
def test_results_that_cannot_come_back(result, kind, told):
    async def main(comm):
        return result

    with pytest.raises(kind, match=told):
        notebook.run(main, ranks=1)


def test_ranks_that_end_well_without_a_result():
    async def main(comm):
        await comm.barrier()
        os._exit(0)

    with pytest.raises(PeerLostError, match="it ended with exit code 0, and without a result"):
        notebook.run(main, ranks=1)


def test_what_is_refused(monkeypatch):
    async def main(comm):
        return comm.rank

    with pytest.raises(UsageError, match="at least one rank, not 0"):
        notebook.run(main, ranks=0)
    with pytest.raises(UsageError, match="needs an `async def main"):
        notebook.run(lambda comm: 1, ranks=2)
    with pytest.raises(UsageError, match="open files"):
        notebook.run(main, ranks=100_000_000)
    refused = []

    def elsewhere():
        with pytest.raises(UsageError, match="in the main thread"):
            notebook.run(main, ranks=2)
        refused.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert refused
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="this process uses CUDA"):
        notebook.run(main, ranks=2)


def test_after_an_interrupt_the_next_cell_works(capfd):
    kernel = os.getpid()

    async def main(comm):
        await comm.barrier()
        if comm.rank == 1:
            os.kill(kernel, signal.SIGINT)
        await asyncio.Event().wait()

    async def following(comm):
        return comm.rank

    with pytest.raises(KeyboardInterrupt):
        notebook.run(main, ranks=3)
    assert notebook.run(following, ranks=3) == [0, 1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capfd.readouterr().err == "SIGINT: the ranks get 10 s; a second signal kills them\n"


def test_a_kernel_that_is_killed_leaves_nothing(tmp_path):
    command = [sys.executable, SCRIPTS / "notebook/cell_whose_ranks_have_children.py", tmp_path]
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "env": environment({})}
    with subprocess.Popen(command, **options) as kernel:
        await_ready(kernel, 2)
        folder = (tmp_path / "folder").read_text()
        assert os.path.exists(folder)
        os.killpg(kernel.pid, signal.SIGKILL)  # as Jupyter does
    assert len(pids(tmp_path)) == 4  # two ranks, and a child of each in a session of its own
    until(lambda: not any(map(runs, pids(tmp_path))))
    until(lambda: not os.path.exists(folder))
