"""Cut the bytes of a rank into the lines to show.

Bytes are never decoded, so no output of a rank can make the launcher fail. A progress bar that rewrites its line is
shown in its current state, at most once a second. A line that is too long to hold is cut.
"""

from __future__ import annotations

LINE_BYTES_MAX = 1 << 16
PROGRESS_S = 1.0


class Lines:
    """The lines of one stream. No I/O and no clock."""

    def __init__(self) -> None:
        self._rest = b""
        self._progress = b""
        self._progress_at = -PROGRESS_S

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines to show after `data` has arrived."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown = [line for line in map(_as_it_stands, lines) if not self._was_shown(line)]
        if b"\r" in self._rest.rstrip(b"\r"):
            shown += self._show_progress(now)
        while len(self._rest) > LINE_BYTES_MAX:
            shown.append(self._rest[:LINE_BYTES_MAX])
            self._rest = self._rest[LINE_BYTES_MAX:]
        return shown

    def end(self) -> list[bytes]:
        """The rest of a last line without an end."""
        rest, self._rest = _as_it_stands(self._rest), b""
        return [rest] if rest and not self._was_shown(rest) else []

    def _show_progress(self, now: float) -> list[bytes]:
        self._rest = _as_it_stands(self._rest)
        if now - self._progress_at < PROGRESS_S:
            return []
        self._progress, self._progress_at = self._rest, now
        return [self._rest]

    def _was_shown(self, line: bytes) -> bool:
        shown, self._progress = self._progress, b""
        return bool(line) and line == shown


def _as_it_stands(line: bytes) -> bytes:
    """The part of `line` that a terminal would show."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
