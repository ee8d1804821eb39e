"""The environment variables that describe the world which this process is to join.

They are torchrun's, and some more. Without RANK and WORLD_SIZE, those of other launchers are read (`launchers`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncoll.errors import UsageError
from asyncoll.transport.keys import find_key
from asyncoll.transport.messages.peer_reports import FREEZE_S
from asyncoll.transport.settings import PORT_MAX, TRANSPORTS, check_names, choice, host_and_port, seconds
from asyncoll.world.launchers import RUN, check_agrees, check_is_no_worker, read_launcher

ENCRYPT = ("control", "all")  # between hosts: all but long payloads (CURVE moves a fourth of them a second); or all
_DEADLINE_S = 1800.0
_FREEZE_MIN_S, _FREEZE_MAX_S = 0.02, 86_400  # ZeroMQ counts heartbeats in whole ms, in 32 bits


@dataclass(frozen=True, slots=True)
class Environment:
    """The world that the environment describes, for this process."""

    rank: int
    size: int
    folder: str  # of the job's sockets; empty unless `asyncoll launch -n` made one
    master_addr: str  # empty: the store has no address
    master_port: int
    shares_memory: bool  # with the ranks of its host, if possible
    run: str  # the name of the job, which all ranks share; the agents of torchrun count restarts differently
    freeze_s: float = FREEZE_S  # a rank that does not answer for so long counts as frozen; 0: never
    deadline_s: float = _DEADLINE_S  # the longest time that a call may take; infinity: no limit
    key_file: str = ""  # has the job's key; empty: there is none
    encrypt: str = ENCRYPT[0]
    address: str = ""  # that ranks of other hosts connect to; empty: that of the interface
    interface: str = ""  # at which this rank listens for them; empty: at `address`, or towards the master
    ports: Sequence[int] = (0,)  # on which it may listen; 0: the kernel chooses
    launch_folder: str = ""  # of the job, on this host; empty unless `asyncoll launch -n` has started it
    launcher: str = (
        ""  # the socket of its agent on this host; empty unless `asyncoll launch --hosts` has started the job
    )
    epoch_store: tuple[str, int] | None = None  # the host and the port of an `asyncoll store`
    is_newcomer: bool = False  # this process joins a world that has begun; it has no rank yet
    store: Any = None  # a torch.distributed store of all ranks; None: rank 0, or torchrun's agent, serves one

    @classmethod
    def of_store(cls, store: Any, rank: int, size: int, environ: Mapping[str, str] = os.environ) -> Environment:
        """The world of the `size` ranks that share `store`; everything else as `environ` has it.

        A call has no time limit but its own, unless ASYNCOLL_DEADLINE_S is set.
        """
        address, port = place_of(store)
        place = address or environ.get("MASTER_ADDR", ""), port  # of a file there is none
        given = {"RANK": str(rank), "WORLD_SIZE": str(size), "ASYNCOLL_FOLDER": "", "ASYNCOLL_JOIN": "", RUN: ""}
        limit = {"ASYNCOLL_DEADLINE_S": environ.get("ASYNCOLL_DEADLINE_S") or "0"}
        environment = cls.read({**environ, **given, **limit}, place)
        assert environment is not None
        return replace(environment, store=store, launch_folder=environ.get("ASYNCOLL_FOLDER", ""))

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ, place: tuple[str, int] | None = None) -> Environment | None:
        """Read `environ`. None if it describes no world. An empty variable counts as not set.

        `place` replaces MASTER_ADDR and MASTER_PORT: that of a given store; empty, and 0, as far as it has none.

        Raises UsageError if it describes a part of a world, or an impossible one, and for a wrong setting in any case.
        """
        settings = read_settings(environ)
        if environ.get("ASYNCOLL_JOIN"):
            return cls._of_newcomer(environ, settings)
        if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
            launched = read_launcher(environ)
            if launched is not None:
                check_agrees(environ, launched)
                environ = {**environ, **launched}
            elif not environ.get("RANK") and not environ.get("WORLD_SIZE"):
                check_is_no_worker()
                return None
        rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise UsageError(f"RANK={rank} is not between 0 and WORLD_SIZE-1={size - 1}")
        folder = environ.get("ASYNCOLL_FOLDER", "")
        if place is None:
            place = environ.get("MASTER_ADDR", ""), 0
            if size > 1 and not folder:  # the ranks meet in a store
                place = _text(environ, "MASTER_ADDR"), _port(environ)
        return cls(
            rank,
            size,
            folder,
            master_addr=place[0].strip("[]"),
            master_port=place[1],
            run=environ.get(RUN, ""),
            launch_folder=folder,
            launcher=environ.get("ASYNCOLL_LAUNCHER", ""),
            key_file="" if folder else find_key(environ),
            address=environ.get("ASYNCOLL_ADDRESS", "").strip("[]"),
            interface=environ.get("ASYNCOLL_INTERFACE", ""),
            **settings,
        )

    @classmethod
    def _of_newcomer(cls, environ: Mapping[str, str], settings: Mapping[str, Any]) -> Environment:
        folder = environ.get("ASYNCOLL_FOLDER", "")
        if environ["ASYNCOLL_JOIN"] != "1" or not folder:
            raise UsageError(
                "a process that joins a running job has ASYNCOLL_JOIN=1, and ASYNCOLL_FOLDER as the ranks of the job "
                "have it, which `asyncoll launch -n` has started"
            )
        return cls(-1, 0, folder, "", 0, run="", launch_folder=folder, is_newcomer=True, **settings)


def read_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """What `environ` sets for any world, by the names of `Environment`. Raises UsageError for a wrong setting."""
    check_names(environ)
    return {
        "shares_memory": choice(environ, "ASYNCOLL_TRANSPORT", TRANSPORTS) == "shm",
        "freeze_s": freeze_s(environ),
        "deadline_s": deadline_s(environ),
        "encrypt": choice(environ, "ASYNCOLL_ENCRYPT", ENCRYPT),
        "ports": _ports(environ),
        "epoch_store": host_and_port(text, "ASYNCOLL_STORE=") if (text := environ.get("ASYNCOLL_STORE", "")) else None,
    }


def place_of(store: Any) -> tuple[str, int]:
    """The address and the port at which `store` is served, as far as it has them."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", ""), getattr(store, "port", 0)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UsageError(f"the environment describes a world but {name} is not set: start with `asyncoll launch`")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} in the environment is not a number") from None


def _port(environ: Mapping[str, str]) -> int:
    port = _integer(environ, "MASTER_PORT")
    if not 1 <= port <= PORT_MAX:
        raise UsageError(f"MASTER_PORT={port} in the environment: give 1 to {PORT_MAX}, a free port of rank 0's host")
    return port


def _ports(environ: Mapping[str, str]) -> Sequence[int]:
    """The ports of ASYNCOLL_PORTS, as in "30000-30015"; 0, which lets the kernel choose, without it."""
    text = environ.get("ASYNCOLL_PORTS", "")
    if not text:
        return (0,)
    first, _, last = text.partition("-")
    if first.strip().isdecimal() and last.strip().isdecimal() and 1 <= int(first) <= int(last) <= PORT_MAX:
        return range(int(first), int(last) + 1)
    raise UsageError(f"ASYNCOLL_PORTS={text!r} in the environment: give the first and the last port, as in 30000-30015")


def deadline_s(environ: Mapping[str, str]) -> float:
    """The longest time in seconds that a call may take; infinity without a limit."""
    return seconds(environ, "ASYNCOLL_DEADLINE_S", _DEADLINE_S) or math.inf


def freeze_s(environ: Mapping[str, str]) -> float:
    """Seconds without an answer after which a process counts as frozen; 0 for never."""
    limit = seconds(environ, "ASYNCOLL_FREEZE_S", FREEZE_S)
    if limit and not _FREEZE_MIN_S <= limit <= _FREEZE_MAX_S:
        allowed = f"{_FREEZE_MIN_S} to {_FREEZE_MAX_S} seconds, or 0 for never"
        raise UsageError(f"ASYNCOLL_FREEZE_S={limit:g}: give {allowed}")
    return limit
