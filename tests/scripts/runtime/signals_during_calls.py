"""A signal handler that raises strikes rank 0 again and again, while all ranks call one operation."""

import asyncio
import random
import signal
import sys
import warnings

import numpy as np

import asyncoll

ROUNDS = 150
BETWEEN_S = 0.0005  # signals, on average: about as long as a call takes


class AlarmError(Exception):
    pass


def ring(*_):
    raise AlarmError


def ignore_alarms(loop, context):
    if not isinstance(context.get("exception"), AlarmError):
        loop.default_exception_handler(context)


async def main(comm, seed, elements):
    generator, seen, alarms = random.Random(seed), 0, 0
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, ring)
        asyncio.get_running_loop().set_exception_handler(ignore_alarms)
    while seen < ROUNDS:
        try:
            if comm.rank == 0:
                signal.setitimer(signal.ITIMER_REAL, generator.expovariate(1 / BETWEEN_S) + 1e-6)
            history = generator.randrange(2) * 2
            seen = (await comm.solo_allreduce(np.ones(elements), name=f"solo {history}", history=history)).round
            signal.setitimer(signal.ITIMER_REAL, 0)
        except AlarmError:
            alarms += 1
    total = await comm.allreduce(np.ones(3))
    print(comm.rank, "alarms" if alarms else "", total.tolist())


warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that nobody awaits, as the handler has raised
asyncoll.run(main, int(sys.argv[1]), int(sys.argv[2]))
