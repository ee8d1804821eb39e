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
        await comm.barrier()
        if comm.rank == 0:
            signal.pause()
        STRUCK.touch()  # noqa: ASYNC240
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.ones(1)
    await comm.allreduce(x)
    print(f"rank {comm.rank} of {x[0]:g}, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)


asyncoll.run(main)
