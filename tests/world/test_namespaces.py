"""Ranks in namespaces of their own, as the containers of a pod are, with one folder for temporary files."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
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
IN_NAMESPACES = SCRIPTS / "world/in_namespaces.py"
COUNTS = SCRIPTS / "world/counts_ranks_that_share_memory.py"
# Whether ranks of which each has its own namespace of a kind can share memory. A network of its own is that of another
# host: tests/world/test_networks.py.
KINDS = {
    "pid,proc": False,
    "pid": False,  # and the /proc of another namespace
    "user": False,
    "time": False,
    "mount": True,
    "ipc": True,
    "uts": True,
    "cgroup": True,
}
PAIRS = list(itertools.combinations(KINDS, 2))


@functools.cache
def is_allowed(kinds: str, prepare: str) -> bool:
    """Whether this user may start processes in namespaces of their own."""
    command = [sys.executable, "-IS", IN_NAMESPACES, json.dumps([[kinds, ""]]), prepare, os.devnull]
    return not subprocess.run(
        command, env=os.environ | {"RANK": "0"}, capture_output=True, timeout=PATIENCE_S
    ).returncode


@pytest.fixture
def check_world(forked_world):
    """Plays a world of ranks in namespaces of these kinds, each with a folder for temporary files.

    `share` says which of them share memory. `prepare` is a shell command that each runs before. Ranks that this user
    may not start so are left out.
    """

    def check(kinds: list[str], folders: list[Path], share: list[bool], prepare: str = ":") -> None:
        ranks = [each for each in zip(kinds, folders, share, strict=True) if is_allowed(each[0], prepare)]
        if not any(kinds for kinds, _, _ in ranks):
            pytest.skip("this user may not make namespaces")
        places = json.dumps([[kinds, str(folder)] for kinds, folder, _ in ranks])
        world = forked_world(dict(os.environ), len(ranks), IN_NAMESPACES, places, prepare, COUNTS)
        sharing = sum(is_shared for _, _, is_shared in ranks)
        for rank, (kinds, _, is_shared) in zip(world, ranks, strict=True):
            code, out, err = rank.end()
            assert (kinds, code, out) == (kinds, 0, f"{sharing if is_shared else 1}\n"), err

    return check


@pytest.mark.slow
def test_ranks_in_namespaces_of_their_own_make_one_world(check_world, tmp_path):
    """They share memory only where locks, process numbers and clocks mean the same to all of them.

    The world has two ranks in the namespaces of this process, one for each kind, and one for each pair that is drawn.
    """
    pairs = random.Random(os.environ.get("ASYNCOLL_TEST_SEED", "namespaces")).sample(PAIRS, 6)
    of_ranks = [(), (), *((kind,) for kind in KINDS), *pairs]
    share = [all(KINDS[kind] for kind in kinds) for kinds in of_ranks]
    check_world([",".join(kinds) for kinds in of_ranks], [tmp_path] * len(of_ranks), share)


CONTAINER = "mount,ipc,uts,cgroup"  # what each container of a pod has of its own, beside processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "one_folder", "shared"),
    [(f"pid,proc,{CONTAINER}", False, False), (CONTAINER, False, False), (CONTAINER, True, True)],
    ids=["as they are", "shareProcessNamespace", "shareProcessNamespace and one folder"],
)
def test_ranks_in_containers_of_a_pod_make_one_world(check_world, kinds, one_folder, shared):
    """They share the network, and no /dev/shm. docs/howto/kubernetes.md says what else lets them share memory."""
    with tempfile.TemporaryDirectory() as temporary:  # its path is shorter than that of `tmp_path`: sockets are in it
        folders = [Path(temporary, "all" if one_folder else str(rank)) for rank in range(3)]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        check_world([kinds] * 3, folders, [shared] * 3, "mount -t tmpfs none /dev/shm")


@pytest.mark.slow
def test_ranks_that_see_the_processes_of_their_own_user_alone_share_memory(check_world, tmp_path):
    check_world(["mount"] * 3, [tmp_path] * 3, [True] * 3, "mount -t proc -o hidepid=2 proc /proc")


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (
            ["-m", "asyncoll", "launch", "-n", "2", SCRIPTS / "world/joins_three_worlds.py"],
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
