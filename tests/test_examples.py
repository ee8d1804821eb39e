"""The language task of the examples, and the program that trains it with torch alone."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
language = runpy.run_path(str(EXAMPLES / "language.py"))


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
def test_training_with_torch_alone_runs_and_saves_a_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncoll.cli", "launch", "-n", "2", "--timeout", "200"]
    command += [str(EXAMPLES / "train_ddp.py"), "--steps", "1", "--every", "1", "--folder", str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    found = re.search(r"step 1: validation loss (\S+),", shown.stdout)
    assert found, shown.stdout
    assert 4.0 < float(found[1]) < math.log(256) + 1.0
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 1
    assert len(saved["optimizer"]["state"]) == len(list(language["Transformer"]().parameters()))
