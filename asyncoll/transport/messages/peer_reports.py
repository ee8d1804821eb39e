"""Reports of peers that fall silent or do not authenticate, for all kinds of sockets."""

from __future__ import annotations

import logging
from typing import ClassVar, Final

FREEZE_S: Final = 0.5  # a process without a sign of life for this time counts as frozen
logger = logging.getLogger("asyncoll")


def silence_cause(freeze_s: float) -> str:
    """The cause of the loss of a peer without a heartbeat."""
    return (
        f"it has shown no sign of life for {freeze_s:g} s: its process is stopped, the network is cut, or its host is "
        "overloaded"
    )


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


class DroppedClients(_Events):
    """Logs clients of a service that it has dropped."""

    _kind = "dropped client"


class FailedAccepts(_Events):
    """Logs that connections, of any peer, cannot be accepted for the moment."""

    _kind = "failure"
