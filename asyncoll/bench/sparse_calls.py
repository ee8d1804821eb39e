"""Ok-Topk allreduces, timed one by one after a barrier; it is checked that no value is lost."""

from __future__ import annotations

import numpy as np

from asyncoll import SparseReduction
from asyncoll.bench.dense_calls import slowest, timed, wrong_elements
from asyncoll.bench.plan import ITEM_BYTES, Row
from asyncoll.communicator import Communicator

DENSITY = 0.01


async def sparse(comm: Communicator, size: int) -> Row:
    """Measure `comm.sparse_allreduce` of float32 at a density of 1 %. All ranks call it."""
    random = np.random.default_rng(comm.rank)
    # Integers, because float32 holds their sums exactly.
    mine = random.integers(-1000, 1000, size // ITEM_BYTES).astype(np.float32)
    total, x = mine.copy(), mine.copy()
    await comm.allreduce(total)
    reductions: list[SparseReduction] = []

    async def call() -> None:
        reductions[:] = [await comm.sparse_allreduce(x, density=DENSITY, name=f"bench sparse {size}")]

    seconds, _ = await timed(comm, size, lambda: np.copyto(x, mine), call, lambda: 0)
    await comm.allreduce(x)  # the residuals of the last call
    x[reductions[0].indices] += reductions[0].values
    median, p99, wrong = await slowest(comm, seconds, wrong_elements(x, total))
    return {
        "size": size,
        "count": mine.size,
        "type": "float32",
        "time_us": median * 1e6,
        "p99_us": p99 * 1e6,
        "wrong": wrong,
    }
