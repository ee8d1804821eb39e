"""Who may connect to a service over tcp: whoever has the key, from which the secrets of both ends are made.

The server has one pair of CURVE keys and every client the other, so the list of those allowed has one entry.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from asyncoll.errors import UsageError

KEY_BYTES = 32
_DOMAIN = b"asyncoll"
_ADDRESS = "inproc://zeromq.zap.01"


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The key in that file. Raises UsageError if others may read it, or if it is none."""
    file = Path(path)
    try:
        status, key = file.stat(), file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the key: {error}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(f"others may read or write the key in {file}: it must be yours, with mode 0600")
    if len(key) != KEY_BYTES:
        raise UsageError(f"the key in {file} has {len(key)} bytes, not {KEY_BYTES}: make one with os.urandom")
    return key


def _pair(key: bytes, whose: bytes) -> tuple[bytes, bytes]:
    """The public and the secret key of one end."""
    secret = z85.encode(hashlib.blake2b(key=key, person=whose, digest_size=32).digest())
    return zmq.curve_public(secret), secret


def protect_server(socket: zmq.Socket[bytes], key: bytes) -> None:
    """Before it binds. Needs a `Gatekeeper` in the same context."""
    socket.curve_publickey, socket.curve_secretkey = _pair(key, b"server")
    socket.curve_server = True
    socket.zap_domain = _DOMAIN


def protect_client(socket: zmq.Socket[bytes], key: bytes) -> None:
    """Before it connects."""
    socket.curve_publickey, socket.curve_secretkey = _pair(key, b"client")
    socket.curve_serverkey = _pair(key, b"server")[0]


class Gatekeeper:
    """Tells ZeroMQ who may come in (its protocol is ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[Any], key: bytes, refused: Callable[[str], None]) -> None:
        self._allowed = z85.decode(_pair(key, b"client")[0])
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
