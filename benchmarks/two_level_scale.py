"""Up to 64 simulated hosts of 16 ranks each: collectives on two levels against closed forms, beside one level.

    python benchmarks/two_level_scale.py [--layouts 2x4,...,64x16] [--sizes 1K,256K]

The product's own protocol code in virtual time. Hosts have one link each, which all of their ranks share. A message
between hosts takes alpha and its bytes over the bandwidth; one within a host takes 10 us. Computation and memory are
free. All ranks call at once; in `solo, alone` only rank 0 does. A time is that of the last caller's result, the longest
of the rounds after the first, in which ranks announce the operation. `waits` are the waits in shared memory that follow
each other in a call: each costs what a meeting costs on the machine. `one level` is the same call by message alone, on
the same links.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from closed_forms import Model
from common import Record, parser

from asyncoll import Communicator
from asyncoll.algorithms.dense import by_size, two_level
from asyncoll.algorithms.rounds import agent_signals, attempt
from asyncoll.algorithms.rounds.tally import PARTICIPATION_BYTES
from asyncoll.bench.plan import ITEM_BYTES, parse_sizes
from asyncoll.testing import simulate
from asyncoll.transport.messages.simulated import Network
from asyncoll.transport.wire import HEADER_BYTES

Row = dict[str, Any]
LAYOUTS = "2x4,4x4,8x8,16x8,32x16,64x16"
CALLS = ("allreduce", "solo", "majority", "solo, alone")
ROUNDS = 6
MEMORY = 1 << 28  # the most bytes of all ranks' arrays together; larger worlds are left out
LINKS = Network(latency_s=30e-6, bandwidth_bytes_per_s=1.25e9)  # 10 Gbit/s Ethernet
PAUSE_S = 10.0  # longer than any call


@dataclass(frozen=True, slots=True)
class TwoLevels:
    """Closed forms of calls of `hosts` hosts with `each` ranks on each, in seconds. All ranks call at once."""

    hosts: int
    each: int
    links: Network

    @property
    def ranks(self) -> int:
        return self.hosts * self.each

    def time(self, call: str, size: int) -> float:
        if call == "allreduce":
            return self.allreduce(size)
        # The first arrival that counts is that of a rank of the host that leads the round, unless one rank comes alone.
        if call == "solo, alone":
            return self._between(0) + self.rest_of_round(size, answered=1)  # host 0 is the first that is answered
        return self.links.local_latency_s + self.rest_of_round(size, answered=self.hosts - 1)

    def allreduce(self, size: int) -> float:
        """The leaders of a host exchange their shares at the same time, so each has a part of the link.

        Windows follow each other between the hosts; what is done in memory meanwhile takes no time here.
        """
        window = two_level._WINDOW_BYTES
        windows = [window] * (size // window) + [size % window] * (size % window > 0)
        return sum(self._exchange(each) for each in windows)

    def _exchange(self, size: int) -> float:
        """While the shares of some leaders are on the link, the others take their next step, after alpha."""
        leaders = min(self.each, max(1, size // two_level._SHARE_BYTES))
        *before, last = self._steps(size) or [0.0]
        if not last:
            return self._among_hosts(leaders).allreduce(size // leaders)
        occupied = [self._occupied(step / leaders) for step in before]
        steps_s = sum(max(leaders * each, each + self.links.latency_s) for each in occupied)
        return steps_s + leaders * self._occupied(last / leaders) + self.links.latency_s

    def _steps(self, size: int) -> list[float]:
        """The bytes that a host sends in each step of an exchange, if the steps are those of a power of two."""
        phases = self.hosts.bit_length() - 1
        if self.hosts != 1 << phases or not by_size.TREE_MAX_BYTES < size <= by_size.RABENSEIFNER_MAX_BYTES:
            return []
        if size <= by_size.DOUBLING_MAX_BYTES:
            return [size] * phases
        halves = [size / 2**phase for phase in range(1, phases + 1)]
        return halves + halves[::-1]

    def _among_hosts(self, sharing: int = 1) -> Model:
        return Model(self.hosts, self.links.latency_s, self.links.bandwidth_bytes_per_s / sharing)

    def rest_of_round(self, size: int, answered: int) -> float:
        """From the arrival that opens a round to its result.

        The opener tells two agents of each host. These claim, and the opener answers. Short contributions come with the
        claims, and pass the opener's link one after another, there and back; callers are on the first `answered` hosts.
        The others are reduced between the hosts.
        """
        others = self.hosts - 1
        riding = 2 * PARTICIPATION_BYTES * self.ranks  # between hosts it is a list of float64
        if self.is_short(size):
            return self._between(0) + 2 * self.links.latency_s + (others + answered) * self._occupied(size + riding)
        told = self._between(0) + (agent_signals.AGENTS * others - 2) * self._occupied(
            0
        )  # the first agent of the last host
        team = self.links.latency_s + others * self._occupied(4 * self.hosts)
        links = replace(self._among_hosts(), riding=riding)
        # A tree has reduced everything at its root, host 0, before the result goes back to the others.
        is_at_root = answered == 1 and links.algorithm(size) == "tree"
        return told + self._between(0) + team + links.allreduce(size) / (2 if is_at_root else 1)

    def is_short(self, size: int) -> bool:
        together = self.hosts * (size + PARTICIPATION_BYTES * self.ranks)
        return size <= attempt.OPENER_MAX and together <= attempt.ALL_AT_OPENER_MAX

    def _between(self, size: float) -> float:
        return self.links.latency_s + self._occupied(size)

    def _occupied(self, size: float) -> float:
        return (size + HEADER_BYTES) / self.links.bandwidth_bytes_per_s


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layouts", type=parse_layouts, default=parse_layouts(LAYOUTS), help="hosts x ranks on each")
    options.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K,256K"))
    record = Record(options, "two_level_scale")
    chosen = record.arguments
    rows: list[Row] = []
    for size in chosen.sizes:
        worlds = [(hosts, each) for hosts, each in chosen.layouts if hosts * each * size <= MEMORY]
        found = [row(call, hosts, each, size) for call in CALLS for hosts, each in worlds]
        speed = f"alpha {1e6 * LINKS.latency_s:g} us, {LINKS.bandwidth_bytes_per_s / 1e9:g} GB/s a host"
        record.table(f"SIMULATED: {speed}; {size} bytes", table(found))
        rows += found
    record.write(rows)


def parse_layouts(text: str) -> list[tuple[int, int]]:
    """`2x4,64x16` as (hosts, ranks on each)."""
    return [(int(hosts), int(each)) for hosts, _, each in (part.partition("x") for part in text.split(","))]


def row(call: str, hosts: int, each: int, size: int) -> Row:
    names = [rank // each for rank in range(hosts * each)]
    links = replace(LINKS, hosts=names)
    return {
        "call": call,
        "hosts": hosts,
        "each": each,
        "size": size,
        "s": run(call, size, links, two_levels=True),
        "formula_s": TwoLevels(hosts, each, LINKS).time(call, size),
        "one_level_s": run(call, size, links, two_levels=False),
        "waits": round(run(call, size, Network(0.0, hosts=names, local_latency_s=0.0, memory_s=1.0), two_levels=True)),
    }


def run(call: str, size: int, network: Network, *, two_levels: bool) -> float:
    """The longest time of a call, in virtual time."""
    names = network.hosts
    assert names is not None, "the links are those of hosts"

    async def rank(comm: Communicator) -> list[float]:
        loop, x, took_s = asyncio.get_running_loop(), np.zeros(size // ITEM_BYTES, np.float32), []
        for turn in range(ROUNDS):
            begin_s = 1.0 + PAUSE_S * turn
            await asyncio.sleep(begin_s - loop.time())
            if call == "solo, alone" and comm.rank:
                continue
            x.fill(1)
            took_s.append(await timed(comm, call, x, loop))
        await asyncio.sleep(PAUSE_S)  # a rank that leaves would tell the others
        return took_s

    memory, hosts = (True, names) if two_levels else (False, None)
    found = simulate(len(names), rank, network, shared_memory=memory, hosts=hosts).results
    return max(max(took_s[1:]) for took_s in found if took_s)


async def timed(comm: Communicator, call: str, x: Any, loop: asyncio.AbstractEventLoop) -> float:
    """The time of a call. Its result is checked."""
    began_s = loop.time()
    if call == "allreduce":
        await comm.allreduce(x)
        assert (x == comm.size).all()
    elif call == "majority":
        await comm.majority_allreduce(x)
    else:
        await comm.solo_allreduce(x)
    took_s = loop.time() - began_s
    assert (x == x[0]).all(), "a sum of ones, also of earlier rounds"
    return took_s


def table(rows: list[Row]) -> list[list[str]]:
    lines = [["call", "hosts x ranks", "two levels (us)", "formula", "off", "waits", "one level (us)", "one / two"]]
    for row in rows:
        off = 100 * (row["s"] / row["formula_s"] - 1)
        times = [f"{1e6 * row['s']:.1f}", f"{1e6 * row['formula_s']:.1f}", f"{off:+.1f} %", str(row["waits"])]
        one = [f"{1e6 * row['one_level_s']:.1f}", f"{row['one_level_s'] / row['s']:.2f}"]
        lines.append([row["call"], f"{row['hosts']} x {row['each']}", *times, *one])
    return lines


if __name__ == "__main__":
    main()
