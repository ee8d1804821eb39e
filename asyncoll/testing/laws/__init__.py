"""The laws of collectives, gossip, training and the ends of programs, checked in worlds drawn from seeds."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncoll.errors import UsageError
from asyncoll.testing.laws.case_runs import SIMULATED, TRANSPORTS, WORLD_KINDS, tell
from asyncoll.testing.laws.rounds import Breach
from asyncoll.testing.laws.story import draw
from asyncoll.transport import settings


class LawBroken(AssertionError):  # noqa: N818
    """A law does not hold in a world. `replay` is the command that runs the same world again."""

    def __init__(self, law: str, statement: str, what: str, replay: str, where: Breach | None = None) -> None:
        number = f"round {where.round}, " if where and where.round else ""
        location = f"{number}rank {where.rank}: " if where else ""
        super().__init__(f"{law} is broken: {statement}\n  {location}{what}\n  replay: {replay}")
        self.law = law
        self.replay = replay
        self.round = where.round if where else None  # 0 in a world of gossip or of dense calls
        self.rank = where.rank if where else None


@dataclass(frozen=True, slots=True)
class Lawful:
    """The size of a world that kept all laws."""

    rounds: int  # averages, in a world of gossip; calls of all ranks, in one of dense or sparse calls, or steps
    messages: int  # 0 on a real transport, which does not count them


def check_laws(kind: str, size: int, seed: int, *, transport: str = SIMULATED, devices: bool = False) -> Lawful:
    """Run the world drawn from `kind`, `size` and `seed`. Raises LawBroken if it breaks a law.

    `transport` "simulated" (messages), "memory" (shared memory) and "hosts" (memory on each of up to five hosts, one of
    which may have none, and messages between them) run the world in virtual time, with jitter, a slow rank, pauses of
    the network and of one trainer, cancelled calls, and a rank that ends early. "inproc", "zmq", "shm" and "shm-mixed"
    (`asyncoll.testing.run_ranks`) run the ranks on one loop in real time. "zmq-processes", "shm-processes" and
    "shm-mixed-processes" run them as processes of `asyncoll launch`. With "mixed", every second rank does without the
    compiled core. In real time there is neither a drawn network nor a pause of a trainer.

    A kind may name the algorithm of all its sparse calls, or the policy of its rounds, also of those of trainings:
    "sparse:topka", "policy:NAME", "training:NAME". Otherwise these are drawn. With the Python file that registers it
    (`asyncoll.extending`) it is "sparse:FILE:NAME", "policy:FILE:NAME" or "training:FILE:NAME"; the file is run once in
    each process. Of a sparse algorithm of the program's own the laws
    `refusal`, `agreement`, `residual` and `conservation` are checked; of a policy those of all rounds, and
    `permission`: no round begins unless the policy lets it.

    With `devices` some ranks have most of their tensors on devices without hardware (`fake_device`), and the law
    `completion` says also that no copy was at the wrong time. Worlds of dense and sparse calls, and of
    trainings, have no devices.

    Raises UsageError for an unknown kind, file, name or transport, a size below 1 or a negative seed.
    """
    settings.check(os.environ)
    if transport not in TRANSPORTS:
        raise UsageError(f"unknown transport {transport!r}: use one of {', '.join(TRANSPORTS)}")
    replay = f"asyncoll laws --kind {kind} --sizes {size} --seed {seed}"
    if transport != SIMULATED:
        replay += f" --transport {transport}"
    if devices:
        replay += " --devices"
    case = draw(kind, size, seed)
    try:
        story = tell(case, transport, devices=devices)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise LawBroken("completion", "Every world runs to its end.", what, replay) from error
    for law in WORLD_KINDS[case.kind].laws:
        for breach in law(story):
            statement = (law.__doc__ or "").partition("\n")[0]
            raise LawBroken(law.__name__, statement, breach.what, replay, breach)
    return Lawful(story.steps, story.messages)
