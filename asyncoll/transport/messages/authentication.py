"""What guards the sockets of ZeroMQ: who is asked about those who knock, the key pairs they show, and the log.

Every connection begins with a handshake, and ZeroMQ asks (its protocol is ZAP, RFC 27) before it takes the first
message, so nothing that unauthenticated peers send is ever queued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"asyncoll"
_WELCOME, _REFUSED = (b"200", b"OK", b"", b""), (b"400", b"it has not the key", b"", b"")
logger = logging.getLogger("asyncoll")


class UnauthenticatedPeers:
    """Tells the log of unauthenticated peers: of the first, then of the 2nd, 4th, 8th…, so that they cannot fill it."""

    def __init__(self, who: str) -> None:
        """`who` has to do with them."""
        self._who = who
        self._count = 0

    def tell(self, what: str) -> None:
        """`what` was done about one."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            logger.warning("%s %s; that was stranger number %d", self._who, what, self._count)


class Authenticator:
    """Tells ZeroMQ who may come in at the sockets of one context. It may have no other."""

    def __init__(
        self,
        context: zmq.Context[Any],
        is_welcome: Callable[[bytes, list[bytes]], bool],
        refused: Callable[[str], None],
    ) -> None:
        """`is_welcome(mechanism, credentials)` decides; `refused` is told where those come from who may not."""
        self._is_welcome = is_welcome
        self._refused = refused
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ADDRESS)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Before it binds."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody comes in while nobody can be asked

    def fileno(self) -> int:
        return int(self._socket.fileno())

    def read(self) -> None:
        """Answer everybody who has asked; until then they wait."""
        while True:
            try:
                version, request, _, address, _, mechanism, *credentials = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            welcome = self._is_welcome(mechanism, credentials)
            self._socket.send_multipart([version, request, *(_WELCOME if welcome else _REFUSED)])
            if not welcome:
                self._refused(address.decode("ascii", "replace"))

    def close(self) -> None:
        self._socket.close()


def key_pair(secret: bytes) -> tuple[bytes, bytes]:
    """The public and the secret key of CURVE that 32 bytes stand for, as ZeroMQ writes them."""
    written = z85.encode(secret)
    return zmq.curve_public(written), written


def on_the_wire(public: bytes) -> bytes:
    """A public key as its owner's credentials show it."""
    return z85.decode(public)


def encrypt_server(socket: zmq.Socket[bytes], pair: tuple[bytes, bytes]) -> None:
    """Before it binds."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair[1])
    socket.setsockopt(zmq.CURVE_SERVER, 1)


def encrypt_client(socket: zmq.Socket[bytes], pair: tuple[bytes, bytes], server: bytes) -> None:
    """Before it connects to the owner of the public key `server`."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair[0])
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair[1])
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
