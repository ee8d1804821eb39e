"""A rank whose tensors are on an emulated device of CUDA. Rank 1 is killed while its copies are under way."""

import os
import signal
import threading

import torch

import asyncoll
from tests.support.emulated_cuda import emulated_cuda


async def main(comm):
    while True:
        x = gpu.tensor(torch.full((300_000,), float(comm.rank)))
        call = comm.allreduce(x)
        if comm.rank == 1 and len(done) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        await call
        assert (gpu.values(x) == comm.size * (comm.size - 1) / 2).all()
        done.append(x)


done = []
with emulated_cuda(int(os.environ["RANK"])) as gpu:
    try:
        asyncoll.run(main)
    except asyncoll.PeerLostError as error:
        lost = error.rank
    assert lost == 1
    assert not gpu.registered
    assert "asyncoll-cuda:0" not in {thread.name for thread in threading.enumerate()}
print("closed", flush=True)
