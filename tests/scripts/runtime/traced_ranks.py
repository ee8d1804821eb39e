"""A rank whose calls are traced. It prints their events as JSON."""

import json
import sys

import asyncoll
from tests.support import tracing


async def main(comm: asyncoll.Communicator) -> None:
    program = getattr(tracing, sys.argv[1])
    print(json.dumps(await tracing.traced(comm, program)))


asyncoll.run(main)
