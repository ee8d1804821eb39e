"""Text that every machine has: the paragraphs of the Python standard library's sources, as sequences of tokens.

A paragraph is a part of a file between empty lines; its length varies by a factor of 30. Files are read in the order of
their paths, and a twentieth of the paragraphs, by a checksum of the text, is held out: equal ones are on the same side.
So the data are the same on all machines with the same release of Python.

Tokens 0-255 are bytes. A vocabulary above `MARKS` has the most frequent words of the training files in addition; other
words are spelled in bytes.
"""

from __future__ import annotations

import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import asyncoll
from trainers.workloads.base import Rows

MASK, BEGIN, PAD, MARKS = 256, 257, 258, 259  # marks, and the number of tokens that are bytes or marks

_SUFFIXES = (".py", ".txt", ".md")
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}  # packages and test data
_SHORTEST = 16  # bytes of a paragraph; a shorter one teaches nothing
_BETWEEN_PARAGRAPHS = re.compile(rb"\n(?:[ \t\r]*\n)+")
_WORD = re.compile(rb"\w+| +|[^\w ]")


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of tokens: number i is `tokens[starts[i] : starts[i] + lengths[i]]`."""

    tokens: NDArray[np.uint16]
    starts: Rows
    lengths: Rows

    def padded(self, rows: Rows) -> Tensor:
        """The sequences of the given numbers, int64, (number, longest of them); `PAD` behind their ends."""
        batch = np.full((len(rows), self.lengths[rows].max()), PAD, np.int64)
        for place, row in enumerate(rows):
            start, length = self.starts[row], self.lengths[row]
            batch[place, :length] = self.tokens[start : start + length]
        return torch.from_numpy(batch)


@cache  # shared by ranks of one process
def sequences(data: Path | None, vocabulary: int, longest: int) -> tuple[Sequences, Sequences]:
    """Training and held-out sequences of at most `longest` tokens; longer paragraphs are cut into several.

    The text is that of the files below `data`, by default of the standard library. Raises UsageError if there is none.
    """
    train, held_out = _paragraphs(data)
    words = _words(train, vocabulary - MARKS)
    return _cut(train, words, longest), _cut(held_out, words, longest)


@cache
def _paragraphs(data: Path | None) -> tuple[list[bytes], list[bytes]]:
    root = data or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = [], []
    for name in _files(root):
        for text in _BETWEEN_PARAGRAPHS.split((root / name).read_bytes()):
            if len(text) >= _SHORTEST:
                parts[zlib.crc32(text) % 20 == 0].append(text)
    if not all(parts):
        raise asyncoll.UsageError(_advice(root, data))
    return parts


def _advice(root: Path, data: Path | None) -> str:
    wanted = f"files of text ({', '.join(_SUFFIXES)}) with some hundred paragraphs"
    if data is None:
        return f"the sources of the Python standard library are not in {root}: give a folder with {wanted} as --data"
    return f"{root} does not have enough text: put {wanted} there, or leave out --data to read Python's own sources"


def _files(root: Path) -> list[str]:
    """The paths of all texts below `root`, relative to it and sorted."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED]
        found += [Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(_SUFFIXES)]
    return sorted(found)


def _words(paragraphs: Iterable[bytes], count: int) -> dict[bytes, int]:
    """The token of each of the `count` most frequent words of several bytes."""
    if count == 0:
        return {}
    counts = Counter(word for text in paragraphs for word in _WORD.findall(text) if len(word) > 1)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:count]
    return {word: MARKS + place for place, word in enumerate(ranked)}


def _cut(paragraphs: list[bytes], words: dict[bytes, int], longest: int) -> Sequences:
    coded = [_encode(text, words) for text in paragraphs]
    starts, lengths, start = [], [], 0
    for tokens in coded:
        pieces = range(0, len(tokens), longest)
        starts += [start + piece for piece in pieces]
        lengths += [min(longest, len(tokens) - piece) for piece in pieces]
        start += len(tokens)
    kept = np.array(lengths) > 1
    return Sequences(np.concatenate(coded), np.array(starts)[kept], np.array(lengths)[kept])


def _encode(text: bytes, words: dict[bytes, int]) -> NDArray[np.uint16]:
    if not words:
        return np.frombuffer(text, np.uint8).astype(np.uint16)
    tokens: Iterable[Iterable[int]] = ([words[word]] if word in words else word for word in _WORD.findall(text))
    return np.fromiter(chain.from_iterable(tokens), np.uint16)
