"""Rank 0 keeps the parameters, and the other ranks train by RPC.

The class `Parameters` is the service at rank 0, and the typed stub at its callers. Tensors are sent beside the call,
without pickle. Run `asyncoll launch -n 4 examples/rpc_parameter_server.py`.
"""

import torch

import asyncoll

STEPS, RATE = 200, 0.1


class Parameters:
    """A vector that all ranks read and change."""

    def __init__(self, size: int) -> None:
        self._vector = torch.zeros(size)

    async def pull(self) -> torch.Tensor:
        """The newest state. A copy, because `push` may change the vector while it is being sent."""
        return self._vector.clone()

    async def push(self, gradient: torch.Tensor) -> None:
        """One step of gradient descent."""
        self._vector -= RATE * gradient


async def main(comm: asyncoll.Communicator) -> None:
    """Fit a vector to a target that only the workers know."""
    target = torch.arange(8.0)
    if comm.rank == 0:
        comm.rpc.register(Parameters(8))
    else:
        server = comm.rpc.proxy(0, Parameters)
        for _ in range(STEPS):
            await server.push(await server.pull() - target)
    await comm.barrier()
    if comm.rank == 0:
        print([round(float(x), 3) for x in await comm.rpc.proxy(0, Parameters).pull()])


if __name__ == "__main__":
    asyncoll.run(main)
