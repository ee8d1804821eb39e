"""Whether the processes of this host can read each other's memory of a GPU: two of them try it.

The other process is this module as a program: `python -m ... INDEX HANDLE`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

import torch

from asyncoll.errors import describe
from asyncoll.transport.staging import BlockPart, Device, RefusedError, arrived
from asyncoll.transport.staging.cuda import CudaDevice

_NBYTES = 1 << 12
# The process imports torch and opens a GPU in this time.
_PATIENCE_S = 60.0


def why_not_shared(device: Device, index: int) -> str:
    """Why another process cannot read memory of `device`, which is "cuda:`index`"; "" if it can."""
    try:
        exchange = device.share(_NBYTES)
        exchange.open({0: exchange.handle})
        asyncio.run(arrived(exchange.write(device.mark(_pattern(index)), [BlockPart(0, 0, 0, _NBYTES)])))
        command = [sys.executable, "-m", __name__, str(index), exchange.handle.hex()]
        other = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        exchange.shut()
        exchange.free()
    except (RefusedError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return str(error) if isinstance(error, RefusedError) else describe(error)
    last = (other.stdout or other.stderr).strip().splitlines()[-1:]
    return "" if other.returncode == 0 else "".join(last) or f"another process has ended with {other.returncode}"


def _pattern(index: int) -> torch.Tensor:
    return (torch.arange(_NBYTES) % 251).to(torch.uint8).to(f"cuda:{index}")


def _read(index: int, handle: bytes) -> str:
    """Why this process cannot read the block with this handle; "" if it can."""
    device = CudaDevice(index)
    try:
        exchange = device.share(_NBYTES)
        exchange.open({0: exchange.handle, 1: handle})
    except RefusedError as refusal:
        return str(refusal)
    x = torch.zeros(_NBYTES, dtype=torch.uint8, device=device.place)
    mark = device.mark(x)
    asyncio.run(arrived(exchange.read(mark, [BlockPart(1, 0, 0, _NBYTES)])))
    mark.join()
    return "" if torch.equal(x, _pattern(index)) else "another process reads other bytes than were written"


if __name__ == "__main__":
    sys.exit(_read(int(sys.argv[1]), bytes.fromhex(sys.argv[2])) or None)
