"""Receives from any source that are cancelled at random, for tests in one process and in several."""

from __future__ import annotations

import asyncio

import numpy as np

SHORT, LONG = 3, (1 << 17) + 5  # elements of 8 bytes: at most, and above, one segment


def message(source: int, number: int, elements: int) -> np.ndarray:
    return np.full(elements, 1000 * source + number)


async def take_with_cancellations(comm, seed: int, each: int = 8) -> int:
    """Rank 0 takes all messages one after another; most of its receives are cancelled at random. Returns how many."""
    random, cancelled = np.random.default_rng([seed, comm.rank]), 0
    lengths = np.random.default_rng(seed).choice([SHORT, LONG], each)
    if comm.rank:
        sends = []  # a long one waits for its receive, which may be made after that of a later one
        for number, elements in enumerate(lengths):
            sends.append(comm.send(message(comm.rank, number, elements), 0, tag=int(elements == LONG)))
            await asyncio.sleep(float(random.uniform(0, 1e-3)))
        await asyncio.gather(*sends)
        return 0
    left = {tag: (comm.size - 1) * int((lengths == n).sum()) for tag, n in enumerate((SHORT, LONG))}
    order = {tag: np.flatnonzero(lengths == n) for tag, n in enumerate((SHORT, LONG))}
    seen = np.zeros((comm.size, 2), int)
    while any(left.values()):
        tag = int(random.choice([tag for tag in left if left[tag]]))
        x, source = np.empty((SHORT, LONG)[tag], int), int(random.integers(1, comm.size))
        if random.random() < 0.2 and seen[source, tag] < len(order[tag]):
            await comm.recv(x, source, tag)
        else:
            task = asyncio.ensure_future(comm.recv_any(x, tag))
            if random.random() < 0.8:
                for _ in range(random.integers(8)):
                    await asyncio.sleep(0)
                if random.random() < 0.5:
                    await asyncio.sleep(float(10 ** random.uniform(-5, -3)))
                task.cancel()
            try:
                _, source = await task
            except asyncio.CancelledError:
                cancelled += 1
                x[:] = -1  # it is no longer in use
                continue
        assert (x == message(source, order[tag][seen[source, tag]], 1)).all()
        seen[source, tag] += 1
        left[tag] -= 1
    return cancelled
