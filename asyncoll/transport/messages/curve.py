"""Who may connect to a service over tcp: whoever has the key, from which the secrets of both ends are made.

The server has one pair of CURVE keys and every client the other.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import zmq

from asyncoll.transport.keys import Key
from asyncoll.transport.messages import authentication


def _pair(key: Key, whose: str) -> tuple[bytes, bytes]:
    """The public and the secret key of one end."""
    return authentication.key_pair(key.derive("service", whose))


def authenticator(context: zmq.Context[Any], key: Key, refused: Callable[[str], None]) -> authentication.Authenticator:
    """Lets clients in, and tells `refused` where others come from."""
    client = authentication.on_the_wire(_pair(key, "client")[0])

    def is_client(mechanism: bytes, credentials: list[bytes]) -> bool:
        return mechanism == b"CURVE" and hmac.compare_digest(credentials[0], client)

    return authentication.Authenticator(context, is_client, refused)


def protect_server(socket: zmq.Socket[bytes], key: Key) -> None:
    """Before it binds. Needs a `authenticator` in the same context."""
    authentication.encrypt_server(socket, _pair(key, "server"))


def protect_client(socket: zmq.Socket[bytes], key: Key) -> None:
    """Before it connects."""
    authentication.encrypt_client(socket, _pair(key, "client"), _pair(key, "server")[0])
