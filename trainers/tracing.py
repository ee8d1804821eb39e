"""A trace of a few steps of each rank: what its threads and its GPU do, on one clock.

`torch.profiler` records it. The ranges "forward", "backward" and "step" are those of the program. On a GPU there are
the kernels of `backward()` on the stream of the program, and the copies and reductions of calls on other streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import profile, schedule

import asyncoll

STEPS_BEFORE, STEPS = 3, 4  # the profiler itself is slow at first, so it runs a step before it records


class Tracing:
    """Counts the steps of a run, and records some of them."""

    def __init__(self, profiler: Any) -> None:
        """`profiler` is None if no step is recorded."""
        self._profiler = profiler

    def end_step(self) -> None:
        """A step has ended."""
        if self._profiler is not None:
            self._profiler.step()


@contextmanager
def tracing(comm: asyncoll.Communicator, folder: Path | None) -> Iterator[Tracing]:
    """Record steps inside of the block. This rank's file in `folder` has them; None: record nothing.

    The files are in the format of Chrome's traces, which Perfetto shows.
    """
    if folder is None:
        yield Tracing(None)
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{comm.rank}.json"
    chosen = schedule(skip_first=STEPS_BEFORE - 1, wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(schedule=chosen, on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path))) as profiler:
        yield Tracing(profiler)


def check_rounds(rounds: int) -> None:
    """Raise UsageError if a run of `rounds` is too short for a trace."""
    if rounds < STEPS_BEFORE + STEPS:
        raise asyncoll.UsageError(
            f"--trace records steps {STEPS_BEFORE + 1} to {STEPS_BEFORE + STEPS}, and --rounds is {rounds}: use more"
        )
