"""The messages between the launcher, the template and the ranks: small JSON objects, with open files attached.

The socket preserves the boundaries of messages, and their order over all senders. By this order the launcher knows
which rank has failed first.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

MESSAGE_BYTES_MAX = 1 << 17
FILES_MAX = 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that preserve the boundaries of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(control: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send a message. Blocks while the other side does not read. Raises OSError if it is gone."""
    socket.send_fds(control, [json.dumps(message).encode()], files)


def receive(control: socket.socket) -> dict[str, Any] | None:
    """The next message; None at the end. Raises BlockingIOError if there is none yet."""
    try:
        data = control.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
    except ConnectionResetError:
        return None
    return json.loads(data) if data else None


def receive_files(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for the next message and its files, which the caller then owns; None at the end."""
    try:
        data, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, FILES_MAX)
    except ConnectionResetError:
        return None
    for file in files:
        os.set_inheritable(file, False)
    return (json.loads(data), files) if data else None
