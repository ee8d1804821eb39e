"""The launcher's handle of the template process."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from asyncoll.launch import control, template
from asyncoll.launch.program import Program


@dataclass(slots=True)
class Helper:
    """The template process. Closing `channel` ends the job; `death` becomes readable when the template is gone."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    death: int

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, *files: int, **message: object) -> None:
        """Send it a message, with files."""
        with suppress(OSError):  # it is gone, and `death` is readable
            control.send(self.channel, message, files)


@contextmanager
def start(program: Program, environment: dict[str, str]) -> Iterator[Helper]:
    """Start a template for `program`, in its own session, so that the terminal's Ctrl-C does not reach it."""
    ours, its = control.pair()
    with ours:
        with its:
            process = subprocess.Popen(
                template.command("template", its.fileno(), program),
                env=environment,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        death = os.pidfd_open(process.pid)
        try:
            yield Helper(process, ours, death)
        finally:
            ours.close()
            process.wait()
            os.close(death)
