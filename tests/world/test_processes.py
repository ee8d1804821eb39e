"""Ranks as real processes: the same scripts alone, launched, under torchrun, and between simulated hosts."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncoll.launch.rank_environment import reserve_port
from asyncoll.transport.keys import write_key
from tests.support.places import ROOT, SCRIPTS
from tests.support.processes import DEBUG, LIGHT, PATIENCE_S, ForkedRank

pytestmark = pytest.mark.slow

OURS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_", "ASYNCOLL_")
KEPT = ("ASYNCOLL_FREEZE_S",)
TORCH = {"ASYNCOLL_PRELOAD": "numpy,torch,asyncoll"}  # for scripts that use it: loaded once, and not by each rank


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment that describes no world, with a folder for sockets. The folder must be empty afterwards."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS) or name in KEPT}
    yield plain | LIGHT | {"TMPDIR": str(temporary), "XDG_RUNTIME_DIR": ""}
    left = [path.name for path in temporary.iterdir() if path.name.startswith("asyncoll")]
    assert left == [], "folders of sockets are left"


def run(env: dict[str, str], *command: object) -> str:
    done = subprocess.run(
        [*map(str, command)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def launch(env: dict[str, str], size: int, script: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "error", "-m", "asyncoll", "launch", "-n", size, SCRIPTS / script]
    return run(env, *command, *arguments)


@pytest.fixture
def world(env, forked_world) -> Callable[..., list[ForkedRank]]:
    """Starts processes that find each other by environment variables only."""
    return lambda size, *command, **more: forked_world(env | more, size, *command)


def all_are_right(ranks: list[ForkedRank]) -> None:
    for rank in ranks:
        code, out, err = rank.end()
        assert (code, out.endswith("all right\n")) == (0, True), err


def test_every_collective_over_ipc(env):
    told = sorted(launch(env | DEBUG | TORCH, 3, "world/every_collective.py", "torch").splitlines())
    assert told == [f"{rank}: {rank} of 3 on 1: local {rank} of 3, all right" for rank in range(3)]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_name_of_numpy_is_the_plain_name(env, transport):
    told = launch(env | {"ASYNCOLL_TRANSPORT": transport}, 3, "world/round_names_of_two_types.py")
    assert sorted(told.splitlines()) == [f"{rank}: 3" for rank in range(3)]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_calls_from_other_threads_are_made_or_refused(env, transport):
    told = launch(env | DEBUG | {"ASYNCOLL_TRANSPORT": transport}, 2, "world/calls_from_other_threads.py")
    assert sorted(told.splitlines()) == [f"{rank}: all right" for rank in range(2)]


def test_every_collective_between_hosts(world):
    all_are_right(world(3, SCRIPTS / "world/on_own_hosts.py", SCRIPTS / "world/every_collective.py", **DEBUG))


@pytest.mark.parametrize("encrypt", ["control", "all"])
def test_every_collective_between_hosts_with_a_key(world, encrypt, tmp_path):
    write_key(tmp_path / "key")
    secure = {"ASYNCOLL_KEY_FILE": str(tmp_path / "key"), "ASYNCOLL_ENCRYPT": encrypt, "RANKS_PER_HOST": "2"}
    all_are_right(world(3, SCRIPTS / "world/on_own_hosts.py", SCRIPTS / "world/every_collective.py", **secure))


def test_a_rank_with_another_key_is_refused(world, tmp_path):
    for name in ("key", "other"):
        write_key(tmp_path / name)
    (tmp_path / "refused.py").write_text(WITH_ANOTHER_KEY)
    for rank in world(2, tmp_path / "refused.py", tmp_path):
        code, _, err = rank.end()
        assert (code, "is not sealed with the key of this job" in err) == (1, True), err


def test_every_collective_in_a_world_described_by_the_environment_only(env):
    """Here each rank is an interpreter of its own. Elsewhere the ranks without a launcher are forks."""
    with ExitStack() as stack:
        port = stack.enter_context(reserve_port()).getsockname()[1]
        place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = []
        for rank in range(3):
            command = [sys.executable, "-W", "error", str(SCRIPTS / "world/every_collective.py")]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = subprocess.Popen(command, env=env | place | {"RANK": str(rank)}, cwd=ROOT, **pipes)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in ranks:
            out, err = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, out.endswith("all right\n")) == (0, True), err


# No rank leaves the store before both have their result, because the store ends when rank 0 leaves it.
WITH_ANOTHER_KEY = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
os.environ["ASYNCOLL_KEY_FILE"] = str(folder / ("key" if rank == "0" else "other"))
import asyncoll
from asyncoll.world.sealed_store import SealedStore

def close_together(store, *failure):
    (folder / rank).touch()
    while not all((folder / other).exists() for other in "01"):
        time.sleep(0.01)
    close(store, *failure)

async def main(comm):
    pass

close, SealedStore.close = SealedStore.close, close_together
asyncoll.run(main)
"""


STORE_OF_RANK_0 = """
import socket
from asyncoll.transport.joining import Joining
from asyncoll.world.environment import Environment
from asyncoll.world.store import _serve_store
store = _serve_store(Environment.read(), Joining(0, 2))
for address in "127.0.0.1", "127.0.0.2":
    with socket.socket() as caller:
        print(caller.connect_ex((address, int(store.port))))
"""


def test_the_store_listens_on_the_master_address_only(env, forked, tmp_path):
    (tmp_path / "store.py").write_text(STORE_OF_RANK_0)
    with reserve_port() as holder:
        port = holder.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code, out, err = forked(env | place, tmp_path / "store.py")
    assert (code, out.split()) == (0, ["0", str(errno.ECONNREFUSED)]), err


def test_a_master_address_of_another_host_is_explained(env, forked, tmp_path):
    (tmp_path / "store.py").write_text(STORE_OF_RANK_0)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    code, _, err = forked(env | place, tmp_path / "store.py")
    assert (code, "rank 0 cannot listen on MASTER_ADDR=192.0.2.1" in err) == (1, True), err


def test_a_blocked_rank_takes_part_in_the_rounds_of_others(env, tmp_path):
    assert launch(env, 3, "world/blocks_its_loop_during_rounds.py", tmp_path) == "2: the others went on\n"


@pytest.mark.parametrize("elements", [3, 1_000_000])
def test_a_blocked_rank_answers_pairwise_averages(elements, env, tmp_path):
    assert launch(env, 2, "world/blocks_its_loop_during_an_average.py", tmp_path, elements) == "1: averaged meanwhile\n"


def test_one_script_gives_the_same_sums_everywhere(env, forked):
    script = SCRIPTS / "world/sums_of_shares.py"
    alone = run(env, sys.executable, script)
    assert alone == "sums 499500 499500\n"
    code, out, err = forked(env, SCRIPTS / "world/under_torchrun.py", 2, 0, script)
    assert (code, out) == (0, alone), err
    assert launch(env, 3, "world/sums_of_shares.py") == f"0: {alone}"


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("call", ["allreduce", "registered", "solo", "quorum", "between hosts"])
def test_survivors_of_a_killed_rank_name_it(world, call, victim):
    script = SCRIPTS / "world/waits_for_a_loss.py"
    ranks = world(3, *([SCRIPTS / "world/on_own_hosts.py", script] if call == "between hosts" else [script, call]))
    for number, rank in enumerate(ranks):
        assert rank.stdout.readline() == f"{number} is ready\n"
    os.kill(ranks[victim].pid, signal.SIGKILL)
    lost = f"PeerLostError: rank {victim} (host {socket.gethostname()}, pid {ranks[victim].pid}) is gone"
    for number, rank in enumerate(ranks):
        code, out, err = rank.end()
        if number == victim:
            assert code == -signal.SIGKILL
        else:
            assert (code, out) == (1, f"{number} lost {victim}\n")
            assert lost in err


def test_survivors_of_an_error_raise_it(world):
    for number, rank in enumerate(world(3, SCRIPTS / "world/raises_after_joining.py")):
        code, out, err = rank.end()
        assert code == 1
        assert out == ("" if number == 1 else f"{number} heard of 1: KeyError: 'lost it'\n")
        assert ("KeyError: 'lost it'" if number == 1 else "AbortedError: rank 1 aborted") in err


# -- memory that ranks share -----------------------------------------------------------------------


def test_the_runtime_continues_calls_while_their_rank_computes(env, tmp_path):
    assert launch(env, 3, "world/blocks_its_loop_during_calls.py", tmp_path) == "2: the runtime took over\n"


def test_a_stopped_process_delays_no_round_that_does_not_wait_for_it(env):
    assert launch(env | {"ASYNCOLL_FREEZE_S": "0"}, 3, "world/stopped_process.py") == "2: it caught up\n"


@pytest.mark.parametrize("how", [{"ASYNCOLL_TRANSPORT": "zmq"}, {"ASYNCOLL_TRANSPORT": "shm"}], ids=["zmq", "shm"])
def test_every_collective_in_memory_and_by_message(env, how):
    told = sorted(launch(env | how, 3, "world/every_collective.py").splitlines())
    assert told == [f"{rank}: {rank} of 3 on 1: local {rank} of 3, all right" for rank in range(3)]


def test_memory_is_shared_inside_hosts_only(world):
    told = [
        rank.end()
        for rank in world(
            4,
            SCRIPTS / "world/on_own_hosts.py",
            SCRIPTS / "world/memory_by_host.py",
            RANKS_PER_HOST="2",
        )
    ]
    assert [(code, out) for code, out, _ in told] == [
        (0, f"{rank} shares memory with {(0, 1) if rank < 2 else (2, 3)}\n") for rank in range(4)
    ], told


def test_ranks_that_cannot_map_memory_go_on_by_message(world):
    told = [
        rank.end() for rank in world(3, SCRIPTS / "world/with_little_memory.py", SCRIPTS / "world/every_collective.py")
    ]
    assert [(code, out.endswith("all right\n")) for code, out, _ in told] == [(0, True)] * 3, told
    assert "share no memory and go on by messages: rank 1 cannot map" in told[0][2]


def test_a_killed_launcher_takes_ranks_that_share_memory_with_it(env):
    command = [
        sys.executable,
        "-m",
        "asyncoll",
        "launch",
        "-n",
        "3",
        SCRIPTS / "world/waits_for_a_loss.py",
        "registered",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*map(str, command)], env=env, cwd=ROOT, **pipes) as launcher:
        for _ in range(3):
            assert launcher.stdout.readline().endswith("is ready\n")
        launcher.kill()
        launcher.communicate(timeout=PATIENCE_S)  # returns when no process holds the pipes


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_calls_between_ranks(world, transport):
    ends = [
        rank.end() for rank in world(3, SCRIPTS / "rpc/calls_between_ranks.py", ASYNCOLL_TRANSPORT=transport, **DEBUG)
    ]
    assert [end[:2] for end in ends] == [(0, f"called {rank}\n") for rank in range(3)], ends


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_call_to_a_rank_that_dies_fails(world, transport):
    """The ranks have no launcher, because it would stop the others soon after the first death."""
    ends = [
        rank.end()[:2]
        for rank in world(3, SCRIPTS / "rpc/calls_between_ranks.py", "death", ASYNCOLL_TRANSPORT=transport)
    ]
    assert ends == [(1, "told 0 of 1\n"), (-signal.SIGKILL, ""), (1, "told 2 of 1\n")]
