"""The progress of a command, on stderr: a bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_S = 30.0  # between two lines

Advance = Callable[[str], None]


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """The progress of `total` steps while the block runs. The function that it gives reports the end of a step.

    `what` is shown at first, and then what the function is called with. Ctrl-C prints how many steps have ended.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    shown = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # above the bar; a file gets its lines even so
        disable=not console.is_terminal,
    )
    with shown as bar:
        task, done, told_s = bar.add_task(what, total=total), 0, bar.get_time()

        def advance(now: str) -> None:
            nonlocal done, told_s
            done += 1
            bar.update(task, completed=done, description=now)
            if not console.is_terminal and done < total and bar.get_time() >= told_s + _LINE_S:
                told_s = bar.get_time()
                print(f"# {done} of {total}: {now}", file=sys.stderr, flush=True)

        try:
            yield advance
        except KeyboardInterrupt:
            print(f"interrupted: {done} of {total} done", file=sys.stderr)
            raise
