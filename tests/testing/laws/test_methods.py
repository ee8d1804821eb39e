"""Laws of one sparse algorithm, or of one policy, which may be a program's own."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from asyncoll import UsageError
from asyncoll.cli import main
from asyncoll.testing import LawBroken, check_laws

OWN = """
import numpy as np
import asyncoll
from asyncoll.extending import Part, SparseAlgorithm, register_policy, register_sparse_algorithm

register_policy("own", lambda view: view.count() > view.number % view.size)
register_policy("failing", lambda view: {}["key"])

class Own(SparseAlgorithm):
    def select(self, x):
        return np.arange(self.round % 3, x.size, 3)

class Unequal(Own):
    async def exchange(self, collectives, given):
        total = await super().exchange(collectives, given)
        return total if collectives.rank else total.slice(0, total.size // 2)

class Losing(Own):
    async def exchange(self, collectives, given):
        total = await super().exchange(collectives, given)
        return Part(total.indices, total.values / 2)

class Repeating(Own):
    async def exchange(self, collectives, given):
        total = await super().exchange(collectives, given)
        return Part(np.repeat(total.indices, 2), np.repeat(total.values / 2, 2))

for name, algorithm in {"own": Own, "unequal": Unequal, "losing": Losing, "repeating": Repeating}.items():
    register_sparse_algorithm(name, algorithm)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return "own.py"


@pytest.mark.parametrize("transport", ["simulated", "memory", "hosts", "zmq", "shm", "shm-mixed"])
@pytest.mark.parametrize("kind", ["policy", "policy:{}:own", "training:{}:own", "sparse:{}:own", "sparse:topkdsa"])
def test_own_methods_keep_the_laws_on_every_transport(kind, transport, file):
    for size, seed in [(1, 0), (3, 1), (5, 2)]:
        assert check_laws(kind.format(file), size, seed, transport=transport).rounds


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["policy:{}:own", "training:{}:own", "sparse:{}:own"])
@pytest.mark.parametrize("transport", ["zmq-processes", "shm-mixed-processes"])
def test_own_methods_keep_the_laws_in_processes(kind, transport, file, without_launcher):
    assert check_laws(kind.format(file), 3, 1, transport=transport).rounds


@pytest.mark.parametrize(("name", "law"), [("unequal", "agreement"), ("losing", "conservation")])
def test_a_wrong_algorithm_breaks_its_law_and_the_replay_names_it(name, law, file):
    def check_all():
        for seed in range(20):
            check_laws(f"sparse:{file}:{name}", 4, seed)

    with pytest.raises(LawBroken) as broken:
        check_all()
    assert broken.value.law == law
    assert not re.search("gTopk|_every|feedback|global_threshold", str(broken.value))  # of other algorithms
    assert f"--kind sparse:own.py:{name} " in broken.value.replay


@pytest.mark.parametrize("transport", ["simulated", "hosts", "zmq", "shm"])
def test_indices_that_repeat_are_an_error_with_a_replay(transport, file):
    with pytest.raises(LawBroken, match=r"Repeating\.exchange has to return a Part") as broken:
        check_laws(f"sparse:{file}:repeating", 3, 0, transport=transport)
    assert "--kind sparse:own.py:repeating " in broken.value.replay


@pytest.mark.parametrize("transport", ["simulated", pytest.param("shm-processes", marks=pytest.mark.slow)])
def test_a_policy_that_raises_is_a_short_verdict(transport, file, capfd):
    """Neither the command nor the process that checks prints more."""
    check_that_the_verdict_is_short(transport, capfd)


@pytest.mark.parametrize("transport", ["hosts", "zmq", "shm"])
def test_a_policy_that_raises_is_a_short_verdict_on_every_transport(transport, file, capfd, in_this_process):
    check_that_the_verdict_is_short(transport, capfd)


def check_that_the_verdict_is_short(transport, capfd):
    laws = ["laws", "--kind", "policy:own.py:failing", "--seeds", "0:3", "--sizes", "3", "--transport", transport]
    done = CliRunner().invoke(main, laws)
    assert done.exit_code == 1
    assert done.stdout.count("the policy 'failing' raised KeyError: 'key' at own.py:7") == 3
    assert done.stdout.count("\n") == 10
    assert (done.stderr, *capfd.readouterr()) == ("", "", "")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("sparse:missing.py:own", "there is no file 'missing.py'"),
        ("sparse:own.py:other", "'other' is no sparse algorithm: use one of oktopk"),
        ("policy:own.py:other", "no policy 'other' is registered"),
        ("sparse:", "'' is no sparse algorithm"),
        ("solo:own", "only the kinds sparse, policy and training take a name"),
        ("policy:text.txt:own", "'text.txt' is no Python file"),
        ("policy:raises.py:own", "'raises.py' raised ZeroDivisionError: division by zero: run it with python"),
        ("policy:wrong.py:own", "'wrong.py' raised SyntaxError"),
    ],
)
def test_a_name_that_is_none_is_an_error(kind, told, file, tmp_path):
    for name, text in {"text.txt": "", "raises.py": "1 / 0", "wrong.py": "1 +"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=told):
        check_laws(kind, 3, 0)
    result = CliRunner().invoke(main, ["laws", "--kind", kind, "--seeds", "0:2"])
    assert result.exit_code == 2
    assert told in str(result.exception) + result.output


def test_the_command_checks_an_own_method(file):
    result = CliRunner().invoke(main, ["laws", "--kind", f"sparse:{file}:own", "--seeds", "0:3", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("sparse:own.py:own")
    assert "all laws hold" in result.output
