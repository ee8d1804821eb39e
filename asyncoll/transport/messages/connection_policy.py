"""Who may come in through a ROUTER: processes of this user over ipc, and over tcp the ranks of the job.

With CURVE a rank shows that it has its own key pair, which follows from the job's key, and all is encrypted. With
PLAIN it shows the password of the link, which follows from the job's key too and cannot be guessed; but who can read
along can read it, and all else.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncoll.transport.keys import Key
from asyncoll.transport.messages import authentication
from asyncoll.transport.messages.monitor import watch

_HANDSHAKE_MS = 5000  # whoever has connected must show by then that it belongs to the job
_BACKLOG = 128  # and two for each rank
_FAILURES: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it does not speak as a rank of this job would",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it did not show in time that it belongs to this job",
    int(zmq.EVENT_ACCEPT_FAILED): "it is of another user, or no more files may be open (ulimit -n)",
}


class ConnectionPolicy:
    """Of one ROUTER: which connections it takes, and how its rank introduces itself at others'."""

    def __init__(
        self, rank: int, size: int, key: Key, unauthenticated: authentication.UnauthenticatedPeers, *, encrypted: bool
    ) -> None:
        self._rank = rank
        self._size = size
        self._key = key
        self._unauthenticated = unauthenticated
        self._encrypted = encrypted
        self._ranks: frozenset[bytes] = frozenset()  # the public keys of all, where they are asked for
        self._authenticator: authentication.Authenticator | None = None

    def attach(self, router: zmq.Socket[bytes]) -> None:
        """Before it binds. Its context must have no other connection policy."""
        self._router = router
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        router.setsockopt(zmq.BACKLOG, _BACKLOG + 2 * self._size)
        self._monitor = watch(router, sum(_FAILURES))

    def guard(self, address: str) -> None:
        """Before the ROUTER binds to `address`: first over ipc, then over tcp."""
        if address.startswith("ipc://"):
            assert self._authenticator is None, "what guards tcp would ask at ipc too"
            self._router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            return
        self._authenticator = authentication.Authenticator(self._router.context, self._is_rank, self._refused)
        self._authenticator.guard(self._router)
        if self._encrypted:
            self._ranks = frozenset(authentication.on_the_wire(self._pair(rank)[0]) for rank in range(self._size))
            authentication.encrypt_server(self._router, self._pair(self._rank))
        else:
            self._router.setsockopt(zmq.PLAIN_SERVER, 1)

    def introduce(self, dealer: zmq.Socket[bytes], dest: int, address: str) -> None:
        """Before a DEALER of this rank connects to `address`, the ROUTER of `dest`."""
        if address.startswith("ipc://"):
            return
        if not self._encrypted:
            dealer.setsockopt(zmq.PLAIN_USERNAME, str(self._rank).encode())
            dealer.setsockopt(zmq.PLAIN_PASSWORD, self._password(self._rank, dest))
            return
        authentication.encrypt_client(dealer, self._pair(self._rank), self._pair(dest)[0])

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to answer on `loop`; until then whoever knocks over tcp waits."""
        self._loop = loop
        loop.add_reader(self._monitor.fileno(), self._heed)
        self._heed()
        if self._authenticator is not None:
            loop.add_reader(self._authenticator.fileno(), self._authenticator.read)
            self._authenticator.read()

    def close(self, *, opened: bool) -> None:
        if opened:
            self._loop.remove_reader(self._monitor.fileno())
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        if self._authenticator is not None:
            if opened:
                self._loop.remove_reader(self._authenticator.fileno())
            self._authenticator.close()

    def _refused(self, where: str) -> None:
        self._unauthenticated.tell(f"turned a stranger away who came from {where}: it has not this job's key")

    def _is_rank(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if self._encrypted:
            return mechanism == b"CURVE" and credentials[0] in self._ranks
        if mechanism != b"PLAIN" or not credentials[0].isdigit() or len(credentials[0]) > len(str(self._size)):
            return False
        return hmac.compare_digest(credentials[1], self._password(int(credentials[0]), self._rank))

    def _password(self, source: int, dest: int) -> bytes:
        return self._key.derive("link", source, dest).hex().encode()

    def _pair(self, rank: int) -> tuple[bytes, bytes]:
        """The public and the secret key of `rank`."""
        return authentication.key_pair(self._key.derive("key pair", rank))

    def _heed(self) -> None:
        """Read the monitor: who has failed before anybody was asked."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] in _FAILURES:
                self._unauthenticated.tell(f"turned a stranger away: {_FAILURES[int(event['event'])]}")
