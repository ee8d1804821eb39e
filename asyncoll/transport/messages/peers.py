"""Reports of peers that fall silent or do not authenticate, for all kinds of sockets."""

from __future__ import annotations

import logging
from typing import Final

FREEZE_S: Final = 0.5  # a process without a sign of life for this time counts as frozen
logger = logging.getLogger("asyncoll")


def silence_cause(freeze_s: float) -> str:
    """The cause of the loss of a peer without a heartbeat."""
    return f"it has shown no sign of life for {freeze_s:g} s: its process is stopped, or the network is cut"


class UnauthenticatedPeers:
    """Logs the first unauthenticated peer, and then the 2nd, 4th, 8th…, so that such peers cannot fill the log."""

    def __init__(self, owner: str) -> None:
        """`owner` names the rank or the service whose sockets the peers have connected to."""
        self._owner = owner
        self._count = 0

    def log(self, action: str) -> None:
        """Count one peer, and perhaps log `action`, which says how the owner has treated it."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            logger.warning("%s %s (unauthenticated peer number %d)", self._owner, action, self._count)
