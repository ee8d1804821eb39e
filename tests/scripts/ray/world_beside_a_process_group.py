"""A rank of a process group of torch that joins a world of asyncoll, twice: as a worker of Ray Train does."""

import numpy as np
import torch.distributed as dist

import asyncoll


async def main(comm):
    x = np.full(1, comm.rank)
    await comm.allreduce(x)
    print(comm.rank, x.tolist(), flush=True)


dist.init_process_group("gloo")
asyncoll.run(main)
asyncoll.run(main)
dist.destroy_process_group()
