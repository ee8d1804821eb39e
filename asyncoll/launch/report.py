"""The report of `asyncoll launch --json`: how a job and each of its ranks have ended."""

from __future__ import annotations

import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from asyncoll.errors import UsageError
from asyncoll.launch.placement import Placement
from asyncoll.launch.supervisor import Failure, Outcome, exit_code
from asyncoll.launch.verdict import fate, signal_name


def clear(path: Path) -> Path:
    """Remove an old report at `path`. Returns the file to write: of a link, the one that it leads to.

    Raises UsageError if no report can be written there.
    """
    file = Path(os.path.realpath(path))
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"{path} is not a regular file: give another path for the report")
        _write(file, "")
        file.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from error
    return file


def write(file: Path, outcome: Outcome, placement: Placement) -> None:
    """Write the report to a new file. Nobody sees a part of it. Raises UsageError if that fails."""
    try:
        _write(file, json.dumps(report(outcome, placement), indent=2) + "\n")
    except OSError as error:
        raise _cannot_write(file, error) from error


def report(outcome: Outcome, placement: Placement) -> dict[str, Any]:
    """The report as a map."""
    here = socket.gethostname()

    def place(rank: int) -> dict[str, Any]:
        host = here if placement.is_here else placement.host_of(rank)
        return {"rank": rank, "host": host, "pid": outcome.pids.get(rank)}

    def end(rank: int) -> dict[str, Any]:
        code, after_s = outcome.ends.get(rank, (None, None))
        return {
            "exit_code": None if code is None else exit_code(code),
            "signal": None if code is None or code >= 0 else signal_name(-code),
            "ended_s": _milliseconds(after_s),
        }

    return {
        "exit_code": outcome.exit_code,
        "seconds": _milliseconds(outcome.seconds),
        "first": None if outcome.root is None else {**place(outcome.root.rank), **_failure(outcome.root)},
        "deaths": [{**place(death.rank), **_death(death)} for death in outcome.deaths],
        "ranks": [{**place(rank), **end(rank)} for rank in range(placement.size)],
    }


def _death(death: Failure) -> dict[str, Any]:
    return {"kind": _kind(death), "error": death.summary or fate(death), "after_s": _milliseconds(death.after_s)}


def _kind(failure: Failure) -> str:
    return failure.kind or ("lost" if failure.is_lost else "exit" if failure.code >= 0 else "signal")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _failure(root: Failure) -> dict[str, Any]:
    return {
        "kind": _kind(root),
        "error": root.summary or fate(root),
        "place": root.place or None,
        "traceback": root.traceback or None,
    }


def _write(file: Path, text: str) -> None:
    """Replace `file` in one step. It has the rights that the umask leaves, as the files of --log-dir."""
    new = file.with_name(f".asyncoll-{secrets.token_hex(8)}")
    try:
        new.write_text(text)
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write the report {path}: {error.strerror}; give another path")
