"""What a death has left of rounds in memory: for checks that it loses no contribution, and doubles none."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np

from asyncoll.algorithms.rounds.host_rounds import HostRounds
from asyncoll.algorithms.rounds.one_sided import OneSidedRounds
from asyncoll.communicator import Communicator
from asyncoll.errors import AsyncollError
from asyncoll.tensors.reductions import Array


class Left(NamedTuple):
    """What is left of an operation, as one rank sees it. Its contributions are numbered from 1: these are tickets."""

    latest: int  # the newest published round
    results: dict[int, Array]  # of the published rounds that are kept, by number
    taken: dict[int, int]  # by the same numbers, and 0: how many contributions that round and those before it have
    ticket: int  # of the newest contribution of this rank
    published: int  # of its newest contribution that is in a published round
    staged: Array  # the sum of those that are in none


def left_records(comm: Communicator) -> list[Left]:
    """What is left of each operation of `comm` that is in memory: not of groups, and not between hosts.

    A contribution must be one array. To be called after a rank has died.
    """
    left = []
    for rounds in comm._core.backend.operations:
        if not isinstance(rounds, OneSidedRounds) or isinstance(rounds, HostRounds) or rounds.operation.group_size:
            continue
        with contextlib.ExitStack() as locked:
            with contextlib.suppress(AsyncollError):  # its owner has died: no rank changes the record any more
                locked.enter_context(rounds._control_block)
            left.append(left_of(rounds))
    return left


def left_of(rounds: OneSidedRounds) -> Left:
    """What is left of `rounds`. No rank may change the record meanwhile."""
    record = rounds._rounds
    ((dtype, count),) = rounds.operation.layout

    def array_at(address: int) -> Array:
        return rounds.arena.view(address, rounds._layout.lengths[0]).view(dtype).copy()

    results, taken = {}, {0: 0}
    for kept in record.kept(1, record.latest):
        results[kept.number] = array_at(record.blocks.address(kept.block)) if kept.block else np.zeros(count, dtype)
        taken[kept.number] = sum(record.taken_of_ranks(kept.number))
    staged = sum(map(array_at, record.unpublished()), np.zeros(count, dtype))
    return Left(record.latest, results, taken, record.staged().ticket, record.published, staged)
