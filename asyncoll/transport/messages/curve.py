"""Authentication of a service over tcp: a client needs the key, from which the CURVE key pairs of both ends derive.

The server has one key pair, and all clients have the other.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import zmq

from asyncoll.transport.keys import Key
from asyncoll.transport.messages import authentication


def _pair(key: Key, end: str) -> tuple[bytes, bytes]:
    """The public and the secret key of one end, "server" or "client"."""
    return authentication.key_pair(key.derive("service", end))


def authenticator(context: zmq.Context[Any], key: Key, rejected: Callable[[str], None]) -> authentication.Authenticator:
    """Return a ZAP handler that accepts clients with the key, and calls `rejected` with the address of other peers."""
    client = authentication.on_the_wire(_pair(key, "client")[0])

    def is_client(mechanism: bytes, credentials: list[bytes]) -> bool:
        return mechanism == b"CURVE" and hmac.compare_digest(credentials[0], client)

    return authentication.Authenticator(context, is_client, rejected)


def protect_server(socket: zmq.Socket[bytes], key: Key) -> None:
    """Make `socket` a server. Call this before it binds. Its context needs an `authenticator`."""
    authentication.encrypt_server(socket, _pair(key, "server"))


def protect_client(socket: zmq.Socket[bytes], key: Key) -> None:
    """Give `socket` the credentials of a client. Call this before it connects."""
    authentication.encrypt_client(socket, _pair(key, "client"), _pair(key, "server")[0])
