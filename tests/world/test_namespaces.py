"""Ranks in namespaces of their own, as the containers of a pod are, with one folder for temporary files."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S

NO_IPV4 = 'ip link set lo up; ip addr del 127.0.0.1/8 dev lo; exec "$@"'
NOTEBOOK = """
import os
from asyncoll import notebook

async def main(comm):
    return os.environ["MASTER_ADDR"]

print(notebook.run(main, ranks=2))
"""
# Options of unshare by namespace, and whether ranks of which each has its own can share memory. A network of its own is
# that of another host: tests/world/test_networks.py.
KINDS = {
    "pid": (["--pid", "--fork", "--mount-proc"], False),
    "pid, and the /proc of another one": (["--pid", "--fork"], False),
    "user": (["--user", "--map-root-user"], False),
    "time": (["--time", "--fork"], False),
    "mount": (["--mount"], True),
    "ipc": (["--ipc"], True),
    "uts": (["--uts"], True),
    "cgroup": (["--cgroup"], True),
}
PAIRS = list(itertools.combinations(KINDS, 2))


def unshare(kinds: tuple[str, ...]) -> list[str]:
    options = dict.fromkeys(option for kind in kinds for option in KINDS[kind][0])
    return ["unshare", *options] if kinds else []


def check_world(ranks: list[tuple[list[str], Path, bool]]) -> None:
    """Start a rank by each command with this folder for temporary files. The third field: whether it shares memory.

    Ranks that this user may not start so are left out.
    """
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    ranks = [
        each
        for each in ranks
        if not subprocess.run([*each[0], "true"], capture_output=True, timeout=PATIENCE_S).returncode
    ]
    if not any(command for command, _, _ in ranks):
        pytest.skip("this user may not make namespaces")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [*command, sys.executable, SCRIPTS / "world/counts_ranks_that_share_memory.py"],
            env=os.environ | world | {"RANK": str(rank), "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (command, folder, _) in enumerate(ranks)
    ]
    sharing = sum(is_shared for _, _, is_shared in ranks)
    try:
        for rank, (command, _, is_shared) in zip(started, ranks, strict=True):
            out, err = rank.communicate(timeout=PATIENCE_S)
            assert (command, rank.returncode, out) == (command, 0, f"{sharing if is_shared else 1}\n"), err
    finally:
        for rank in started:
            rank.kill()
            rank.wait()


@pytest.mark.slow
def test_ranks_in_namespaces_of_their_own_make_one_world(tmp_path):
    """They share memory only where locks, process numbers and clocks mean the same to all of them.

    The world has two ranks in the namespaces of this process, one for each kind, and one for each pair that is drawn.
    """
    pairs = random.Random(os.environ.get("ASYNCOLL_TEST_SEED", "namespaces")).sample(PAIRS, 6)
    of_ranks = [(), (), *((kind,) for kind in KINDS), *pairs]
    check_world([(unshare(kinds), tmp_path, all(KINDS[kind][1] for kind in kinds)) for kinds in of_ranks])


CONTAINER = ("mount", "ipc", "uts", "cgroup")  # what each container of a pod has of its own, beside processes
NO_SHM = ["sh", "-ec", 'mount -t tmpfs none /dev/shm; exec "$@"', "sh"]
HIDDEN = ["sh", "-ec", 'mount -t proc -o hidepid=2 proc /proc; exec "$@"', "sh"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "one_folder", "shared"),
    [(("pid", *CONTAINER), False, False), (CONTAINER, False, False), (CONTAINER, True, True)],
    ids=["as they are", "shareProcessNamespace", "shareProcessNamespace and one folder"],
)
def test_ranks_in_containers_of_a_pod_make_one_world(kinds, one_folder, shared):
    """They share the network, and no /dev/shm. docs/howto/kubernetes.md says what else lets them share memory."""
    with tempfile.TemporaryDirectory() as temporary:  # its path is shorter than that of `tmp_path`: sockets are in it
        folders = [Path(temporary, "all" if one_folder else str(rank)) for rank in range(3)]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        check_world([([*unshare(kinds), *NO_SHM], folder, shared) for folder in folders])


@pytest.mark.slow
def test_ranks_that_see_the_processes_of_their_own_user_alone_share_memory(tmp_path):
    check_world([([*unshare(("mount",)), *HIDDEN], tmp_path, True)] * 3)


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (
            ["-m", "asyncoll.cli", "launch", "-n", "2", SCRIPTS / "world/joins_three_worlds.py"],
            {"0: three worlds", "1: three worlds"},
        ),
        (["-c", NOTEBOOK], {"['::1', '::1']"}),
    ],
    ids=["launcher", "notebook"],
)
def test_ranks_are_started_on_a_host_without_ipv4(program, printed):
    apart = ["unshare", "--net", "sh", "-ec", NO_IPV4, "sh"]
    try:
        subprocess.run([*apart, "true"], capture_output=True, check=True, timeout=PATIENCE_S)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this user may not make networks: {getattr(error, 'stderr', '') or error}")
    done = subprocess.run(
        [*apart, sys.executable, *program],
        env=os.environ | LIGHT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, set(done.stdout.splitlines())) == (0, printed), done.stderr
