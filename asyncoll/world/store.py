"""The store of a world at MASTER_ADDR:MASTER_PORT, a TCPStore of torch: who serves it, and how the others reach it.

Under torchrun the agent serves it, otherwise rank 0. A process group of torch has such a store at the same place, and
its rank 0 keeps that one until its next process group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from asyncoll.errors import UsageError
from asyncoll.transport.joining import Joining, in_daemon_thread
from asyncoll.world.environment import Environment, place_of
from asyncoll.world.network import listen

_PROBE_S = 1.0  # time for the host of the store to accept a connection
# A web server answers. A store closes the connection, as it does after any message that is not its own.
_QUESTION = b"GET / HTTP/1.0\r\n\r\n"
_SHOWN_BYTES = 40  # of an answer
_REASON_CHARACTERS = 200  # of the system's error in a message of this rank
_DOUBT_S = 5.0  # a store that listens answers in milliseconds, and on most overloaded hosts in seconds
_SILENCE_S = 115.0  # time for an answer to the question: silence alone is weak evidence against a store
# The time until rank 0 knows its own name. Services of names may keep for 30 s that there is none.
_NAME_S = 60.0


def open_store(environment: Environment, joining: Joining) -> Any:
    """The store of this world: it is served here, or reached as soon as it is served."""
    import torch.distributed  # noqa: F401 (takes seconds, in which a store that listens would not answer)

    serves_here = environment.rank == 0 and not is_of_agent() and not _serves_already(environment)
    return _serve_store(environment, joining) if serves_here else _reach_store(environment, joining)


def is_of_agent() -> bool:
    """Whether torchrun's agent serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _serves_already(environment: Environment) -> bool:
    """Whether this process serves a store at MASTER_ADDR: that of its process group of torch, as in Ray Train."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    c10d = distributed.distributed_c10d
    store = c10d._get_default_store() if distributed.is_initialized() else _kept(c10d)
    return place_of(store) == (environment.master_addr, environment.master_port)


class _KeptStore(str):
    """Stands for the place of the default process group that has ended, and holds its store."""

    store: Any = None


def keep(c10d: Any, store: Any) -> None:
    """Keep `store`, which torch has opened in this process for its default group, until it has made the next one.

    A faster rank may have come to that store for the next group. As long as it is there, torch opens the next one with
    the same server (`multi_tenant`). `c10d` is torch.distributed.distributed_c10d: it notes the place of each default
    group, of any backend, and reads it nowhere. So what is noted there ends with the next group.
    """
    c10d._default_pg_init_method = kept = _KeptStore(c10d._default_pg_init_method)
    kept.store = store


def _kept(c10d: Any) -> Any:
    place = c10d._default_pg_init_method
    return place.store if isinstance(place, _KeptStore) else None


def _reach_store(environment: Environment, joining: Joining) -> Any:
    """A client of the store, as soon as the store is served. TCPStore itself would wait without logging anything."""
    name, port = environment.master_addr, environment.master_port
    what = f"which serves the store at {name}:{port}"
    while True:
        try:
            address = _answering(name, port, joining.pause_s + _PROBE_S)
            joining.listen(_Doubt(address, port).look)
            return _tcp_store(environment, address, joining, what)
        # The store is not served yet, or no more.
        except (OSError, RuntimeError) as error:
            said = f"{what}: {error}"[:_REASON_CHARACTERS]
            joining.check(
                lambda: [0],
                f"{said}; MASTER_ADDR must be an address of rank 0's host that this host reaches (as a number, if the "
                "name has several), and MASTER_PORT open there",
            )
            time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)
        finally:
            joining.listen(None)


class _Doubt:
    """Whether what accepts connections where the store should be is a store. torch itself would go on trying."""

    def __init__(self, address: str, port: int) -> None:
        self._address, self._port = address, port
        self._asks_at_s = time.monotonic() + _DOUBT_S  # noqa: TID251 (no loop runs yet)
        self._answer: Future[str] | None = None

    def look(self) -> None:
        """Raise UsageError if it is none. This asks once torch has tried for a while, in a thread: it never blocks."""
        if self._answer is None:
            if time.monotonic() >= self._asks_at_s:  # noqa: TID251 (no loop runs yet)
                self._answer = in_daemon_thread(lambda: _stranger_at(self._address, self._port))
        elif self._answer.done() and (does := self._answer.result()):
            raise UsageError(
                f"what listens at {self._address}, MASTER_PORT={self._port}, is no store of asyncoll or torch: it "
                f"{does}. Choose another port, a free one of rank 0's host; if rank 0 listens there, it is stopped"
            )


def _stranger_at(address: str, port: int) -> str:
    """What a program that listens there does, if that shows that it is no store; empty otherwise."""
    with contextlib.suppress(ConnectionError), socket.create_connection((address, port), _SILENCE_S) as asking:
        asking.sendall(_QUESTION)
        try:
            said = asking.recv(_SHOWN_BYTES)
        except TimeoutError:
            return f"accepts connections, and has said nothing for {_DOUBT_S + _SILENCE_S:.0f} s"
        if said:
            return f"answers {said!r}"
    return ""


def _answering(name: str, port: int, limit_s: float) -> str:
    """The first address of `name` that accepts a connection. Raises OSError, which has the answer of each address."""
    answers: dict[str, str] = {}
    for *_, where in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        address = str(where[0])
        try:
            socket.create_connection((address, port), limit_s).close()
        except OSError as error:
            answers[address] = error.strerror or "no answer"
        else:
            return address
    raise OSError(", ".join(f"{answer} ({address})" for address, answer in answers.items()))


def _serve_store(environment: Environment, joining: Joining) -> Any:
    """The store, served at one address alone. By itself, TCPStore listens on all addresses of the host."""
    if not environment.interface:
        _await_name(environment.master_addr, joining)
    listener = listen(environment.master_addr, environment.master_port, environment.address, environment.interface)
    address, port = listener.getsockname()[:2]
    what = f"which does not reach its own store at {address}:{port}: its host is overloaded, or has a firewall there"
    try:
        return _tcp_store(environment, address, joining, what, is_master=True, master_listen_fd=listener.detach())
    except RuntimeError as error:
        raise UsageError(f"this is rank 0, {what}: {error}"[: len(what) + _REASON_CHARACTERS]) from None


def _tcp_store(environment: Environment, address: str, joining: Joining, what: str, **more: Any) -> Any:
    """A TCPStore; if rank 0 does not answer meanwhile, `what` says of it what it does."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port, size, limit = environment.master_port, environment.size, timedelta(seconds=joining.remaining_s)
    return joining.call(
        lambda: TCPStore(address, port, size, timeout=limit, wait_for_workers=False, **more), lambda: [0], what
    )


def _await_name(name: str, joining: Joining) -> None:
    """Wait until `name` is known: that of a pod of Kubernetes is so seconds after its start.

    Raises UsageError if it is not known after a minute.
    """
    ends_s = joining.remaining_s - _NAME_S
    while True:
        try:
            socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            said = f"MASTER_ADDR={name} is not the name of a host: {error}"[:_REASON_CHARACTERS]
            if joining.remaining_s < ends_s:
                raise UsageError(f"{said}; for rank 0 it must be a name or an address of this host") from None
            joining.check(lambda: [0], said)
            time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)
        else:
            return
