"""Every rank sends every other messages of all lengths, from several tasks, and each checks what it gets."""

import asyncio
from collections import Counter

import numpy as np

import asyncoll
from asyncoll.rpc.memory_carrier import MemoryCarrier

LENGTHS = [[], [0], [64], [5, 0, 9000], [40_000], [1 << 17, 17], [1_100_000]]
ROUNDS = 4
TASKS = 2


def numbered(seed: int, nbytes: int) -> np.ndarray:
    return (np.arange(nbytes) * 7 + seed).astype(np.uint8)


async def main(comm: asyncoll.Communicator) -> None:
    endpoint, ranks = comm._core.member.endpoint, tuple(range(comm.size))
    expected = {(source, task): 0 for source in ranks for task in range(TASKS)}
    done = asyncio.Event()
    wrong: Counter[int] = Counter()
    held = []

    def deliver(source, head, arrays):
        task, number = head[0], int.from_bytes(head[1:], "big")
        lengths = LENGTHS[number % len(LENGTHS)]
        right = expected[source, task] == number and [array.nbytes for array in arrays] == lengths
        right &= all((array == numbered(source + number, array.nbytes)).all() for array in arrays)
        wrong[source] += not right
        expected[source, task] += 1
        held.append(arrays)
        del held[:-5]
        if set(expected.values()) == {ROUNDS * len(LENGTHS)}:
            done.set()

    async def send(dest, task):
        for number in range(ROUNDS * len(LENGTHS)):
            arrays = [numbered(comm.rank + number, nbytes) for nbytes in LENGTHS[number % len(LENGTHS)]]
            await carrier.send(dest, bytes([task]) + number.to_bytes(4, "big"), arrays)

    carrier = MemoryCarrier(endpoint.arena, 1, ranks, lambda: endpoint.failures.check(0), print)
    carrier.open(deliver)
    await asyncio.gather(*[send(dest, task) for dest in ranks for task in range(TASKS)])
    await done.wait()
    assert not sum(wrong.values()), wrong
    await comm.barrier()
    await carrier.close()
    print(f"{comm.rank}: all right")


asyncoll.run(main)
