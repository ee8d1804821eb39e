"""An attempt of all ranks of one host to form a world, in a folder of its own inside the job's folder.

Rank 0 makes the folder, whose name is a number, and the others wait for it. A rank enters it once. The first rank whose
attempt fails, or is interrupted, leaves the reason there, which ends the attempt at all others. So a rank that tries
again meets no rank that is still in an earlier attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from types import TracebackType

from asyncoll.transport.joining import Joining
from asyncoll.world.told_failure import error_of, words_of


class HostAttempt:
    """A context: inside it this rank joins. `folder` is where the ranks meet."""

    folder: Path

    def __init__(self, job: Path, rank: int, size: int, joining: Joining) -> None:
        self._job = job
        self._rank = rank
        self._size = size
        self._joining = joining

    def __enter__(self) -> HostAttempt:
        if self._rank == 0:
            self.folder = self._job / str(newest_attempt(self._job) + 1)
            self.folder.mkdir(0o700)
        else:
            while not self._enters():
                self._joining.check(lambda: [0], "it has not begun to join yet")
                time.sleep(self._joining.pause_s)  # noqa: TID251 (no loop runs yet)
        self._joining.listen(self._check_failed)
        self._joining.fails_by(self.tell)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Leave `error` to the other ranks as the reason of the failure. The first call does it, in any thread."""
        if not isinstance(error, Exception | asyncio.CancelledError):
            return
        own = self.folder / f"failed-{self._rank}"
        # This rank or another one was the first, or the job has ended.
        with contextlib.suppress(OSError):
            with own.open("x") as file:
                file.write(json.dumps(words_of(error, self._rank)))
            os.link(own, self._failed)

    @property
    def _failed(self) -> Path:
        return self.folder / "failed"

    def _enters(self) -> bool:
        """Enter the newest attempt, unless this rank has been there, or it has failed."""
        self.folder = self._job / str(newest_attempt(self._job))
        if self.folder.name == "0" or self._failed.exists():
            return False
        try:
            (self.folder / f"entered-{self._rank}").touch(0o600, exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _check_failed(self) -> None:
        if self._failed.exists():
            raise error_of(json.loads(self._failed.read_text()), self._size)


def newest_attempt(job: Path) -> int:
    """The number of the newest attempt in the folder of a job; 0 if there is none."""
    return max((int(entry) for entry in os.listdir(job) if entry.isdecimal()), default=0)
