"""The handshake of a connection for payloads: each end proves that it has the job's key. Nothing of the key is sent.

The end that accepts sends a nonce. The end that connects answers with its rank, a nonce of its own, and a proof over
both nonces and both ranks. The end that accepts answers with another proof over the same. So a recorded handshake
proves nothing in another connection, and neither end talks to a stranger. What follows is not encrypted; all but
the payloads is proved (`payload_stream`).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from typing import Final

from asyncoll.errors import ProtocolError
from asyncoll.transport.keys import KEY_BYTES, Key

_NONCE_BYTES: Final = 16
_INTRODUCTION: Final = struct.Struct(f"<I{_NONCE_BYTES}s{KEY_BYTES}s")  # the rank, the nonce and the proof
NO_KEY: Final = "it does not have this job's key"


async def introduce(connection: socket.socket, key: Key, source: int, dest: int) -> None:
    """Open a connection that rank `source` has made to rank `dest`.

    Raises OSError if it ends, and ProtocolError if the other end does not have the key.
    """
    theirs, mine = await _receive(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    about = theirs, mine, source, dest
    introduction = _INTRODUCTION.pack(source, mine, key.derive("payloads of", *about))
    await asyncio.get_running_loop().sock_sendall(connection, introduction)
    proof = await _receive(connection, KEY_BYTES)
    if not hmac.compare_digest(proof, key.derive("payloads to", *about)):
        raise ProtocolError(NO_KEY)


async def welcome(connection: socket.socket, key: Key, dest: int) -> int:
    """Open a connection that rank `dest` has accepted, and return the rank at the other end.

    Raises OSError if it ends, and ProtocolError if the other end does not have the key.
    """
    loop = asyncio.get_running_loop()
    mine = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, mine)
    source, theirs, proof = _INTRODUCTION.unpack(await _receive(connection, _INTRODUCTION.size))
    about = mine, theirs, source, dest
    if not hmac.compare_digest(proof, key.derive("payloads of", *about)):
        raise ProtocolError(NO_KEY)
    await loop.sock_sendall(connection, key.derive("payloads to", *about))
    return int(source)


async def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """Exactly `nbytes` bytes: what follows belongs to the stream. Raises ConnectionResetError if it ends before."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < nbytes:
        piece = await loop.sock_recv(connection, nbytes - len(received))
        if not piece:
            raise ConnectionResetError("the other end has closed the connection")
        received += piece
    return received
