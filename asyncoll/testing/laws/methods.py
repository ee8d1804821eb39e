"""Kinds of worlds with a sparse algorithm, or a policy, by name: `sparse:topka`, `training:file.py:name`."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from asyncoll.algorithms.rounds.policies import policy_of
from asyncoll.algorithms.sparse.sparse_operations import sparse_algorithms
from asyncoll.errors import UsageError, describe


def split(text: str) -> tuple[str, str]:
    """The kind in `text`, and the rest of it, which names a method; empty without one.

    Runs the file of the method, once in a process. Raises UsageError if there is no such file, or it registers no such
    method.
    """
    kind, colon, method = text.partition(":")
    if not colon:
        return kind, ""
    file, _, name = method.rpartition(":")
    if file:
        _run(file)
    if kind in ("policy", "training"):
        policy_of(name)
    elif kind != "sparse":
        raise UsageError(f"--kind: {text!r:.80}: only the kinds sparse, policy and training take a name after a colon")
    elif name not in sparse_algorithms():
        raise UsageError(f"--kind: {name!r:.50} is no sparse algorithm: use one of {', '.join(sparse_algorithms())}")
    return kind, method


@cache
def _run(file: str) -> None:
    if not Path(file).is_file():
        raise UsageError(f"--kind: there is no file {file!r}: use KIND:FILE:NAME, such as policy:floor.py:floor")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--kind: {file!r} is no Python file")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        raise UsageError(f"--kind: {file!r} raised {describe(error)}: run it with python to see where") from error
