"""Programs at MASTER_PORT that are no store: a rank says so, instead of waiting for rank 0."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest

RANK = """
import sys
import asyncoll
from asyncoll.world import store

async def main(comm):
    pass

store._DOUBT_S, store._SILENCE_S = map(float, sys.argv[1:])  # the times of a store on an overloaded host
asyncoll.run(main)
"""


def answer(connection: socket.socket) -> None:
    if connection.recv(1):
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def greet(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    connection.recv(1)


def say_nothing(connection: socket.socket) -> None:
    while connection.recv(100):
        pass


def serve(listener: socket.socket, act: Callable[[socket.socket], None]) -> None:
    def serve_one(connection: socket.socket) -> None:
        with connection:
            try:
                act(connection)
            except ConnectionError:
                return

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # it is closed
            return
        threading.Thread(target=serve_one, args=(connection,), daemon=True).start()


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (answer, "it answers b'HTTP/1.1 400 Bad Request"),
        (greet, "it answers b'SSH-2.0-OpenSSH"),
        (say_nothing, "it accepts connections, and has said nothing"),
    ],
    ids=["a web server", "one that speaks first", "one that says nothing"],
)
def test_a_program_that_is_no_store_is_named(act, text, forked, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener, act), daemon=True).start()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        environment = os.environ | place | {"RANK": "1", "WORLD_SIZE": "2", "ASYNCOLL_DEADLINE_S": "60"}
        code, _, err = forked(environment, tmp_path / "rank.py", "0.2", "0.2")
        listener.shutdown(socket.SHUT_RDWR)
    assert code == 1
    (said,) = [line for line in err.splitlines() if line.startswith("asyncoll.errors.")]
    assert said.startswith(f"asyncoll.errors.UsageError: what listens at 127.0.0.1, MASTER_PORT={place['MASTER_PORT']}")
    assert text in said
    assert "Choose another port" in said
