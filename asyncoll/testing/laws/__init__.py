"""The laws of wait-avoiding collectives, and worlds drawn from seeds that put them to the test."""

from __future__ import annotations

from dataclasses import dataclass

from asyncoll.testing.laws.rules import Breach, laws_of
from asyncoll.testing.laws.runs import SIMULATED, tell
from asyncoll.testing.laws.story import draw


class LawBroken(AssertionError):  # noqa: N818
    """A world in which a law does not hold. `replay` is the command that shows it again."""

    def __init__(self, law: str, statement: str, what: str, replay: str, where: Breach | None = None) -> None:
        place = f"round {where.round}, rank {where.rank}: " if where else ""
        super().__init__(f"{law} is broken: {statement}\n  {place}{what}\n  replay: {replay}")
        self.law = law
        self.replay = replay
        self.round = where.round if where else None
        self.rank = where.rank if where else None


@dataclass(frozen=True, slots=True)
class Lawful:
    """How much a world did that kept all laws."""

    rounds: int
    messages: int  # 0 on a real transport, which does not count them


def check_laws(kind: str, size: int, seed: int, *, transport: str = SIMULATED) -> Lawful:
    """Run the world that `kind`, `size` and `seed` stand for, and raise LawBroken if it breaks a law.

    Simulated, in virtual time, it has jitter, a slow rank, pauses of the network and of a trainer, a rank that ends
    early; `transport` "memory" simulates shared memory. Over "inproc", "zmq", "shm", and as processes of
    `asyncoll launch` over "zmq-processes" and "shm-processes", it runs in real time, without what only a simulation
    can do.
    """
    replay = f"asyncoll laws --kind {kind} --ranks {size} --seed {seed}"
    if transport != SIMULATED:
        replay += f" --transport {transport}"
    case = draw(kind, size, seed)
    try:
        story = tell(case, transport)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise LawBroken("completion", "Every world runs to its end.", what, replay) from error
    for law in laws_of(kind):
        for breach in law(story):
            statement = (law.__doc__ or "").partition("\n")[0]
            raise LawBroken(law.__name__, statement, breach.what, replay, breach)
    return Lawful(case.rounds, story.messages)
