"""Processes that check one thing after another for a command. Questions and answers are lines of JSON."""

from __future__ import annotations

import json
import os
import selectors
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from asyncoll.errors import UsageError
from asyncoll.launch.keeper import Kept, kept


def answers(module: str, questions: Iterable[Any], jobs: int, environ: Mapping[str, str]) -> Generator[Any, None, None]:
    """The answers to all questions by up to `jobs` processes, each of which runs `module`, as they come.

    All processes have ended when the iterator has, also by Ctrl-C. Raises the UsageError of a process, and SystemExit
    if a process has ended.
    """
    waiting = iter(questions)
    with ExitStack() as opened, selectors.DefaultSelector() as busy:

        def ask(process: Kept) -> None:
            for question in waiting:
                with suppress(BrokenPipeError):  # its end is the answer
                    print(json.dumps(question), file=process.stdin, flush=True)
                busy.register(process.stdout, selectors.EVENT_READ, process)
                return

        processes = [opened.enter_context(kept([sys.executable, "-m", module], environ)) for _ in range(jobs)]
        for process in processes:
            opened.callback(process.dismiss)  # all of them before the first is waited for
            ask(process)
        while busy.get_map():
            for key, _ in busy.select():
                busy.unregister(key.fileobj)
                yield _answer(key.data)
                ask(key.data)


def _answer(process: Kept) -> Any:
    if not (line := process.stdout.readline()):
        code = process.process.wait()
        raise SystemExit(f"Error: a process that checks has ended with exit code {code}; see above")
    answer = json.loads(line)
    if "refusal" in answer:
        raise UsageError(answer["refusal"])
    return answer["is"]


def serve(work: Callable[[Any], Any]) -> None:
    """Answer each line of stdin by `work`. What it prints goes to stderr."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(stdout, "w") as told:
        for line in sys.stdin:
            try:
                answer = {"is": work(json.loads(line))}
            except UsageError as error:
                answer = {"refusal": str(error)}
            print(json.dumps(answer), file=told, flush=True)
