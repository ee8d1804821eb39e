"""The recipe "A kind of round" of docs/design/extending.md, followed: in a copy of the package, with a kind of its own.

The kind is `led_allreduce`: a round may begin once a drawn rank and a number of ranks have arrived. It has all that a
kind may have: an opening, an option, drawn ranks, a number of ranks, and late calls that open rounds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncoll import _core
from tests.support.places import ROOT

PACKAGE = ROOT / "asyncoll"
RECIPE = (ROOT / "docs" / "design" / "extending.md").read_text().partition("\n## A kind of round\n")[2]
RECIPE = RECIPE.partition("\n## ")[0]
PATIENCE_S = 120  # a round of a rule that one of the ranks does not have waits for ever

METHOD = '''
    def led_allreduce(
        self, x: object, op: ReduceOp = ReduceOp.SUM, *, followers: int, candidates: int = 1, name: str = "led",
        sync_every: int = 0, sync_offset: int = 0, history: int = 0, seed: int = 0, weight: float | None = None,
    ) -> Coroutine[Any, Any, Reduction]:
        """Wait-avoiding allreduce in rounds: a round starts when a drawn rank and `followers` ranks have arrived."""
        arguments = (op, Opening.LED, False, sync_every, sync_offset, history, followers, candidates, seed)
        return self._wait_avoiding(x, name, weight, arguments, (*_SOLO_RULES, "followers", "candidates", "seed"))
'''
CALL_IN_A_STORY = """
    if case.kind == "led":
        chosen = {"followers": case.quorum, "candidates": case.candidates, "seed": case.seed}
        return comm.led_allreduce(x, **chosen, **options)
"""
CALL_IN_THE_MATRIX = """async def led(comm: Communicator, elements: int) -> None:
    await _rounds(comm.size, comm.led_allreduce(x := np.ones(elements), followers=comm.size - 1), x)


"""
RULE = """            case Opening.LED:
                return Rule(self.followers, drawn=True)
"""
HANDLE = "    led_allreduce = _with_handle(Communicator.led_allreduce)\n"

# By file of the package: pairs of a text in it, and what stands before this text or, after "=", instead of it.
CHANGES = {
    "algorithms/rounds/operation.py": [
        ("\n\nclass Rule(NamedTuple):", '    LED = "led"\n'),
        ("            case Opening.QUORUM:\n", RULE),
        ("    seed: int = 0\n", "    followers: int = 1\n"),
        ('    _check_ranks("quorum"', '    _check_ranks("followers", spec.followers, size)\n'),
    ],
    "algorithms/rounds/compiled_rounds.py": [('        "seed",\n', '        "followers",\n')],
    "transport/wire.py": [("    seed: int\n", "    followers: int\n")],
    "communicator.py": [("\n    def quorum_allreduce(", METHOD)],
    "blocking.py": [("    quorum_allreduce = _with", HANDLE)],
    "kinds.py": [(")\nALL", ', "led"')],
    "testing/laws/story.py": [
        ('"full": self.size}', '"led": self.size // 2 + 1, '),
        ('self.kind in ("candidates", "policy")', '=self.kind in ("candidates", "policy", "led")'),
        ('\n    if case.kind == "solo":', CALL_IN_A_STORY),
    ],
    "testing/laws/rounds.py": [(")  # kinds", ', "led"')],
    "testing/faults/checked_calls.py": [("async def group(", CALL_IN_THE_MATRIX)],
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the package that has the kind."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(PACKAGE, folder / "asyncoll", ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in CHANGES.items():
        file = folder / "asyncoll" / name
        text = file.read_text()
        for place, added in changes:
            assert text.count(place) == 1, f"{name} has {place!r} {text.count(place)} times"
            text = text.replace(place, added[1:] if added.startswith("=") else added + place)
        file.write_text(text)
    return folder


def run(package: Path, *arguments: str, core: str = "c", may_fail: bool = False) -> str:
    """What the command `asyncoll` of the copy prints. Its exit code is 0, or 1 if it `may_fail`."""
    environment = os.environ | {"PYTHONPATH": str(package), "ASYNCOLL_CORE": core}
    done = subprocess.run(
        [sys.executable, "-m", "asyncoll", *arguments],
        cwd=package,  # the first place where `-m` looks
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode in (0, may_fail), done.stdout
    return done.stdout


def test_the_recipe_names_every_file_that_the_kind_changes() -> None:
    assert set(CHANGES) <= set(re.findall(r"`asyncoll/([\w./]+)", RECIPE))


def test_no_file_of_the_core_knows_a_kind_of_round() -> None:
    kind = re.compile(r"\b(?:solo|majority|quorum)\b", re.IGNORECASE)
    assert not [file.name for file in (PACKAGE / "_core").glob("*.[ch]") if kind.search(file.read_text())]


@pytest.mark.skipif(_core.native is None, reason="the compiled core is not there")
def test_the_compiled_core_carries_out_the_new_kind(package: Path) -> None:
    code = (
        "from asyncoll import SUM; from asyncoll.algorithms.rounds.compiled_rounds import is_known\n"
        "from asyncoll.algorithms.rounds.operation import Opening, Operation\n"
        "print(is_known(Operation('g', (('float32', 3),), SUM, Opening.LED, followers=2)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=package, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("transport", "seeds", "core"),
    [
        ("simulated", 24, "python"),
        ("memory", 24, "python"),
        ("hosts", 24, "python"),
        ("zmq", 6, "c"),
        ("shm", 6, "c"),
        ("shm", 6, "python"),
        ("shm-mixed", 6, "c"),
    ],
)
def test_the_new_kind_keeps_the_laws_on_every_carrier(package: Path, transport: str, seeds: int, core: str) -> None:
    world = ("--kind", "led", "--transport", transport, "--sizes", "1-5,9", "--seeds", f"0:{seeds}", "--jobs", "1")
    assert "all laws hold" in run(package, "laws", *world, core=core)


def test_a_killed_rank_ends_a_round_of_the_new_kind(package: Path) -> None:
    # A busy machine may hear of it late.
    printed = run(package, "faults", "--cells", "*kill*/led/*", "--sample", "2", "--jobs", "1", "--json", may_fail=True)
    cells = [json.loads(line) for line in printed.splitlines()]
    assert len(cells) == 2
    assert not any(cell["broken"] for cell in cells), printed
