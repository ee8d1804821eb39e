"""A simulated network in virtual time: latency, jitter, bandwidth and faults, reproducible from one seed.

Each rank has one port in each direction, and a port transmits one message at a time at the given bandwidth. So messages
of many senders to one receiver queue there, as on a real link. If the network has hosts, the ports are those of a host:
its ranks share them, and messages between these use none. In addition a message takes the latency and a random part of
the jitter. Messages from one rank to another stay in order.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from asyncoll.errors import UsageError
from asyncoll.statistics import WORD_BYTES
from asyncoll.transport import Buffer, Loss, Receiver, check_frames
from asyncoll.transport.virtual_time import VirtualTimeLoop

_SILENCE_S = 0.5  # without a sign of life, after which a rank is taken for lost


@dataclass(frozen=True, slots=True)
class Pause:
    """Rank `rank` neither sends nor receives for `duration_s` seconds from `at_s` on. Its messages arrive later."""

    rank: int
    at_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """No message passes between `a` and `b` for `duration_s` seconds from `at_s` on; by default for ever.

    Messages that arrive in that time arrive at its end.
    """

    a: int
    b: int
    at_s: float
    duration_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Crash:
    """Rank `rank` dies at `at_s`: its coroutine stops and it receives nothing more.

    The messages that it has sent still arrive. Its peers notice the death after that, as with a real operating system.
    """

    rank: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Silence:
    """The next two ranks notice no sign of life of rank `rank` at `at_s`, and take it for lost. It lives."""

    rank: int
    at_s: float


Fault = Pause | Cut | Crash | Silence


@dataclass(frozen=True, slots=True)
class Network:
    """The links between simulated ranks.

    The jitter of a message is uniform between 0 and `jitter_s` seconds. The bandwidth is that of each rank, in each
    direction. With `hosts`, the name of each rank's host, it is that of each host; messages within a host then take no
    bandwidth, and `local_latency_s`. Each wait in simulated shared memory takes `memory_s`.

    With `ends_overtake`, the end of a rank is noticed at once, and the messages that it has sent still arrive after it:
    so a rank may notice the end of a real connection before it has read the last messages.

    Each byte of payload takes the time of `payload_scale` bytes, so that a short tensor can stand for one that a
    thousand ranks have no memory for. Headers are not scaled, and counts of words are of the short tensor.
    Raises UsageError for negative times, and for a bandwidth or a scale that is not positive.
    """

    latency_s: float = 10e-6
    jitter_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    payload_scale: float = 1.0
    hosts: Sequence[object] | None = None
    local_latency_s: float = 10e-6
    memory_s: float = 0.0
    faults: Sequence[Fault] = ()
    ends_overtake: bool = False

    def __post_init__(self) -> None:
        times_s = (self.latency_s, self.jitter_s, self.memory_s, self.local_latency_s)
        if min(times_s) < 0 or not self.bandwidth_bytes_per_s > 0 or not self.payload_scale > 0:
            raise UsageError("latencies, jitter and memory_s must be at least 0 s, bandwidth and payload_scale above 0")


class SimulatedWorld:
    """All transports of a simulated world, and the state of the links between them."""

    def __init__(self, size: int, network: Network, seed: int) -> None:
        for fault in network.faults:
            ranks = (fault.a, fault.b) if isinstance(fault, Cut) else (fault.rank,)
            if any(not 0 <= rank < size for rank in ranks):
                raise UsageError(f"{fault} names a rank outside a world of {size}")
        self.size = size
        self.network = network
        self.trace: list[tuple[float, int, int, int]] = []  # (virtual seconds of arrival, source, dest, payload bytes)
        # Called with source, dest, frames, payload bytes, and the virtual seconds of departure and arrival.
        self.on_departure: Callable[[int, int, list[bytes], int, float, float], None] | None = None
        self.transports = [SimulatedTransport(rank, self) for rank in range(size)]
        self._jitter = uniform(seed)
        names = list(range(size) if network.hosts is None else network.hosts)
        if len(names) != size:
            raise UsageError(f"a network has the hosts of all {size} ranks, or none: got {len(names)}")
        self._port = [names.index(name) for name in names]  # of each rank: the first rank of its host
        self._egress_free_s = [0.0] * size  # by port
        self._ingress_free_s = [0.0] * size
        self._last_arrival_s: dict[tuple[int, int], float] = {}
        self._last_of_source_s = [0.0] * size

    @property
    def words(self) -> int:
        """The words of payload that have arrived, with the payload of each message rounded up."""
        return sum(-(-payload // WORD_BYTES) for *_, payload in self.trace)

    def arrival_s(self, source: int, dest: int, length: float, now: float) -> float:
        """Return when a message that occupies a port like `length` bytes, sent `now`, arrives; infinity if never."""
        network, out, into = self.network, self._port[source], self._port[dest]
        occupied, latency_s = length / network.bandwidth_bytes_per_s, network.latency_s
        if network.hosts is not None and out == into:
            occupied, latency_s = 0.0, network.local_latency_s
        leaves = now + occupied
        if occupied:
            leaves = self._egress_free_s[out] = max(now, self._egress_free_s[out]) + occupied
        arrives = leaves + latency_s
        if network.jitter_s:
            arrives += network.jitter_s * next(self._jitter)
        if occupied:
            arrives = max(arrives, self._ingress_free_s[into] + occupied)
        if network.faults:
            arrives = self._delayed_by_faults(source, dest, now, arrives)
        last = self._last_arrival_s.get((source, dest), -1.0)
        if arrives <= last:
            arrives = math.nextafter(last, math.inf)  # keeps the order of the messages between two ranks
        self._last_arrival_s[source, dest] = arrives
        if arrives < math.inf:
            if occupied:
                self._ingress_free_s[into] = arrives
            if arrives > self._last_of_source_s[source]:
                self._last_of_source_s[source] = arrives
        return arrives

    def backlog_s(self, source: int, now: float) -> float:
        """The seconds for which the sending port of `source` will still be busy."""
        return self._egress_free_s[self._port[source]] - now

    def announce_loss(self, source: int, cause: str) -> None:
        """Report the loss of `source` to every rank, after all messages of `source` have arrived or before."""
        loop = _loop()
        heard = loop.time()
        if not self.network.ends_overtake:
            heard = max(heard + self.network.latency_s, math.nextafter(self._last_of_source_s[source], math.inf))
        loop.happen_at(heard, self._lose, source, cause)

    def _lose(self, source: int, cause: str) -> None:
        for transport in self.transports:
            transport.lose(Loss(source, cause))

    def suspect(self, rank: int) -> None:
        """The next two ranks of the ring take `rank` for lost."""
        for after in (1, 2):
            self.transports[(rank + after) % self.size].lose(Loss(rank, "it gives no sign of life", _SILENCE_S))

    def _delayed_by_faults(self, source: int, dest: int, sent: float, arrives: float) -> float:
        for fault in self.network.faults:
            end = fault.at_s + getattr(fault, "duration_s", math.inf)
            if isinstance(fault, Pause):
                if fault.rank == source and fault.at_s <= sent < end:
                    arrives += end - sent
                elif fault.rank == dest and fault.at_s <= arrives < end:
                    arrives = end
            elif isinstance(fault, Cut) and {fault.a, fault.b} == {source, dest} and fault.at_s <= arrives < end:
                arrives = end
        return arrives


class SimulatedTransport:
    """A `Transport` over a `SimulatedWorld`."""

    def __init__(self, rank: int, world: SimulatedWorld) -> None:
        self.rank = rank
        self.size = world.size
        self._world = world
        self._receiver: Receiver | None = None
        self._early: list[Callable[[Receiver], None]] = []
        self._closed = False
        self._members: Collection[int] = range(world.size)
        self._lost: set[int] = set()
        self._on_crash: Callable[[], object] | None = None
        self.has_crashed = False

    async def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop = _loop()
        for event in self._early:
            event(receiver)
        self._early.clear()

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        check_frames(dest, self.size, frames)
        if self._closed or dest not in self._members or dest in self._lost:
            return
        loop = self._loop
        copies = list(map(bytes, frames))
        payload = len(copies[1]) if len(copies) > 1 else 0
        length = sum(map(len, copies)) + payload * (self._world.network.payload_scale - 1)
        arrives = self._world.arrival_s(self.rank, dest, length, loop.time())
        if self._world.on_departure is not None:
            self._world.on_departure(self.rank, dest, copies, payload, loop.time(), arrives)
        if arrives < math.inf:
            loop.happen_at(arrives, self._world.transports[dest]._arrive, arrives, self.rank, copies, payload)

    def send_directly(self, dest: int, frames: Sequence[Buffer]) -> bool:
        # Virtual time has no threads.
        del dest, frames
        return False

    async def drain(self, dest: int) -> None:
        """Wait until the sending port of this rank is free."""
        loop = asyncio.get_running_loop()
        backlog_s = self._world.backlog_s(self.rank, loop.time())
        if backlog_s > 0:
            await asyncio.sleep(backlog_s)

    def enter(self, receiver: Receiver, members: Collection[int], to_kill: Collection[int] = ()) -> None:
        del to_kill  # there are no processes
        self._receiver, self._members = receiver, frozenset(members)

    async def close(self, *, flush: bool = False) -> None:
        self._end("it closed its transport")

    def peer(self, rank: int) -> SimulatedTransport:
        """The transport of another rank."""
        return self._world.transports[rank]

    def on_crash(self, callback: Callable[[], object]) -> None:
        """Call `callback`, which stops the rank's program, at a crash."""
        self._on_crash = callback

    def crash(self) -> None:
        """Stop the rank at once. The peers notice it as they would notice the end of a process."""
        self.has_crashed = True
        self._end("it crashed")
        if self._on_crash is not None:
            self._on_crash()

    def _end(self, cause: str) -> None:
        if not self._closed:
            self._closed = True
            self._world.announce_loss(self.rank, cause)

    def lose(self, loss: Loss) -> None:
        """Handle a loss. The world calls this."""
        if self._closed or loss.rank not in self._members or loss.rank == self.rank or loss.rank in self._lost:
            return
        if self._receiver is not None:
            self._receiver.lost(loss)
        else:
            self._early.append(lambda receiver: receiver.lost(loss))
        self._lost.add(loss.rank)

    def _arrive(self, when: float, source: int, frames: list[bytes], payload: int) -> None:
        if self._closed or source in self._lost:
            return
        self._world.trace.append((when, source, self.rank, payload))
        if self._receiver is not None:
            self._receiver.received(source, frames)
        else:
            self._early.append(lambda receiver: receiver.received(source, frames))


def _loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop), "a simulated network needs virtual time"
    return loop


def uniform(seed: int | Sequence[int]) -> Iterator[float]:
    """An endless stream of floats in [0, 1), drawn in batches because one at a time is slow."""
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.random(4096).tolist()
