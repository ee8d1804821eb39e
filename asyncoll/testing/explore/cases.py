"""What is explored: protocols of asyncoll in small worlds. `SHORT` takes seconds, and the tests run it."""

from __future__ import annotations

from typing import NamedTuple

from asyncoll.testing.explore.channels import NodeNetwork, Packed
from asyncoll.testing.explore.epoch_program import AgreementProgram
from asyncoll.testing.explore.explorer import Model


class ExploredWorld(NamedTuple):
    """The agreement in one world, with at most so many deaths, and other faults."""

    program: AgreementProgram
    deaths: int
    others: int = 0

    @property
    def model(self) -> Model[Packed]:
        return NodeNetwork(self.program, self.deaths, self.others)

    def __str__(self) -> str:
        program = self.program
        parts = [f"epochs: {program.size} ranks", f"{self.deaths} deaths"]
        parts += [f"{program.candidates} candidates"] if program.candidates else []
        parts += ["no death is certain"] if not program.is_certain else []
        others = ["false suspicions"] * program.suspects + ["answers that the store owes"] * program.fails
        others += ["attempts that a member gives up"] * program.unlinks
        return ", ".join(parts + ([f"{self.others} {' or '.join(others)}"] if others else []))


SHORT = (
    ExploredWorld(AgreementProgram(1, candidates=2), 1),
    ExploredWorld(AgreementProgram(2, suspects=True, fails=True), 2, 2),
    ExploredWorld(AgreementProgram(2, candidates=1, is_certain=False), 2),
    ExploredWorld(AgreementProgram(3), 3),
    ExploredWorld(AgreementProgram(3, is_certain=False), 2),
    ExploredWorld(AgreementProgram(3, fails=True), 2, 1),
    ExploredWorld(AgreementProgram(3, candidates=1), 0),
    ExploredWorld(AgreementProgram(2, candidates=1, unlinks=True), 2, 1),
)
LONG = (
    ExploredWorld(AgreementProgram(2, candidates=1, fails=True), 2, 1),
    ExploredWorld(AgreementProgram(2, candidates=2), 1),
    ExploredWorld(AgreementProgram(3, candidates=1), 2),
    ExploredWorld(AgreementProgram(3, candidates=1, unlinks=True), 1, 1),
    ExploredWorld(AgreementProgram(4), 3),
    ExploredWorld(AgreementProgram(4, is_certain=False), 2),
    ExploredWorld(AgreementProgram(4, fails=True), 2, 1),
)
