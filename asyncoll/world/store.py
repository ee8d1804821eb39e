"""The store of a world at MASTER_ADDR:MASTER_PORT, a TCPStore of torch: who serves it, and how the others reach it.

Under torchrun the agent serves it, otherwise rank 0.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from asyncoll.errors import UsageError
from asyncoll.transport.joining import Joining
from asyncoll.world.environment import Environment, place_of
from asyncoll.world.network import listen

_PROBE_S = 1.0  # time for the host of the store to accept a connection
_REASON_CHARACTERS = 200  # of the system's error in a message of this rank
_NAME_S = 60.0  # until rank 0 knows its own name; services of names may keep for 30 s that there is none


def open_store(environment: Environment, joining: Joining) -> Any:
    """The store of this world: it is served here, or reached as soon as it is served."""
    serves_here = environment.rank == 0 and not is_of_agent() and not _serves_already(environment)
    return _serve_store(environment, joining) if serves_here else _reach_store(environment, joining)


def is_of_agent() -> bool:
    """Whether torchrun's agent serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _serves_already(environment: Environment) -> bool:
    """Whether this process serves a store at MASTER_ADDR: that of its process group of torch, as in Ray Train."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return False
    place = place_of(distributed.distributed_c10d._get_default_store())
    return place == (environment.master_addr, environment.master_port)


def _reach_store(environment: Environment, joining: Joining) -> Any:
    """A client of the store, as soon as the store is served. TCPStore itself would wait without logging anything."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port, size = environment.master_addr, environment.master_port, environment.size
    what = f"which serves the store at {address}:{port}"
    while True:
        timeout = timedelta(seconds=joining.remaining_s)
        try:
            with socket.create_connection((address, port), timeout=joining.pause_s + _PROBE_S) as probe:
                answers = probe.getpeername()[0]  # of several that the name means
            return joining.call(
                lambda timeout=timeout, answers=answers: TCPStore(
                    answers, port, size, False, timeout, wait_for_workers=False
                ),  # type: ignore[misc]
                lambda: [0],
                what,
            )
        except (OSError, RuntimeError) as error:  # it is not served yet, or no more
            said = f"{what}: {error}"[:_REASON_CHARACTERS]
            joining.check(
                lambda: [0],
                f"{said}; MASTER_ADDR must be an address of rank 0's host that this host reaches, and MASTER_PORT "
                "open there",
            )
            time.sleep(joining.pause_s)  # noqa: TID251 (no loop runs yet)


def _serve_store(environment: Environment, joining: Joining) -> Any:
    """The store, served at one address alone. By itself, TCPStore listens on all addresses of the host."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if not environment.interface:
        _await_name(environment.master_addr, joining)
    listener = listen(environment.master_addr, environment.master_port, environment.address, environment.interface)
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address, port, environment.size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
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
