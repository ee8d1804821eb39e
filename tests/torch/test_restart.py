"""The example of DistributedDataParallel that resumes by itself: a rank is killed, and torchrun starts all again."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.places import ROOT, SCRIPTS

ELASTIC = SCRIPTS / "world/under_torchrun.py"
EXAMPLE = ROOT / "examples" / "ddp_restart.py"
STEPS, EVERY, KILL_AT = 8, 3, 5


def trained_alone(size: int) -> dict[str, torch.Tensor]:
    """The model of one process that uses the rows of all ranks in each step."""
    example = runpy.run_path(str(EXAMPLE))
    model = example["make_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, y = map(torch.cat, zip(*[example["rows"](step, rank) for rank in range(size)], strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.mark.slow
def test_a_job_resumes_after_a_rank_was_killed(
    tmp_path: Path, forked: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--steps", STEPS, "--every", EVERY, "--kill-at", KILL_AT, "--folder", tmp_path]
    code, out, err = forked(dict(os.environ), ELASTIC, 2, 1, EXAMPLE, *arguments)
    assert code == 0, err
    assert re.search(r"PeerLostError: rank 1 \(host \S+, pid \d+\) is gone", err), err
    said = re.findall(r"rank \d resumes at step \d+|\d+ steps done", out)  # ends of lines may change places
    assert sorted(said) == ["8 steps done", *(f"rank {r} resumes at step 3" for r in range(2))], out
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    assert saved["step"] == STEPS
    torch.testing.assert_close(saved["model"], trained_alone(2))
