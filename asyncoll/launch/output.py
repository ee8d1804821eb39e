"""The output of the ranks: pipes that are read here, and shown with the rank in front of each line."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from asyncoll.errors import UsageError
from asyncoll.launch.lines import Lines

READ_BYTES = 1 << 16
LAST_LINES = 20
COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


@dataclass(slots=True)
class Stream:
    """One of a rank's two outputs. The rank writes into `writer`."""

    reader: int
    writer: int
    prefix: bytes
    sink: BinaryIO
    log: BinaryIO | None
    lines: Lines = field(default_factory=Lines)
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def read(self, now: float) -> bool:
        """Show the bytes that have arrived. False at the end.

        Raises BlockingIOError if there are none, BrokenPipeError if the reader of the launcher's output is gone.
        """
        data = os.read(self.reader, READ_BYTES)
        if self.log:
            self.log.write(data)
        self._show(self.lines.feed(data, now) if data else self.lines.end())
        return bool(data)

    def drain(self, now: float) -> None:
        """Read and show all bytes that are there, including a last line without an end."""
        try:
            while self.read(now):
                pass
        except BlockingIOError:
            self._show(self.lines.end())

    def close_writer(self) -> None:
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        os.close(self.reader)
        if self.writer >= 0:
            os.close(self.writer)

    def abandon(self) -> None:
        """Redirect `sink` to /dev/null, so that even the last flush of the interpreter succeeds."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.sink.fileno())
        os.close(nowhere)

    def _show(self, lines: list[bytes]) -> None:
        if lines:
            self.last += lines
            self.sink.write(b"".join(self.prefix + line + b"\n" for line in lines))
            self.sink.flush()


class Output(NamedTuple):
    """The streams of all ranks."""

    out: list[Stream]
    err: list[Stream]

    def log_error(self, rank: int, text: str) -> None:
        """Complete the rank's log with the text that its interpreter would have printed."""
        if log := self.err[rank].log:
            log.write(text.encode(errors="replace"))


@contextmanager
def open_output(size: int, logs: Path | None) -> Iterator[Output]:
    """Open the streams of `size` ranks. If `logs` is given, their raw bytes are also written there."""
    with ExitStack() as opened:

        def stream(rank: int, sink: TextIO, name: str) -> Stream:
            prefix = f"{rank:>{len(str(size - 1))}}:"
            if sink.isatty() and not os.environ.get("NO_COLOR"):
                prefix = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{prefix}\x1b[0m"
            log = None
            if logs is not None:
                try:
                    logs.mkdir(parents=True, exist_ok=True)
                    log = opened.enter_context(open(logs / f"rank-{rank}.{name}", "wb", buffering=0))
                except OSError as error:
                    raise UsageError(f"cannot write logs: {error}") from error
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            made = Stream(reader, writer, f"{prefix} ".encode(), sink.buffer, log)
            opened.callback(made.close)
            return made

        yield Output(
            [stream(rank, sys.stdout, "out") for rank in range(size)],
            [stream(rank, sys.stderr, "err") for rank in range(size)],
        )
