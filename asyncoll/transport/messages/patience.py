"""How long a peer of another host may give no sign of life."""

from __future__ import annotations

_FACTOR = 4  # how much longer than the longest late answer a silence may take
_MEMORY_S = 30.0  # for so long a late answer counts


class Patience:
    """The time limit for silences, as this rank sees all of its peers.

    A process that waits for a processor answers late, and a process that cannot run never does. Nothing tells the two
    apart from another host. But where processes wait for long, they have waited before: an answer that has taken half
    of the limit or more shows that a host, perhaps this one, is overloaded. For a while the limit is then several times
    as long as the longest of these silences. One limit serves all peers, because a late answer does not show what was
    late: the peer, this process, or the network between them.
    """

    def __init__(self, freeze_s: float) -> None:
        """`freeze_s` is the limit while all peers answer in time."""
        self.freeze_s = freeze_s
        self._late: list[tuple[float, float]] = []  # when peers have answered, and after which silence: ever shorter

    @property
    def late_s(self) -> float:
        """An answer that takes so long is late."""
        return self.freeze_s / 2

    def answered(self, silence_s: float, now_s: float) -> None:
        """Note the answer of a peer that has given no sign of life for `silence_s`."""
        if silence_s >= self.late_s:
            self._late = [(at_s, its_s) for at_s, its_s in self._late if its_s > silence_s] + [(now_s, silence_s)]

    def limit_s(self, now_s: float) -> float:
        """How long a silence may take now."""
        self._late = [(at_s, its_s) for at_s, its_s in self._late if now_s - at_s < _MEMORY_S]
        return max([self.freeze_s, *(_FACTOR * its_s for _, its_s in self._late[:1])])
