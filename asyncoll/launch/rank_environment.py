"""The environment of a rank: torchrun's variables, so that one script runs under both launchers."""

from __future__ import annotations

import math
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncoll.errors import UsageError
from asyncoll.launch.placement import Placement
from asyncoll.launch.supervisor import STOPPED_GRACE_S
from asyncoll.transport.keys import write_key
from asyncoll.transport.settings import seconds

FOLDER_BYTES_MAX = 60  # the whole path of a unix socket has at most 107 bytes
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def check_current_folder() -> None:
    """Raise UsageError if the current folder has been deleted.

    There, torch ends the process that imports it, and `multiprocessing` starts none.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder has been deleted: go to one that exists (cd), and start again") from error


def check_encoding(environ: Mapping[str, str]) -> None:
    """Raise UsageError if ranks with this environment write text whose lines cannot be told by their last byte."""
    setting = environ.get("PYTHONIOENCODING", "")
    with suppress(LookupError):  # Python itself refuses an unknown one
        if "\n".encode(setting.partition(":")[0] or "utf-8") != b"\n":
            raise UsageError(
                f"PYTHONIOENCODING={setting}: lines of ranks in this encoding cannot be told apart: set utf-8, or "
                "another one that contains ASCII"
            )


def rank_environment(
    rank: int, placement: Placement, address: str, port: int, transport: str | None = None
) -> dict[str, str]:
    """The variables of one rank. Rank 0 serves at `address` and `port`.

    `transport` None leaves the choice to ASYNCOLL_TRANSPORT.
    """
    host = placement.host_of(rank)
    ranks = placement.ranks_of(host)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(ranks.index(rank)),
        "WORLD_SIZE": str(placement.size),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": str(list(placement.hosts).index(host)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **({} if transport is None else {"ASYNCOLL_TRANSPORT": transport}),
    }


def threads(size: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The thread settings of a rank: one thread each, unless the rank is alone or `environ` has other settings."""
    if size == 1:
        return {}
    wanted = environ.get(THREADS[0], "1")
    return {name: environ.get(name, wanted) for name in THREADS}


def stopped_grace_s(environ: Mapping[str, str]) -> float:
    """How long the launcher waits for a stopped rank when every other rank has ended.

    Infinite for ASYNCOLL_STOPPED_S=0. Raises UsageError if ASYNCOLL_STOPPED_S is no number of seconds.
    """
    return seconds(environ, "ASYNCOLL_STOPPED_S", STOPPED_GRACE_S) or math.inf


def socket_folder() -> Path:
    """The folder in which job folders are made: private to the user if possible, and always a short path."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    for name in filter(None, candidates):
        if len(os.fsencode(name)) <= FOLDER_BYTES_MAX and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    raise UsageError("no writable folder with a short path for the job's sockets: set TMPDIR")


@contextmanager
def job_folder(key: bytes | None = None) -> Iterator[Path]:
    """A new folder, open to this user only, with the job's key in the file `job`. It is removed at the end.

    The key is `key`; None: a new one.
    """
    with tempfile.TemporaryDirectory(prefix="asyncoll-", dir=socket_folder(), ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # In a file, not on an inherited descriptor: all children of the ranks would inherit that, too.
        write_key(folder / "job", key)
        yield folder


def reserve_port(address: str = "127.0.0.1") -> socket.socket:
    """A bound socket that does not listen: no other program is given its port, but rank 0 may bind it.

    The port is held at all addresses, because a program at another address could be given it otherwise, and a store of
    torch listens at all. Raises UsageError if `address` is none of this host.
    """
    family, everywhere = (socket.AF_INET6, "::") if ":" in address else (socket.AF_INET, "0.0.0.0")
    holder = socket.socket(family)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
        holder.bind((everywhere, 0))
    except OSError as error:
        holder.close()
        raise UsageError(f"cannot listen at {address}: {error.strerror}") from error
    return holder
