"""Ranks that fork: the child does not disturb the world, and the death of the rank is noticed while the child lives."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import asyncoll
from asyncoll import Communicator, UsageError
from asyncoll.testing import run_ranks
from asyncoll.transport.memory import segment
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S, WHOLE_END, without_delays

SCRIPT = SCRIPTS / "forks/one_rank_forks.py"

both = pytest.mark.parametrize("transport", ["shm", "zmq"])


def launched(transport: str, *arguments: str, **settings: str) -> list[str]:
    """The sorted lines that three ranks print."""
    command = [sys.executable, "-m", "asyncoll", "launch", "-n", "3", "--transport", transport, SCRIPT, *arguments]
    environment = os.environ | ({} if "loader" in arguments else LIGHT) | settings
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, without_delays(done.stderr)) == (0, ""), done.stderr
    return sorted(done.stdout.splitlines())


def in_a_child(act, meanwhile=lambda: None) -> str:
    """The result of `act()` in a forked child of this process, or its error, as text. The parent calls `meanwhile`."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            text = str(act())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    meanwhile()
    with open(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return text or f"exit code {os.waitstatus_to_exitcode(status)}"


# -- the death of a parent ------------------------------------------------------------------------


@pytest.mark.slow
@both
@pytest.mark.parametrize(("how", "freeze_s"), [("python", "0"), ("python", "20"), ("c", "0"), ("loader", "0")])
def test_every_survivor_names_a_dead_rank_whose_child_lives(how, freeze_s, transport):
    heard = launched(transport, "dies", how, ASYNCOLL_FREEZE_S=freeze_s)
    assert heard == ["0: its child lives", "0: rank 1 is dead", "2: rank 1 is dead"]


@pytest.mark.slow
def test_a_dead_rank_of_another_host_is_named_although_its_child_lives(forked_world):
    """No rank can watch a process of another host, so the child must have closed its connections."""
    ranks = forked_world(
        os.environ | {"ASYNCOLL_FREEZE_S": "0"}, 3, SCRIPTS / "world/on_own_hosts.py", SCRIPT, "dies", "python"
    )
    assert [ranks[rank].end()[1].split("\n")[0] for rank in (0, 2)] == ["rank 1 is dead"] * 2


SERVICE = """
import asyncio, os, signal, sys
from asyncoll.rpc import serve

class Service:
    async def fork(self) -> int:
        child = os.fork()
        if not child:
            signal.pause()
        return child
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with serve(Service(), sys.argv[1]) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("url", ["ipc", "tcp://127.0.0.1:0"])
def test_a_client_notices_a_dead_service_whose_child_lives(url, tmp_path):
    url = f"ipc://{tmp_path}/s" if url == "ipc" else url

    async def main(address: str) -> int:
        async with asyncoll.rpc.connect(address) as client:
            child = await client.call("fork")
            with pytest.raises(asyncoll.ServiceLostError, match="its connection closed"):
                await client.call("die")
            return child

    with subprocess.Popen([sys.executable, "-c", SERVICE, url], stdout=subprocess.PIPE, text=True) as service:
        try:
            child = asyncio.run(main(service.stdout.readline().strip()))
            os.kill(child, signal.SIGKILL)
        finally:
            service.kill()


# -- a child that leaves --------------------------------------------------------------------------


@pytest.mark.slow
@both
@pytest.mark.parametrize("how", [(), ("connect",)], ids=["run", "connect"])
def test_a_child_leaves_at_once_and_its_parent_continues(how, transport):
    told = launched(transport, "leaves", *how)
    assert told == ["0: rank 0 left", "1: rank 1 left", "1: the child left with code 7", "2: rank 2 left"]


@pytest.mark.slow
@both
def test_ranks_with_loaders_train_and_end(forked_world, transport):
    for rank in forked_world(os.environ | {"ASYNCOLL_TRANSPORT": transport} | WHOLE_END, 3, SCRIPT, "trains"):
        assert rank.end() == (0, "gradients 6\n", "")


@pytest.mark.slow
@both
def test_a_program_that_a_rank_starts_cannot_join_as_that_rank(transport):
    told = launched(transport, "starts")
    assert told == [
        "0: rank 0 left",
        "1: 0: the sum is 2 1: the sum is 2",
        "1: rank 1 left",
        "1: refused",
        "2: rank 2 left",
    ]


# -- what a child may do --------------------------------------------------------------------------

CALLS = {
    "allreduce": lambda comm: comm.allreduce(np.ones(3)),
    "barrier": lambda comm: comm.barrier(),
    "send": lambda comm: comm.send(np.ones(3), 0),
    "solo_allreduce": lambda comm: comm.solo_allreduce(np.ones(3)),
    "sparse_allreduce": lambda comm: comm.sparse_allreduce(np.ones(3), density=0.5),
    "split": lambda comm: comm.split(0),
    "empty": lambda comm: comm.empty(3, "float64"),
    "abort": lambda comm: comm.abort("enough"),
    "statistics": lambda comm: comm.statistics(),
    "rpc": lambda comm: comm.rpc,
}


@pytest.mark.parametrize("transport", ["inproc", "zmq", "shm"])
@pytest.mark.parametrize("call", CALLS)
def test_a_child_cannot_call_its_parents_communicator(call, transport):
    async def main(comm: Communicator) -> str:
        await comm.barrier()
        told = in_a_child(lambda: CALLS[call](comm)) if comm.rank == 1 else ""
        await comm.allreduce(np.ones(3))
        return told

    told = run_ranks(2, main, transport)[1]
    if call == "empty" and transport != "shm":
        assert told.startswith("[")  # the tensors are ordinary memory in the child
    else:
        assert told.startswith(f"UsageError: this communicator belongs to process {os.getpid()}, and process ")


def test_a_child_cannot_call_functions_of_ranks():
    async def main(comm: Communicator) -> str:
        rpc = comm.rpc
        return in_a_child(lambda: rpc.call(0, "f").send(None)) if comm.rank else ""

    assert run_ranks(2, main, "shm")[1].startswith("UsageError: this communicator belongs to process")


# -- what a child sees ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("count", [3, 5000, 1_000_000])
def test_a_child_has_a_copy_of_registered_tensors(count, transport):
    """The copy has the values at the fork. Later writes of the parent and of the child are not seen by the other."""
    import torch

    async def main(comm: Communicator) -> tuple[str, float]:
        x, neighbour = comm.empty(count, "float64"), comm.empty(3, torch.float32)
        x[:], neighbour[:] = 5, 7
        await comm.allreduce(x)
        told = ""
        if comm.rank == 1:
            reader, writer = os.pipe()

            def act() -> list[float]:
                os.close(writer)
                os.read(reader, 1)  # until the parent has written to `x`
                seen = [float(x.min()), float(x.max()), float(neighbour.sum())]
                x[:], neighbour[:] = 9, 9
                return [*seen, float(x.sum()) / count]

            def go_on() -> None:
                x.fill(6)
                os.close(writer)

            told = in_a_child(act, go_on)
            os.close(reader)
        await comm.barrier()
        return told, [float(x.min()), float(x.max()), float(neighbour.sum())]

    results = run_ranks(2, main, transport)
    # The sums are 5 + 5, and the three neighbours 7 each.
    assert results == [("", [10, 10, 21]), ("[10.0, 10.0, 21.0, 9.0]", [6, 6, 21])]


def test_a_child_has_a_copy_of_received_arrays():
    """Received arrays are in memory of the sender, which is returned to the sender and used again."""

    async def main(comm: Communicator) -> str:
        comm.rpc.register(lambda: np.full(100_000, 5.0), name="five")
        if comm.rank:
            x = await comm.rpc.call(0, "five")
            told = in_a_child(lambda: [x.min(), x.fill(9), x.max()])
            return f"{told} {x.max():g}"
        return ""

    assert run_ranks(2, main, "shm")[1] == "[np.float64(5.0), None, np.float64(9.0)] 5"


def test_a_child_has_its_own_copy_of_a_model_that_outlives_its_world():
    async def main(comm: Communicator) -> np.ndarray:
        x = comm.empty(5000, "float64")
        x[:] = 5
        await comm.barrier()
        return x

    x = run_ranks(2, main, "shm")[1]
    assert in_a_child(lambda: [x.fill(9), float(x.max())]) == "[None, 9.0]"
    assert x.max() == 5


def test_a_child_of_a_child_has_copies_too():
    async def main(comm: Communicator) -> str:
        x = comm.empty(5000, "float64")
        x[:] = 5

        def act() -> str:
            x[:] = 6
            return in_a_child(lambda: [float(x.min()), x.fill(7)]) + f" {x.max():g}"

        return in_a_child(act) + f" {x.max():g}"

    assert run_ranks(2, main, "shm") == ["[6.0, None] 6 5"] * 2


def test_a_child_cannot_read_tensors_without_memory_for_copies(monkeypatch, caplog):
    """A fork that copied more than the free memory would make the kernel kill some process."""

    def refuse(nbytes: int) -> None:
        raise UsageError(f"no room for {nbytes}")

    async def main(comm: Communicator) -> tuple[str, str, float]:
        x = comm.empty(5000, "float64")
        x[:] = 5
        await comm.barrier()
        monkeypatch.setattr(segment, "check_room", refuse)
        told = in_a_child(lambda: "it lives"), in_a_child(lambda: x.max())
        monkeypatch.undo()
        await comm.barrier()
        return *told, float(x.max())

    assert run_ranks(2, main, "shm")[1] == ("it lives", f"exit code {-signal.SIGSEGV}", 5.0)
