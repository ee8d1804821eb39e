"""Under two agents of torchrun: a rank is killed while the one of the other agent computes and notices nothing.

That one is restarted because the first agent waits for another rendezvous, and its agent counts no restart.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import asyncoll

STRUCK = Path(sys.argv[1])


async def main(comm):
    if not STRUCK.exists():  # noqa: ASYNC240
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if comm.rank == 0:
            await comm.send(np.ones(1), 1)  # no barrier: the last message of a killed rank may be lost
            signal.pause()
        await comm.recv(np.ones(1), 0)
        STRUCK.touch()  # noqa: ASYNC240
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.ones(1)
    await comm.allreduce(x)
    print(f"rank {comm.rank} of {x[0]:g}, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)


asyncoll.run(main)
