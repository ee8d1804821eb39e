"""A small language task: a Transformer predicts the next byte of the Python standard library's sources.

The sources are on every machine that has Python. Each function or class is a sequence, cut to 512 bytes. A batch has
sequences of about the same length, so that batches, and training steps, differ in length as they do in practice.
"""

import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LONGEST, SHORTEST = 512, 32  # bytes in a sequence
IGNORED = -100  # a target behind the end of its sequence; the default of nn.functional.cross_entropy
DEFINITION = re.compile(rb"\n(?=(?:    )?(?:async )?def |class )")


def sequences() -> list[bytes]:
    """The functions and classes of the standard library's top-level modules, in the order of the files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    found = [part[: LONGEST + 1] for file in files for part in DEFINITION.split(file.read_bytes())]
    return [part for part in found if len(part) > SHORTEST]


class Batches(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Batches of sequences of similar length, the shortest first.

    Each is a pair of int64 tensors of the shape (size, length): the bytes, padded with 0, and for each byte the next
    one, padded with `IGNORED`. Every 20th sequence is for validation; the others are for training.
    """

    def __init__(self, size: int = 8, validation: bool = False) -> None:
        chosen = [part for index, part in enumerate(sequences()) if (index % 20 == 0) == validation]
        chosen.sort(key=len)
        self.groups = [chosen[start : start + size] for start in range(0, len(chosen) - size + 1, size)]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        group = self.groups[index]
        length = max(map(len, group)) - 1
        inputs = torch.zeros(len(group), length, dtype=torch.int64)
        targets = torch.full((len(group), length), IGNORED)
        for row, part in enumerate(group):
            values = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            inputs[row, : len(part) - 1] = values[:-1]
            targets[row, : len(part) - 1] = values[1:]
        return inputs, targets


class Transformer(nn.Module):
    """A causal Transformer over bytes, with about 0.3 million parameters at its default width."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits of each next byte, of the shape (size, length, 256)."""
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        hidden = self.bytes(inputs) + self.places(torch.arange(length, device=inputs.device))
        logits: Tensor = self.head(self.norm(self.layers(hidden, mask=mask, is_causal=True)))
        return logits


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy per byte, in nats."""
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def straggle(step: int, rank: int, size: int, seconds: float) -> None:
    """Sleep at the rank that is drawn for this step, the same at every rank, as a slow machine would compute."""
    if rank == int(torch.randint(size, (), generator=torch.Generator().manual_seed(step))):
        time.sleep(seconds)


def save(path: Path, rank: int, state: dict[str, Any]) -> None:
    """Write a checkpoint at rank 0, as all ranks have the same model. A kill at any moment leaves the old one."""
    if rank != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint that `save` has written; None if there is none."""
    return torch.load(path, weights_only=True) if path.exists() else None
