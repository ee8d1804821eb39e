"""The ranks of a training in each epoch, and what each has made until then."""

from __future__ import annotations

from typing import NamedTuple

import asyncoll


class RankPart(NamedTuple):
    """What a rank tells the others in a new epoch, before they train on."""

    steps: int = 0  # calls of `step` so far, the one under way included
    untaken: int = 0  # of these, those whose gradient is in no round yet
    repeats: bool = False  # whether the first contribution to the rounds of the epoch is that of no further step
    has_ended: bool = False  # it has made its last step
    is_over: bool = False  # and all that it has contributed is in the model


class TrainingEpoch(NamedTuple):
    """The ranks that train together in an epoch, by member number, which they have in all epochs."""

    epoch: int
    members: tuple[int, ...]  # in order of their ranks
    steps: dict[int, int]  # by member of this epoch, or the one before: its steps in the model, or to be in it
    parts: dict[int, RankPart]  # of the members

    @classmethod
    def first(cls, comm: asyncoll.Communicator) -> TrainingEpoch:
        """That of the ranks of `comm`, before the first step."""
        members = members_of(comm)
        return cls(comm.epoch, members, dict.fromkeys(members, 0), dict.fromkeys(members, RankPart()))


def members_of(comm: asyncoll.Communicator) -> tuple[int, ...]:
    """The member numbers of the ranks of `comm`, in order."""
    member = comm._core.member
    return tuple(member.endpoint.membership.numbers[rank] for rank in member.group.ranks)
