"""Who may come in through a ROUTER: processes of this user over ipc, and over tcp the ranks of the job.

Over tcp every connection begins with a handshake, and ZeroMQ asks here (ZAP) before it takes the first message, so
nothing that strangers send is ever queued. With CURVE a rank shows that it has its own key pair, which follows from
the job's key, and all is encrypted. With PLAIN it shows the password of the link, which follows from the job's key too
and cannot be guessed; but who can read along can read it, and all else.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from asyncoll.keys import Key

_HANDSHAKE_MS = 5000  # whoever has connected must show by then that it belongs to the job
_BACKLOG = 128  # and two for each rank
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"asyncoll"
_WELCOME, _REFUSED = (b"200", b"OK", b"rank", b""), (b"400", b"no rank of this job", b"", b"")
_FAILURES: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it does not speak as a rank of this job would",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it did not show in time that it belongs to this job",
    int(zmq.EVENT_ACCEPT_FAILED): "it is of another user, or no more files may be open (ulimit -n)",
}
logger = logging.getLogger("asyncoll")


class Strangers:
    """Tells the log of strangers: of the first, then of the 2nd, 4th, 8th…, so that they cannot fill it."""

    def __init__(self, who: str) -> None:
        """`who` has to do with them."""
        self._who = who
        self._count = 0

    def tell(self, what: str) -> None:
        """`what` was done about one."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            logger.warning("%s %s; that was stranger number %d", self._who, what, self._count)


class Door:
    """Of one ROUTER: which connections it takes, and how its rank introduces itself at others'."""

    def __init__(self, rank: int, size: int, key: Key, strangers: Strangers, *, encrypted: bool) -> None:
        self._rank = rank
        self._size = size
        self._key = key
        self._strangers = strangers
        self._encrypted = encrypted
        self._ranks: frozenset[bytes] = frozenset()  # the public keys of all, where they are asked for
        self._zap: zmq.Socket[bytes] | None = None

    def attach(self, router: zmq.Socket[bytes]) -> None:
        """Before it binds. Its context must have no other door."""
        self._router = router
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        router.setsockopt(zmq.BACKLOG, _BACKLOG + 2 * self._size)
        address = f"inproc://door-{id(self)}"
        router.monitor(address, sum(_FAILURES))
        self._monitor: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # or ZeroMQ stands still until somebody has read of its strangers
        self._monitor.connect(address)

    def guard(self, address: str) -> None:
        """Before the ROUTER binds to `address`: first over ipc, then over tcp."""
        if address.startswith("ipc://"):
            assert self._zap is None, "what guards tcp would ask at ipc too"
            self._router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            return
        self._zap = self._router.context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        self._router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody comes in while nobody can be asked
        if self._encrypted:
            self._ranks = frozenset(z85.decode(self._pair(rank)[0]) for rank in range(self._size))
            self._router.setsockopt(zmq.CURVE_SECRETKEY, self._pair(self._rank)[1])
            self._router.setsockopt(zmq.CURVE_SERVER, 1)
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
        public, secret = self._pair(self._rank)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self._pair(dest)[0])

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to answer on `loop`; until then whoever knocks over tcp waits."""
        self._loop = loop
        loop.add_reader(self._monitor.fileno(), self._heed)
        self._heed()
        if self._zap is not None:
            loop.add_reader(self._zap.fileno(), self._answer)
            self._answer()

    def close(self, *, opened: bool) -> None:
        if opened:
            self._loop.remove_reader(self._monitor.fileno())
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        if self._zap is not None:
            if opened:
                self._loop.remove_reader(self._zap.fileno())
            self._zap.close(linger=0)

    def _answer(self) -> None:
        """Whether those who knock may come in."""
        assert self._zap is not None
        while True:
            try:
                version, request, _, address, _, mechanism, *credentials = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            welcome = self._is_rank(mechanism, credentials)
            self._zap.send_multipart([version, request, *(_WELCOME if welcome else _REFUSED)])
            if not welcome:
                where = address.decode("ascii", "replace")
                self._strangers.tell(f"turned a stranger away who came from {where}: it has not this job's key")

    def _is_rank(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if self._encrypted:
            return mechanism == b"CURVE" and credentials[0] in self._ranks
        if mechanism != b"PLAIN" or not credentials[0].isdigit() or len(credentials[0]) > len(str(self._size)):
            return False
        return hmac.compare_digest(credentials[1], self._password(int(credentials[0]), self._rank))

    def _password(self, source: int, dest: int) -> bytes:
        return self._key.derive("link", source, dest).hex().encode()

    def _pair(self, rank: int) -> tuple[bytes, bytes]:
        """The public and the secret key of `rank`, as ZeroMQ writes them."""
        secret = z85.encode(self._key.derive("key pair", rank))
        return zmq.curve_public(secret), secret

    def _heed(self) -> None:
        """Read the monitor: who has failed before anybody was asked."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] in _FAILURES:
                self._strangers.tell(f"turned a stranger away: {_FAILURES[int(event['event'])]}")
