"""The output of the ranks, shown with the rank in front of each line."""

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

LAST_LINES = 20
VERDICT = "1;31"  # bold and red: the line that names the first failure
COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


class TextSink:
    """An output that takes text only, as that of a notebook's cell."""

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self.flush = text.flush
        self.fileno = text.fileno

    def write(self, data: bytes) -> None:
        self._text.write(data.decode(errors="replace"))


@dataclass(slots=True)
class OutputStream:
    """One output: of a rank, or of the connection to a host."""

    prefix: bytes
    sink: BinaryIO | TextSink
    log: BinaryIO | None = None
    lines: Lines = field(default_factory=Lines)
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def show(self, data: bytes, now: float) -> None:
        """Show the bytes that have arrived by `now`, in seconds of the monotonic clock; none: the end of the output.

        Raises BrokenPipeError if the reader of the launcher's output is gone.
        """
        if self.log:
            self.log.write(data)
        if lines := self.lines.feed(data, now) if data else self.lines.end():
            self.last += lines
            self.sink.write(b"".join(self.prefix + line + b"\n" for line in lines))
            self.sink.flush()

    def abandon(self) -> None:
        """Redirect `sink` to /dev/null, so that even the last flush of the interpreter succeeds."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.sink.fileno())
        os.close(nowhere)


class Output(NamedTuple):
    """The streams of all ranks."""

    out: list[OutputStream]
    err: list[OutputStream]

    def log_error(self, rank: int, text: str) -> None:
        """Complete the rank's log with the text that its interpreter would have printed."""
        if log := self.err[rank].log:
            log.write(text.encode(errors="replace"))


def coloured(text: str, colour: str, sink: TextIO | None) -> str:
    """`text` in a colour, if there is one, it is shown on a terminal, and NO_COLOR is not set."""
    if not colour or sink is None or not sink.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


@contextmanager
def open_output(size: int, logs: Path | None) -> Iterator[Output]:
    """Open the streams of `size` ranks. If `logs` is given, their raw bytes are also written there."""
    with ExitStack() as opened:
        # In place of a standard stream that was closed.
        nowhere = opened.enter_context(open(os.devnull, "w"))

        def stream(rank: int, shown: TextIO | None, name: str) -> OutputStream:
            sink = nowhere if shown is None else shown
            prefix = coloured(f"{rank:>{len(str(size - 1))}}:", str(COLOURS[rank % len(COLOURS)]), sink)
            log = None
            if logs is not None:
                try:
                    logs.mkdir(parents=True, exist_ok=True)
                    log = opened.enter_context(open(logs / f"rank-{rank}.{name}", "wb", buffering=0))
                except OSError as error:
                    raise UsageError(f"cannot write logs to {logs}: {error.strerror}; give another folder") from error
            return OutputStream(f"{prefix} ".encode(), getattr(sink, "buffer", None) or TextSink(sink), log)

        yield Output(
            [stream(rank, sys.stdout, "out") for rank in range(size)],
            [stream(rank, sys.stderr, "err") for rank in range(size)],
        )
