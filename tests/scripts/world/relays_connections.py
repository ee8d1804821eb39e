"""Passes on connections, as a NAT does: `relays_connections.py ADDRESS TARGET PORT...`.

Prints a line once it listens at ADDRESS.
"""

import asyncio
import contextlib
import sys

address, target, *ports = sys.argv[1:]


async def pass_on(reader, writer):
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main():
    for port in ports:

        async def join(reader, writer, port=port):
            inner, outer = await asyncio.open_connection(target, port)
            await asyncio.gather(pass_on(reader, outer), pass_on(inner, writer))

        await asyncio.start_server(join, address, port)
    print("listens", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
