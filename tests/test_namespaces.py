"""Ranks in namespaces of their own, as the containers of a pod are, with one folder for temporary files."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE_S

SCRIPT = Path(__file__).parent / "scripts" / "apart.py"
# Options of unshare by namespace, and whether ranks of which each has its own can share memory. A network of its own is
# that of another host: tests/test_networks.py.
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


def is_permitted(kinds: tuple[str, ...]) -> bool:
    return not subprocess.run([*unshare(kinds), "true"], capture_output=True, check=False).returncode


@pytest.mark.slow
def test_ranks_in_namespaces_of_their_own_make_one_world(tmp_path):
    """They share memory only where locks, process numbers and clocks mean the same to all of them.

    The world has two ranks in the namespaces of this process, one for each kind, and one for each pair that is drawn.
    """
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    pairs = random.Random(os.environ.get("ASYNCOLL_TEST_SEED", "namespaces")).sample(PAIRS, 6)
    of_ranks = [(), (), *filter(is_permitted, [(kind,) for kind in KINDS] + pairs)]
    if len(of_ranks) == 2:
        pytest.skip("this user may not make namespaces")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(len(of_ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TMPDIR": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [*unshare(kinds), sys.executable, SCRIPT],
            env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, kinds in enumerate(of_ranks)
    ]
    shares = [all(KINDS[kind][1] for kind in kinds) for kinds in of_ranks]
    try:
        for rank, kinds, is_shared in zip(ranks, of_ranks, shares, strict=True):
            out, err = rank.communicate(timeout=PATIENCE_S)
            assert (kinds, rank.returncode, out) == (kinds, 0, f"{sum(shares) if is_shared else 1}\n"), err
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
