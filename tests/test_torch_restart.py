"""The example of DistributedDataParallel that resumes by itself: a rank is killed, and torchrun starts all again."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PATIENCE_S = 120
EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp_restart.py"
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
def test_a_job_resumes_after_a_rank_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends the other ranks by SIGTERM. Here they ignore it, so that they always tell their error."""
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
    arguments = ["--steps", STEPS, "--every", EVERY, "--kill-at", KILL_AT, "--folder", tmp_path]
    rank = ["--no-python", "sh", "-c", 'trap "" TERM; exec "$0" "$@"', sys.executable, EXAMPLE]
    done = subprocess.run(
        [str(part) for part in [*torchrun, "--max-restarts", "1", "--monitor-interval", "0.1", *rank, *arguments]],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"PeerLostError: rank 1 \(host \S+, pid \d+\) is gone", done.stderr), done.stderr
    said = re.findall(r"rank \d resumes at step \d+|\d+ steps done", done.stdout)  # ends of lines may change places
    assert sorted(said) == ["8 steps done", *(f"rank {r} resumes at step 3" for r in range(2))], done.stdout
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    assert saved["step"] == STEPS
    torch.testing.assert_close(saved["model"], trained_alone(2))
