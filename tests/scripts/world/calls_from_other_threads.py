"""Calls from other threads: refused where no loop runs, made where one does. The job goes on and ends."""

import asyncio

import numpy as np

import asyncoll

CALLS = {
    "allreduce": lambda comm: comm.allreduce(np.ones(1)),
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0),
    "send": lambda comm: comm.send(np.ones(1), 1 - comm.rank),
    "recv": lambda comm: comm.recv(np.ones(1), 1 - comm.rank),
    "solo": lambda comm: comm.solo_allreduce(np.ones(1)),
    "sparse": lambda comm: comm.sparse_allreduce(np.ones(4), density=1),
    "rpc": lambda comm: comm.rpc,
}


def refusals(comm):
    """What each call raises in a thread without a loop."""
    refused = []
    for name, call in CALLS.items():
        try:
            call(comm)
        except asyncoll.UsageError as error:
            refused += [name] * ("needs a running event loop" in str(error))
    return refused


async def calls(comm):
    """All kinds of calls, on whatever loop."""
    assert (await comm.allreduce(np.ones(3)))[0] == 2
    assert (await comm.allreduce(np.ones(1 << 20)))[0] == 2
    assert (await comm.quorum_allreduce(np.ones(1), quorum=2)).active == 2
    await comm.sparse_allreduce(np.ones(4), density=1)
    received = np.zeros(1)
    sending = comm.send(np.ones(1), 1 - comm.rank, 5)
    await comm.recv(received, 1 - comm.rank, 5)
    await sending
    part = await comm.split(0)
    assert (await part.allreduce(np.ones(3)))[0] == 2


async def is_refused(comm):
    """Whether a function cannot be called on this loop."""
    try:
        await comm.rpc.call(0, "echo", 1)
    except asyncoll.UsageError as error:
        return "belong to the loop" in str(error)
    return False


async def main(comm: asyncoll.Communicator) -> None:
    if comm.rank == 0:
        assert await asyncio.to_thread(refusals, comm) == list(CALLS)
        assert await asyncio.to_thread(asyncio.run, is_refused(comm))  # nobody has used comm.rpc yet
    await calls(comm)
    await asyncio.to_thread(asyncio.run, calls(comm))
    comm.rpc.register(lambda x: x, name="echo")
    await comm.barrier()
    assert await asyncio.to_thread(asyncio.run, is_refused(comm))
    home = asyncio.get_running_loop()

    async def here() -> int:
        return await comm.rpc.call(1 - comm.rank, "echo", 7)

    def there() -> int:
        return asyncio.run_coroutine_threadsafe(here(), home).result()

    assert await asyncio.to_thread(there) == 7
    print("all right")


asyncoll.run(main)
