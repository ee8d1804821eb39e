"""The connections that the ROUTER of a rank accepts: processes of this user over ipc, ranks of the job over tcp.

With CURVE, a rank proves that it has its own key pair, which is derived from the job's key, and all traffic is
encrypted. With PLAIN, it sends the password of the link, which is derived from the job's key too. The password cannot
be guessed, but an eavesdropper can read it, like all other traffic.
"""

from __future__ import annotations

import hmac
import os
from typing import Final

import zmq

from asyncoll.transport import START_TIMEOUT_S
from asyncoll.transport.keys import Key
from asyncoll.transport.messages import authentication
from asyncoll.transport.messages.monitor import Monitor
from asyncoll.transport.messages.peer_reports import UnauthenticatedPeers

# The time from the connection of a peer of another host to the end of its handshake.
_HANDSHAKE_MS = 5000
# Of this host, where only processes of this user connect. Its end is no message: a rank that takes its connection for
# made, because it has this rank's half of the handshake, would see it break. On a busy host that took more than 5 s.
_LOCAL_HANDSHAKE_MS = round(1000 * START_TIMEOUT_S)
_BACKLOG = 128  # connections that wait to be accepted, besides two for each rank
_FAILURES: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it does not speak the protocol of this job's ranks",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it has not authenticated in time",
    int(zmq.EVENT_ACCEPT_FAILED): "it belongs to another user, or this process may not open more files (ulimit -n)",
}


class ConnectionPolicy:
    """Decides which connections one ROUTER accepts, and authenticates the DEALERs of the same rank to other ROUTERs."""

    def __init__(
        self, rank: int, size: int, key: Key, unauthenticated: UnauthenticatedPeers, *, encrypted: bool
    ) -> None:
        self._rank = rank
        self._size = size
        self._key = key
        self._unauthenticated = unauthenticated
        self._encrypted = encrypted
        self._ranks: frozenset[bytes] = frozenset()  # the public keys of all ranks, if the ROUTER is encrypted
        self._authenticator: authentication.Authenticator | None = None

    def attach(self, router: zmq.Socket[bytes]) -> None:
        """Guard `router`. Call this before it binds. Its context must have no other connection policy."""
        self._router = router
        router.setsockopt(zmq.BACKLOG, _BACKLOG + 2 * self._size)
        self._monitor = Monitor(router, sum(_FAILURES), self._failed)

    def guard(self, address: str) -> None:
        """Prepare the ROUTER for a bind to `address`: first over ipc, then over tcp.

        The order matters. IPC_FILTER_UID, the time for a handshake and the ZAP handler are options of the socket that
        each bind copies, so the handler must not exist yet when the ROUTER binds over ipc, where peers have no
        credentials.
        """
        if address.startswith("ipc://"):
            assert self._authenticator is None, (
                "the ROUTER must bind over ipc first: the ZAP handler would guard ipc too"
            )
            self._router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            self._router.setsockopt(zmq.HANDSHAKE_IVL, _LOCAL_HANDSHAKE_MS)
            return
        self._router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._authenticator = authentication.Authenticator(self._router.context, self._is_rank, self._rejected)
        self._authenticator.guard(self._router)
        if self._encrypted:
            self._ranks = frozenset(authentication.on_the_wire(self._pair(rank)[0]) for rank in range(self._size))
            authentication.encrypt_server(self._router, self._pair(self._rank))
        else:
            self._router.setsockopt(zmq.PLAIN_SERVER, 1)

    def introduce(self, dealer: zmq.Socket[bytes], dest: int, address: str) -> None:
        """Give `dealer`, of this rank, its credentials. Call this before it connects to `address`, of rank `dest`."""
        if address.startswith("ipc://"):
            return
        if not self._encrypted:
            dealer.setsockopt(zmq.PLAIN_USERNAME, str(self._rank).encode())
            dealer.setsockopt(zmq.PLAIN_PASSWORD, self._password(self._rank, dest))
            return
        authentication.encrypt_client(dealer, self._pair(self._rank), self._pair(dest)[0])

    def start(self) -> None:
        """Begin to answer on the running loop. Until then, peers that connect over tcp wait in their handshake."""
        self._monitor.start()
        if self._authenticator is not None:
            self._authenticator.start()

    def close(self) -> None:
        self._monitor.close()
        if self._authenticator is not None:
            self._authenticator.close()

    def _failed(self, event: int, _: int) -> None:
        """Log a connection that has failed before ZeroMQ asked the ZAP handler."""
        self._unauthenticated.log(f"rejected a connection: {_FAILURES[event]}")

    def _rejected(self, where: str) -> None:
        self._unauthenticated.log(f"rejected a connection from {where}: it does not have this job's key")

    def _is_rank(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if self._encrypted:
            return mechanism == b"CURVE" and credentials[0] in self._ranks
        if mechanism != b"PLAIN" or not credentials[0].isdigit() or len(credentials[0]) > len(str(self._size)):
            return False
        # In constant time, so that response times reveal nothing of the password.
        return hmac.compare_digest(credentials[1], self._password(int(credentials[0]), self._rank))

    def _password(self, source: int, dest: int) -> bytes:
        return self._key.derive("link", source, dest).hex().encode()

    def _pair(self, rank: int) -> tuple[bytes, bytes]:
        """The public and the secret key of `rank`."""
        return authentication.key_pair(self._key.derive("key pair", rank))
