"""Ranks of a host greet the first one, among connections that say nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncoll.errors import DeadlineError
from asyncoll.transport.joining import Joining
from asyncoll.transport.memory import fd_passing

RANKS = (10, 11, 12)
PATIENCE_S = 25.0


class UntilAlone(Joining):
    """Its time is over when nothing but rank 11 is missing, and after PATIENCE_S."""

    def check(self, missing, reason, *, is_told=False):
        if list(missing()) == [11]:
            self._limit_s = 0.0
        super().check(missing, reason, is_told=is_told)


@contextlib.contextmanager
def silent(folder):
    """Connections to the first rank, before those of other ranks. They send nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            while connection.connect_ex(str(folder / "arena")):
                os.sched_yield()
        yield


@pytest.fixture
def join(tmp_path):
    """Lets ranks join: the first one, then silent connections, then others."""

    def begin(*others, kind=Joining):
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(fd_passing.join, tmp_path, 10, RANKS, kind(10, 3, PATIENCE_S))
            with silent(tmp_path):
                later = [pool.submit(fd_passing.join, tmp_path, rank, RANKS, Joining(rank, 3)) for rank in others]
                return [(each.exception(), each) for each in (first, *later)]

    return begin


def test_a_silent_connection_keeps_no_rank_waiting(join):
    arenas = [each.result() for _, each in join(11, 12)]
    assert [arena.ranks for arena in arenas] == [RANKS] * 3
    for arena in arenas:
        arena.close()


def test_only_the_silent_rank_is_named(join):
    for error, _ in join(12, kind=UntilAlone):
        assert isinstance(error, DeadlineError)
        assert error.missing == (11,)
