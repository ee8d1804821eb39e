"""The language task of the examples, the program that trains it with torch alone, and its ports to each algorithm."""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib
import math
import os
import re
import runpy
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import asyncoll.training
from asyncoll.testing import run_ranks
from asyncoll.training import EagerSGD, Trainer, WagmaSGD
from tests.support.places import ROOT
from tests.support.processes import ForkedRank
from tests.support.training_loops import whole

EXAMPLES = ROOT / "examples"
ORIGINAL = EXAMPLES / "train_ddp.py"
PORTS = sorted(set(EXAMPLES.glob("train_*.py")) - {ORIGINAL})
PAGE = EXAMPLES.parent / "docs" / "howto" / "training.md"
MOST_CHANGED = 20  # lines
language = runpy.run_path(str(EXAMPLES / "language.py"))
BATCHES = cache(language["Batches"])  # reading all sources takes half a second


def test_a_target_is_the_next_byte() -> None:
    batches = language["Batches"](size=4)
    for inputs, targets in (batches[0], batches[len(batches) // 2], batches[len(batches) - 1]):
        assert inputs.shape == targets.shape
        assert inputs.dtype == targets.dtype == torch.int64
        for row in range(4):
            length = int((targets[row] != language["IGNORED"]).sum())
            assert torch.equal(targets[row, : length - 1], inputs[row, 1:length])
            assert not inputs[row, length:].any()
            assert bool((targets[row, length:] == language["IGNORED"]).all())


def test_batches_differ_in_length_and_their_sequences_do_not() -> None:
    batches = language["Batches"]()
    lengths = [inputs.shape[1] for inputs, _ in batches]
    assert lengths == sorted(lengths)
    assert lengths[-1] == language["LONGEST"] > 8 * lengths[0]
    for group in batches.groups:
        assert max(map(len, group)) <= 1.2 * min(map(len, group))


def test_no_sequence_is_for_training_and_validation() -> None:
    training, validation = language["Batches"](size=1), language["Batches"](size=1, validation=True)
    assert len(training) + len(validation) == len(language["sequences"]())
    assert 18 * len(validation) < len(training) < 20 * len(validation)


def test_the_transformer_is_causal_and_small() -> None:
    torch.manual_seed(0)
    model = language["Transformer"]()
    assert 0.25e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.35e6
    inputs = torch.randint(256, (2, 40))
    changed = inputs.clone()
    changed[:, 20:] += 1
    changed %= 256
    logits, others = model(inputs), model(changed)
    torch.testing.assert_close(logits[:, :20], others[:, :20])
    assert not torch.allclose(logits[:, 20:], others[:, 20:])


@pytest.mark.slow
def test_training_with_torch_alone_runs_and_saves_a_checkpoint(
    tmp_path: Path, forked_world: Callable[..., list[ForkedRank]]
) -> None:
    arguments = ["--steps", "1", "--every", "1", "--folder", tmp_path]
    ended = [rank.end() for rank in forked_world(dict(os.environ), 2, EXAMPLES / "train_ddp.py", *arguments)]
    assert [code for code, _, _ in ended] == [0, 0], ended
    found = re.search(r"step 1: validation loss (\S+),", ended[0][1])
    assert found, ended
    assert 4.0 < float(found[1]) < math.log(256) + 1.0
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 1
    assert len(saved["optimizer"]["state"]) == len(list(language["Transformer"]().parameters()))


# -- the ports -----------------------------------------------------------------------------------


def code(path: Path) -> list[str]:
    """The lines of a program without blank ones and without its docstring."""
    text = path.read_text()
    docstring = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[docstring:] if line.strip()]


def changed_lines(before: list[str], after: list[str]) -> int:
    """A line that is replaced by another one counts once."""
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for what, i1, i2, j1, j2 in changes if what != "equal")


def test_changed_lines_are_counted() -> None:
    assert changed_lines(list("abcdef"), list("aXcdefYZ")) == 3
    assert changed_lines(list("abcdef"), list("aef")) == 3
    assert changed_lines(list("abcdef"), list("abcdef")) == 0


def test_every_algorithm_has_a_port() -> None:
    made = "\n".join(path.read_text() for path in PORTS)
    algorithms = set(asyncoll.training.__all__) - {"Trainer", "Checkpoints", "ElasticBatches", "Step"}
    assert [name for name in sorted(algorithms) if f"sgd = {name}(" not in made] == []


@pytest.mark.parametrize("path", PORTS, ids=lambda path: path.stem)
def test_a_port_changes_few_lines(path: Path) -> None:
    assert 10 < changed_lines(code(ORIGINAL), code(path)) <= MOST_CHANGED


def test_the_documentation_shows_a_port_as_it_is() -> None:
    found = re.search(r"^```diff\n(.*?)\n```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found, PAGE
    shown = found[1].splitlines()
    files = [EXAMPLES / name.rpartition("/")[2] for name in (shown[0], shown[1])]
    before, after = (path.read_text().splitlines() for path in files)
    names = [f"examples/{path.name}" for path in files]
    assert shown == list(difflib.unified_diff(before, after, *names, n=1, lineterm=""))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a port, with a narrow model and the shortest sequences. Its `made` has the models that it makes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def imported(name: str) -> Any:
        program = importlib.import_module(name)
        made: list[torch.nn.Module] = []

        def model() -> torch.nn.Module:
            made.append(language["Transformer"](width=8, layers=1, heads=2))
            return made[-1]

        monkeypatch.setattr(program, "made", made, raising=False)
        monkeypatch.setattr(program, "Transformer", model)
        monkeypatch.setattr(program, "Batches", few_batches)
        monkeypatch.setattr(program, "DataLoader", without_workers)
        return program

    return imported


@pytest.mark.parametrize("path", PORTS, ids=lambda path: path.stem)
def test_a_port_trains_and_resumes(
    path: Path,
    small: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two ranks on one loop. The second run does the second step."""
    program = small(path.stem)
    for steps in ("1", "2"):
        program.made.clear()
        arguments = [path.name, "--steps", steps, "--every", "1", "--folder", str(tmp_path), "--bf16"]
        monkeypatch.setattr(sys, "argv", arguments)
        run_ranks(2, partial(as_process, program.main, monkeypatch))
        first, second = map(whole, program.made)
        assert first == second
        assert re.fullmatch(rf"step {steps}: validation loss \S+, \S+ s\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "algorithm", "saved"),
    [
        ("train_eager_sgd", EagerSGD, "checkpoint.pt"),
        ("train_wagma_sgd", WagmaSGD, "round-{}-rank-0-of-2.pt round-{}-rank-1-of-2.pt"),
    ],
)
def test_a_late_rank_saves_the_rounds_of_the_others(
    name: str,
    algorithm: type[Trainer],
    saved: str,
    small: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 makes one step in the time of many of rank 1. Every third round is saved, also by the second run."""
    steps = [0, 0]

    class Late(algorithm):  # type: ignore[misc, valid-type]
        async def step(self, **weight: Any) -> asyncoll.Reduction | None:
            for _ in range(200 if self.comm.rank == 0 else 0):
                await asyncio.sleep(0)
            reduction = await super().step(**weight)
            steps[self.comm.rank] += reduction is not None
            return reduction

    program = small(name)
    monkeypatch.setattr(program, algorithm.__name__, Late)
    for rounds, newest in ((8, 6), (10, 9)):
        steps[:] = 0, 0
        monkeypatch.setattr(sys, "argv", [name, "--steps", str(rounds), "--every", "3", "--folder", str(tmp_path)])
        run_ranks(2, partial(as_process, program.main, monkeypatch))
        assert steps[0] < steps[1]
        for file in saved.format(newest, newest).split():
            assert torch.load(tmp_path / file, weights_only=True)["step"] == newest
    assert len(list(tmp_path.glob("*.pt"))) == (1 if name == "train_eager_sgd" else 6)


async def as_process(
    main: Callable[[asyncoll.Communicator], Any], monkeypatch: pytest.MonkeyPatch, comm: asyncoll.Communicator
) -> None:
    """Run `main` in the environment of its rank, which it reads before it first gives way to the other rank."""
    monkeypatch.setenv("RANK", str(comm.rank))
    monkeypatch.setenv("WORLD_SIZE", str(comm.size))
    await main(comm)


def few_batches(validation: bool = False) -> list[tuple[Tensor, Tensor]]:
    """The shortest ones: enough for one epoch of one step."""
    return [BATCHES(validation=validation)[index] for index in range(8)]


def without_workers(*arguments: Any, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    """A worker would be a fork of the process that runs all tests."""
    return DataLoader(*arguments, **options)
