"""Every rank contributes its number. Run `asyncoll launch -n 4 examples/hello.py`, or one rank with `python`."""

import torch

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    """Sum the ranks' numbers."""
    x = torch.full((3,), float(comm.rank))
    await comm.allreduce(x)
    print(f"rank {comm.rank} of {comm.size}: {x.tolist()}")


if __name__ == "__main__":
    asyncoll.run(main)
