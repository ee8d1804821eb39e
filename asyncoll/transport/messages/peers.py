"""Reports of peers that fall silent, do not answer or do not authenticate, for all kinds of sockets."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import ClassVar, Final

FREEZE_S: Final = 0.5  # a process without a sign of life for this time counts as frozen
_SHOWN = 4  # addresses in an error
logger = logging.getLogger("asyncoll")


def silence_cause(freeze_s: float) -> str:
    """The cause of the loss of a peer without a heartbeat."""
    return f"it has shown no sign of life for {freeze_s:g} s: its process is stopped, or the network is cut"


class _Events:
    """Logs the first event of its kind, and then the 2nd, 4th, 8th…, so that peers cannot fill the log."""

    _kind: ClassVar[str]

    def __init__(self, owner: str) -> None:
        """`owner` names the rank or the service whose sockets the peers connect to."""
        self._owner = owner
        self._count = 0

    def log(self, action: str) -> None:
        """Count one event, and perhaps log `action`, which says what the owner has done."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            logger.warning("%s %s (%s number %d)", self._owner, action, self._kind, self._count)


class UnauthenticatedPeers(_Events):
    """Logs peers that are rejected."""

    _kind = "unauthenticated peer"


class FailedAccepts(_Events):
    """Logs that connections, of any peer, cannot be accepted for the moment."""

    _kind = "failure"


def why_unconnected(addresses: Sequence[str], ranks: Sequence[int]) -> str:
    """Why this rank waits for connections: `ranks`, of all whose `addresses` are given, have not answered it."""
    away = [f"{addresses[rank]} of rank {rank}" for rank in ranks if addresses[rank].startswith("tcp:")]
    if not away:
        return "not connected yet"
    return (
        f"not connected yet: this host ({socket.gethostname()}) gets no answer from {', '.join(away[:_SHOWN])}; set "
        "ASYNCOLL_INTERFACE to a network that connects the hosts; behind a firewall set ASYNCOLL_PORTS, and open these "
        "ports in both directions"
    )
