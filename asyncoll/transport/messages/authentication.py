"""Authentication at ZeroMQ sockets: the ZAP handler, and CURVE key pairs.

Every connection begins with a handshake. During it ZeroMQ asks a handler (protocol ZAP, ZeroMQ RFC 27) whether to
accept the peer. It reads the first message after that, so no message of an unauthenticated peer is ever queued.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

_ADDRESS = "inproc://zeromq.zap.01"  # fixed by ZAP
_DOMAIN = b"asyncoll"
# Status code and text, user id and metadata, in the replies of ZAP.
_ACCEPTED, _REJECTED = (b"200", b"OK", b"", b""), (b"400", b"it does not have the key", b"", b"")


class Authenticator:
    """The ZAP handler of one ZeroMQ context, which can have one handler only."""

    def __init__(
        self,
        context: zmq.Context[Any],
        accepts: Callable[[bytes, list[bytes]], bool],
        rejected: Callable[[str], None],
    ) -> None:
        """`accepts(mechanism, credentials)` decides. `rejected` is called with the address of each rejected peer."""
        self._accepts = accepts
        self._rejected = rejected
        self._closing = contextlib.ExitStack()
        self._socket = context.socket(zmq.REP)
        self._closing.callback(self._socket.close)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ADDRESS)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` ask this handler. Call this before the socket binds."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without a handler for this domain ZeroMQ would accept every peer.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def start(self) -> None:
        """Answer requests on the running loop. Until then, peers wait in their handshake."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._read)
        self._closing.callback(loop.remove_reader, self._socket.fileno())
        self._read()

    def _read(self) -> None:
        """Answer all requests that have arrived."""
        while True:
            try:
                version, request, _, address, _, mechanism, *credentials = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            accepted = self._accepts(mechanism, credentials)
            self._socket.send_multipart([version, request, *(_ACCEPTED if accepted else _REJECTED)])
            if not accepted:
                self._rejected(address.decode("ascii", "replace"))

    def close(self) -> None:
        self._closing.close()


def key_pair(secret: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key for a secret of 32 bytes, both in the Z85 text form of ZeroMQ."""
    encoded = z85.encode(secret)
    return zmq.curve_public(encoded), encoded


def on_the_wire(public: bytes) -> bytes:
    """Return a public key in the binary form of the credentials in a ZAP request."""
    return z85.decode(public)


def encrypt_server(socket: zmq.Socket[bytes], pair: tuple[bytes, bytes]) -> None:
    """Make `socket` a CURVE server with this key pair. Call this before the socket binds."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair[1])
    socket.setsockopt(zmq.CURVE_SERVER, 1)


def encrypt_client(socket: zmq.Socket[bytes], pair: tuple[bytes, bytes], server: bytes) -> None:
    """Make `socket` a CURVE client with this key pair, of the owner of the public key `server`.

    Call this before the socket connects.
    """
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair[0])
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair[1])
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
