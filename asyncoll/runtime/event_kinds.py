"""What can happen to a call or a round at a rank. The compiled core has these numbers from here (hatch_build.py)."""

from __future__ import annotations

from enum import IntEnum


class What(IntEnum):
    """What has happened at a rank."""

    BEGIN = 0  # its program has made the call
    ARRIVE = 1  # the call takes part, with its tensors: from now on other ranks may use its contribution
    OPEN = 2  # it has opened a round
    REDUCE = 3  # it has a result of the contributions of `Event.ranks`
    END = 4  # the call is over
    CANCEL = 5  # the call is over without a result: it was cancelled
    FAIL = 6  # the same: it has failed
