"""The launcher's hand on another host: passes its orders to the ranks there, and their news to it.

ssh starts it, with the launcher at its stdin and stdout. Once stdin ends, it kills all processes of the job on this
host: the job is over, the launcher was killed, or the connection is gone.
"""

from __future__ import annotations

import os
import selectors
import sys
from contextlib import closing
from typing import Any

import asyncoll
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.launch import frames
from asyncoll.launch.host import READ_BYTES, News, Sources
from asyncoll.launch.local import LocalHost, check, local_host, template_of
from asyncoll.launch.program import Program
from asyncoll.launch.rank_environment import job_folder
from asyncoll.launch.store_relay import SOCKET, StoreRelay
from asyncoll.transport.keys import KEY_FILE

GREETING = f"asyncoll agent {asyncoll.__version__}\n".encode()
# Between two messages that say nothing. What the launcher's host does not acknowledge breaks the connection in the end.
BEAT_S = 10.0


def main() -> None:
    """Serve the launcher until the job ends."""
    wire = os.dup(1)
    os.dup2(2, 1)  # nothing else may come between the messages
    os.write(wire, GREETING)
    with selectors.DefaultSelector() as selector:
        _HostAgent(wire, Sources(selector)).run()


class _HostAgent:
    def __init__(self, wire: int, sources: Sources) -> None:
        self._wire = wire
        self._sources = sources
        self._frames = frames.Frames()
        self._host: LocalHost | None = None

    def run(self) -> None:
        try:
            if (job := self._receive_job()) is None:
                return
            address = _enter(job)
            program = Program(tuple(job["argv"]), job["module"])
            check(job["size"], program)
            with job_folder(job["key"]) as folder:
                place = {
                    KEY_FILE: str(folder / "job"),
                    "ASYNCOLL_FOLDER": "",
                    "ASYNCOLL_LAUNCHER": str(folder / SOCKET),
                }
                start = template_of(job["size"], program, folder, {**os.environ, **place})
                with (
                    closing(StoreRelay(folder, self._sources, self._tell)) as self._relay,
                    local_host(start, address, self._sources, self._tell) as host,
                ):
                    self._serve(host)
        except UsageError as error:
            self._tell({"refused": str(error)})
        except ProtocolError as error:
            self._give_up(error)

    def _serve(self, host: LocalHost) -> None:
        self._host = host
        self._sources.watch(0, self._hear)
        while not host.has_ended:
            if not self._sources.wait(BEAT_S):
                self._tell({})
        self._sources.unwatch(0)

    def _receive_job(self) -> dict[str, Any] | None:
        """The first message; None if the launcher has gone."""
        while data := os.read(0, READ_BYTES):
            if messages := self._frames.feed(data):
                return messages[0]
        return None

    def _hear(self) -> None:
        assert self._host is not None
        data = os.read(0, READ_BYTES)
        if not data:
            self._end()
        try:
            for order in self._frames.feed(data):
                if "answered" in order:
                    self._relay.answer(order["answered"], order["answer"])
                else:
                    self._host.tell(order)
        except ProtocolError as error:
            self._give_up(error)

    def _give_up(self, error: ProtocolError) -> None:
        self._tell({"ended": f"what comes to it is not of a launcher: {error}"})
        self._end()

    def _tell(self, news: News) -> None:
        try:
            frames.send(self._wire, news)
        # The launcher, or the connection to it, is gone.
        except OSError:
            self._end()

    def _end(self) -> None:
        self._sources.unwatch(0)
        if self._host is not None:
            self._host.end()


def _enter(job: dict[str, Any]) -> str:
    """Take on the job's environment and folder. Returns the address at which ssh has reached this host."""
    os.environ.update(job["environment"])
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    try:
        os.chdir(job["folder"])
    except OSError as error:
        raise UsageError(
            f"cannot work in {job['folder']}: {error.strerror}; the current folder of the launcher must be at the same "
            "path on all hosts"
        ) from error
    connection = os.environ.get("SSH_CONNECTION", "").split()  # address and port of the client, and of the server
    if len(connection) != 4:
        raise UsageError("its ssh server does not tell the address at which it was reached (SSH_CONNECTION)")
    return connection[2]
