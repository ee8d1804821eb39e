"""How the launcher, the template and the ranks talk: small JSON messages, with open files attached.

The socket keeps messages whole and in the order in which they were sent, whoever sent them; by that order the
launcher knows which rank failed first.
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
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(control: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """May wait for the other side to read. Raises OSError if it is gone."""
    socket.send_fds(control, [json.dumps(message).encode()], files)


def receive(control: socket.socket) -> dict[str, Any] | None:
    """The next message, None at the end. Raises BlockingIOError if there is none yet."""
    try:
        data = control.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
    except ConnectionResetError:
        return None
    return json.loads(data) if data else None


def receive_files(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for the next message and its files, which now belong to the caller; None at the end."""
    try:
        data, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, FILES_MAX)
    except ConnectionResetError:
        return None
    for file in files:
        os.set_inheritable(file, False)
    return (json.loads(data), files) if data else None
