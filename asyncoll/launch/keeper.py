"""Runs a command whose processes and temporary files end with the process that has started it.

    starter (a command of asyncoll) ── pipe ── keeper ── command ── its processes

The keeper is a process between them. When its stdin ends, because the starter has left `kept` or is dead, it kills all
descendants, those in sessions of their own too, and removes the folder that is their TMPDIR.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, NamedTuple

from asyncoll.launch import process_tree
from asyncoll.launch.host import death_of


class Kept(NamedTuple):
    """A keeper. Its stdin, its stdout and its exit code are those of its command."""

    process: subprocess.Popen[str]
    stdin: IO[str]
    stdout: IO[str]

    def dismiss(self) -> None:
        """Let the command end, and do not wait for its end."""
        with suppress(BrokenPipeError):  # it has ended before it has read all
            self.stdin.close()


@contextmanager
def kept(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Kept]:
    """Run `command` within the block. When the block is left, however, all its processes have ended.

    They do not get the terminal's Ctrl-C: it interrupts the block. `environ` is the environment, by default this one.
    """
    words = [sys.executable, "-m", "asyncoll.launch.keeper", *command]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environ, text=True, process_group=0)
    assert process.stdin is not None
    assert process.stdout is not None
    keeper = Kept(process, process.stdin, process.stdout)
    try:
        yield keeper
    finally:
        keeper.dismiss()
        process.wait()
        keeper.stdout.close()


def main(command: Sequence[str]) -> int:
    """Run the command until it ends, or stdin does. Returns its exit code, or that of Ctrl-C."""
    process_tree.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        environ = os.environ | {"TMPDIR": folder}
        die_too = partial(process_tree.die_with_parent, os.getpid())
        process = subprocess.Popen(command, env=environ, preexec_fn=die_too)
        with death_of(process) as death:
            ends = select.poll()
            ends.register(death, select.POLLIN)
            ends.register(sys.stdin, 0)  # its end is always reported, and nothing else of it
            ends.poll()
        code = process.poll()
        process_tree.kill_descendants()
    return 130 if code is None else 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
