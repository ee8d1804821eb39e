"""A rank whose calls are traced. It prints their events as JSON."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import tracing

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    program = getattr(tracing, sys.argv[1])
    print(json.dumps(await tracing.traced(comm, program)))


asyncoll.run(main)
