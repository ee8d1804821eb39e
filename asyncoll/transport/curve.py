"""Who may connect to a service over tcp: whoever has the key, from which the secrets of both ends are made.

The server has one pair of CURVE keys and every client the other, so the list of those allowed has one entry.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from asyncoll.keys import Key

_DOMAIN = b"asyncoll"
_ADDRESS = "inproc://zeromq.zap.01"


def _pair(key: Key, whose: str) -> tuple[bytes, bytes]:
    """The public and the secret key of one end."""
    secret = z85.encode(key.derive("service", whose))
    return zmq.curve_public(secret), secret


def protect_server(socket: zmq.Socket[bytes], key: Key) -> None:
    """Before it binds. Needs a `Gatekeeper` in the same context."""
    socket.curve_publickey, socket.curve_secretkey = _pair(key, "server")
    socket.curve_server = True
    socket.zap_domain = _DOMAIN


def protect_client(socket: zmq.Socket[bytes], key: Key) -> None:
    """Before it connects."""
    socket.curve_publickey, socket.curve_secretkey = _pair(key, "client")
    socket.curve_serverkey = _pair(key, "server")[0]


class Gatekeeper:
    """Tells ZeroMQ who may come in (its protocol is ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[Any], key: Key, refused: Callable[[str], None]) -> None:
        self._allowed = z85.decode(_pair(key, "client")[0])
        self._refused = refused
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ADDRESS)

    def fileno(self) -> int:
        return int(self._socket.fileno())

    def read(self) -> None:
        """Answer everybody who has asked."""
        while True:
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(request))

    def close(self) -> None:
        self._socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number, _, address, _, mechanism, *credentials = request
        if mechanism == b"CURVE" and len(credentials) == 1 and hmac.compare_digest(credentials[0], self._allowed):
            return [version, number, b"200", b"", b"", b""]
        self._refused(address.decode(errors="replace"))
        return [version, number, b"400", b"not the key of this service", b"", b""]
