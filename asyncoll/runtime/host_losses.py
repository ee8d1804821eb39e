"""Losses of ranks of other hosts: held back until it is clear whether the whole host is gone.

A host that vanishes takes all of its ranks, and another host notices these losses one after the other: connections
close within milliseconds of each other, and silences are noticed up to one heartbeat apart. So the first loss is held
back until all ranks of that host are lost. It is also sent to two other ranks of the host, and to the next ones if
these are lost, too. One that lives reports it, as if it had noticed the loss itself, which takes as long as one message
there and one back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncoll.runtime.membership import Membership
from asyncoll.transport import Loss

# How long a loss is held back if the other ranks of its host are neither lost nor answer. After a death: the kernel may
# take that long to end the other processes of a busy host. After a silence: two heartbeats, which are half of the time
# without one after which a rank counts as lost (`Loss.last_seen_s`).
_DEATHS_S = 0.5
_OF_SILENCE = 0.5
# So many ranks of the host are asked at once: of all that ask, each would otherwise ask each.
_ASKED = 2
# The time is divided, because a loop that was held up runs its timers before it hears of the other losses.
_LOOKS = 4


class HostLosses:
    """The losses that this rank has noticed and not reported yet.

    In: `noticed`, for each loss; `settle`, to end all waiting. Out: `ask`, which sends a loss to a rank that may be
    alive; `report`, with a loss and all ranks that are lost with it. All of it runs on the runtime's loop.
    """

    def __init__(
        self,
        host_of: Sequence[object],
        rank: int,
        membership: Membership,
        ask: Callable[[int, Loss], None],
        report: Callable[[Loss, Sequence[int]], None],
    ) -> None:
        """`host_of` has the host of each rank; `rank` is this one."""
        self._host_of = host_of
        self._own = host_of[rank]
        self._membership = membership
        self._ask = ask
        self._report = report
        self._held: dict[object, dict[int, Loss]] = {}  # by host, and by rank in the order in which they were noticed
        self._asked: set[int] = set()

    def noticed(self, loss: Loss) -> None:
        """Report a loss, now or later."""
        host = self._host_of[loss.rank]
        held = self._held.setdefault(host, {})
        held[loss.rank] = loss
        others = self._others(host)
        if host == self._own or not others:
            self._settle(host)
            return
        for rank in others[:_ASKED]:
            if rank not in self._asked:
                self._asked.add(rank)
                self._ask(rank, loss)
        if len(held) == 1:
            wait_s = _OF_SILENCE * loss.last_seen_s or _DEATHS_S
            self._look_later(host, wait_s / _LOOKS, _LOOKS)

    def settle(self) -> None:
        """Report all losses that are held back."""
        for host in list(self._held):
            self._settle(host)

    def clear(self) -> None:
        """Forget them: the world has failed."""
        self._held.clear()

    def _others(self, host: object) -> list[int]:
        """The ranks of `host` that may be alive."""
        gone = self._held[host].keys() | self._membership.lost | self._membership.ended
        return [rank for rank in self._membership.members if self._host_of[rank] == host and rank not in gone]

    def _look_later(self, host: object, pause_s: float, looks: int) -> None:
        if not looks:
            self._settle(host)
        elif host in self._held:
            asyncio.get_running_loop().call_later(pause_s, self._look_later, host, pause_s, looks - 1)

    def _settle(self, host: object) -> None:
        """Report the losses of `host`, together if no rank of it may be alive."""
        held = self._held.get(host)
        if not held:
            return
        is_gone = host != self._own and not self._others(host)
        del self._held[host]
        first = held[min(held)] if is_gone else next(iter(held.values()))
        self._report(first, sorted(held) if is_gone else [first.rank])
