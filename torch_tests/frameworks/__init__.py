"""Programs that train a small model by a framework. Each compares the parameters with those of one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.testing import assert_close

ROWS, EACH, EPOCHS, RATE = 36, 3, 2, 0.1  # rows of the data (for 2, 3 and 4 ranks), rows of a rank's batch


def data() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 4, generator=made), torch.randn(ROWS, 2, generator=made)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def steps(size: int) -> int:
    """Of the whole training with `size` ranks."""
    return EPOCHS * ROWS // (EACH * size)


def check(net: nn.Module, size: int) -> None:
    """`net` is what one process comes to. However rows are dealt out, a step of all ranks uses those that come next."""
    inputs, targets = data()
    expected = model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for first in range(0, ROWS, EACH * size):
            rows = slice(first, first + EACH * size)
            optimizer.zero_grad()
            nn.functional.mse_loss(expected(inputs[rows]), targets[rows]).backward()
            optimizer.step()
    for x, y in zip(net.parameters(), expected.parameters(), strict=True):
        assert_close(x.detach(), y.detach(), rtol=1e-5, atol=1e-5)
