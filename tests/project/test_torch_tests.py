"""What `make torch-tests` counts as a success, and how its programs come to the backend."""

import ast

import pytest

from tests.support.places import ROOT
from torch_tests.compare import report

FOLDER = ROOT / "torch_tests"
WITH_HOOKS = ("accelerate_loop.py", "lightning_ddp.py", "lightning_late_rank.py", "transformers_trainer.py")


def imports_asyncoll(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    names = {
        getattr(node, "module", None) or alias.name
        for node in nodes
        for alias in getattr(node, "names", ())
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return any(name.split(".")[0] == "asyncoll" for name in names)


def test_programs_find_the_backend_by_its_name_alone():
    """But for those of frameworks, which use its hooks, and for the sabotage of its results."""
    importing = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py") if imports_asyncoll(path)}
    assert importing == {"features/sabotage.py", *(f"frameworks/{name}" for name in WITH_HOOKS)}


@pytest.mark.parametrize(
    ("gloo", "ours", "is_good"),
    [
        ("passed", "passed", True),
        ("passed", "failed", False),
        ("passed", "skipped", False),
        ("passed", None, False),
        ("failed", "passed", True),
        ("failed", "failed", True),
        ("skipped", "skipped", True),
    ],
)
def test_what_passes_with_gloo_must_pass_with_asyncoll(gloo, ours, is_good, capsys):
    results = [{"test_something": {"outcome": outcome, "text": ""}} if outcome else {} for outcome in (gloo, ours)]
    assert report("tests", *results) == is_good
    assert ("WITH GLOO ALONE" in capsys.readouterr().out) == (not is_good)
