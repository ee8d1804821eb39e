"""Serves and calls a function at a socket in the folder for temporary files."""

import asyncio
import tempfile

from asyncoll import rpc


def answer() -> int:
    return 42


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with rpc.serve(answer, f"ipc://{folder}/s") as url, rpc.connect(url) as service:
            assert await service.call("answer") == 42
    print("answered")


asyncio.run(main())
