"""What only a GPU can show to be fast: the measurements of `gpu.py`, with their targets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc_by_torch
from gpu_checks import NotHereError, Tell, by_route, hidden_share, is_stand_in, needs_hardware, own
from torch import Tensor

import asyncoll
from asyncoll.tensors import registered
from asyncoll.transport.staging import arrived
from asyncoll.transport.staging.cuda import CudaDevice
from trainers.experiment import experiment
from trainers.settings import Settings

CALLS, WARMUP = 20, 3
SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "100 MB": 10**8}
AGAINST_GLOO = {"64 KiB": 1.2, "1 MiB": 2.0, "16 MiB": 4.0, "100 MB": 4.0}
ARGUMENTS = {"4 MB": 10**6, "100 MB": 25 * 10**6}  # elements
LATE_S = 0.2
STAGED, PAGES = 10**9, 2**28  # bytes
MATRIX = 4096
Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement: `body` gives rank 0's values, and each of `targets` is (value, least or most, limit)."""

    name: str
    what: str
    body: Callable[[asyncoll.Communicator], Coroutine[Any, Any, Values]]
    targets: tuple[tuple[str, str, float], ...]
    ranks: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    def environment(self) -> Mapping[str, str]:
        return {}

    def run(self, tell: Tell) -> None:
        tell(asyncoll.run(self.body))

    def judge(self, values: Any) -> str:
        """The figures with their targets, and whether all are met."""
        if is_stand_in():
            return "not here: it has run, and a stand-in for a GPU shows no speed"
        parts, is_met = [], True
        for name, bound, limit in self.targets:
            value = values[name]
            is_met &= value >= limit if bound == "least" else value <= limit
            parts.append(f"{name} {value:.3g} (at {bound} {limit:g})")
        rest = [
            f"{name} {value:.3g}" for name, value in values.items() if name not in {each[0] for each in self.targets}
        ]
        return f"{'pass' if is_met else 'FAIL'}: {', '.join(parts + rest)}"


async def worst(comm: asyncoll.Communicator, seconds: list[float]) -> float:
    """The slowest rank's median."""
    mine = torch.tensor(median(seconds[WARMUP:]), dtype=torch.float64)
    return float(await comm.allreduce(mine, asyncoll.MAX))


async def timed(comm: asyncoll.Communicator, device: torch.device, call: Callable[[], Any]) -> float:
    """The slowest rank's median seconds of `call`, with the GPU's part of it."""
    seconds = []
    for _ in range(WARMUP + CALLS):
        torch.cuda.synchronize(device)
        await comm.barrier()
        start = time.perf_counter()
        found = call()
        if asyncio.iscoroutine(found):
            await found
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return await worst(comm, seconds)


# -- copies ---------------------------------------------------------------------------------------


async def copies(comm: asyncoll.Communicator) -> Values:
    """Copies from the GPU to pinned memory of the world, against memory that CUDA has allocated."""
    device = own(comm)
    x = torch.ones(PAGES // 4, device=device)
    theirs = torch.empty(x.numel(), pin_memory=True)
    seconds = await timed(comm, device, lambda: theirs.copy_(x, non_blocking=True))
    with contextlib.closing(CudaDevice(device.index)) as staging:
        ours = registered.current().pages(PAGES)
        if not staging.pin(ours):
            raise NotHereError("the driver refuses to pin shared memory")
        own_seconds = await timed(comm, device, lambda: arrived(staging.mark(x).fetch(0, ours)))
        staging.unpin(ours)
    return {"share": seconds / own_seconds, "GB/s": x.nbytes / own_seconds / 1e9}


async def waits(comm: asyncoll.Communicator) -> Values:
    """How long the host waits for a copy of 64 KiB from the GPU: asleep, awake, and by a coroutine, as calls do."""
    device = own(comm)
    x = torch.ones(SIZES["64 KiB"] // 4, device=device)
    host = torch.empty(x.numel(), pin_memory=True)

    def copied(*, asleep: bool) -> None:
        host.copy_(x, non_blocking=True)
        end = torch.cuda.Event(blocking=asleep)
        end.record()
        end.synchronize()

    with contextlib.closing(CudaDevice(device.index)) as staging:
        mirror = staging.pinned(x.nbytes)
        if mirror is None:
            raise NotHereError("the driver has no pinned memory")
        found = {
            "asleep: us": await timed(comm, device, partial(copied, asleep=True)),
            "awake: us": await timed(comm, device, partial(copied, asleep=False)),
            "by a coroutine: us": await timed(comm, device, lambda: arrived(staging.mark(x).fetch(0, mirror))),
        }
        staging.unpin(mirror)
    return {name: seconds * 1e6 for name, seconds in found.items()}


# -- calls ----------------------------------------------------------------------------------------


async def allreduce(comm: asyncoll.Communicator) -> Values:
    """Allreduce of float32 on the GPU, against Gloo with the same tensors. The two take turns."""
    needs_hardware()
    device = own(comm)
    dist.init_process_group("gloo")
    found: Values = {}
    for name, size in SIZES.items():
        x = torch.ones(size // 4, device=device)
        ours = await timed(comm, device, partial(comm.allreduce, x, asyncoll.MAX))
        theirs = await timed(comm, device, partial(dist.all_reduce, x, dist.ReduceOp.MAX))
        found[f"{name}: times as fast"] = theirs / ours
        found |= {f"{name}: us": ours * 1e6, f"{name}: us of Gloo": theirs * 1e6}
        if not bool((x == 1).all()):
            raise SystemExit("wrong results")
    await comm.barrier()
    dist.destroy_process_group()
    return found


async def link(comm: asyncoll.Communicator) -> Values:
    """The share of the link that an allreduce of 100 MB uses: each rank copies its tensor to the host and back."""
    device = own(comm)
    x = torch.ones(SIZES["100 MB"] // 4, device=device)
    host = torch.empty(x.numel(), pin_memory=True)

    def there_and_back() -> None:
        host.copy_(x, non_blocking=True)
        x.copy_(host, non_blocking=True)

    comm = await by_route(comm, "windows")
    bound = await timed(comm, device, there_and_back)  # all ranks at once, as in the call
    seconds = await timed(comm, device, lambda: comm.allreduce(x, asyncoll.MAX))
    return {"share of the link": bound / seconds, "ms": seconds * 1e3}


async def routes(comm: asyncoll.Communicator) -> Values:
    """Allreduce of long tensors through the host, whole and in windows, and through memory of the GPU."""
    device, seconds = own(comm), {}
    taken = {route: await by_route(comm, route) for route in ("whole", "windows", "direct")}
    for name in ("16 MiB", "100 MB"):
        x = torch.ones(SIZES[name] // 4, device=device)
        for route, each in taken.items():
            seconds[route, name] = await timed(each, device, partial(each.allreduce, x, asyncoll.MAX))
    found: Values = {f"{name}, {route}: ms": value * 1e3 for (route, name), value in seconds.items()}
    for name in ("16 MiB", "100 MB"):
        found[f"{name}: whole / windows"] = seconds["whole", name] / seconds["windows", name]
        found[f"{name}: windows / direct"] = seconds["windows", name] / seconds["direct", name]
    return found


async def matmul(comm: asyncoll.Communicator) -> Values:
    """How much longer a matrix multiplication takes while calls are staged."""
    needs_hardware()
    device = own(comm)
    a = torch.ones(MATRIX, MATRIX, device=device)
    x = torch.ones(SIZES["16 MiB"] // 4, device=device)

    def work() -> None:
        for _ in range(20):
            a @ a

    async def with_calls() -> None:
        under_way = comm.allreduce(x, asyncoll.MAX)
        with torch.cuda.stream(side):
            work()
        await under_way

    side = torch.cuda.Stream(device)
    alone = await timed(comm, device, work)
    return {"slow-down": await timed(comm, device, with_calls) / alone}


async def lag(comm: asyncoll.Communicator) -> Values:
    """How late the program's event loop is, in the 99th percentile, while 1 GB is staged."""
    x = torch.ones(STAGED // 4, device=own(comm))
    late: list[float] = []
    under_way = asyncio.ensure_future(comm.allreduce(x, asyncoll.MAX))
    while not under_way.done():
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - start - 0.001)
    await under_way
    p99 = torch.tensor(sorted(late)[int(0.99 * len(late))], dtype=torch.float64)
    return {"p99 ms": float(await comm.allreduce(p99, asyncoll.MAX)) * 1e3, "samples": float(len(late))}


async def solo(comm: asyncoll.Communicator) -> Values:
    """A solo round of 16 MiB with one rank 200 ms late, against the same on the host and the two copies."""
    device, count = own(comm), SIZES["16 MiB"] // 4
    host = torch.ones(count)
    x = host.to(device)

    async def rounds(name: str, x: Tensor) -> float:
        seconds = []
        for _ in range(WARMUP + CALLS):
            await comm.barrier()
            if comm.rank == comm.size - 1:
                await asyncio.sleep(LATE_S)
            start = time.perf_counter()
            await comm.solo_allreduce(x, name=name, op=asyncoll.MAX)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start if comm.rank < comm.size - 1 else 0.0)
        return await worst(comm, seconds)

    pinned = torch.empty(count, pin_memory=True)
    copied = await timed(comm, device, lambda: pinned.copy_(x, non_blocking=True))
    on_host, on_device = await rounds("host", host), await rounds("device", x)
    return {"ratio": on_device / (on_host + 2 * copied), "ms": on_device * 1e3, "host ms": on_host * 1e3}


async def rpc(comm: asyncoll.Communicator) -> Values:
    """A call of rank 1 that returns its argument, of 4 and of 100 MB on the GPU."""
    device, found = own(comm), Values()
    comm.rpc.register(echo)
    calls = comm.rpc.to(device)
    await comm.barrier()
    for name, count in ARGUMENTS.items():
        x, seconds = torch.ones(count, device=device), []
        for _ in range(WARMUP + CALLS):
            start = time.perf_counter()
            if comm.rank == 0:
                await calls.call(1, "echo", x)
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        found[f"{name}: ms"] = await worst(comm, seconds) * 1e3
    return found


async def torch_rpc(comm: asyncoll.Communicator) -> Values:
    """The same with torch RPC, whose agents pass tensors from GPU to GPU."""
    needs_hardware()
    device, found, peer = own(comm), Values(), str(1 - comm.rank)
    options = rpc_by_torch.TensorPipeRpcBackendOptions(device_maps={peer: {device: device}}, devices=[device])
    rpc_by_torch.init_rpc(str(comm.rank), rank=comm.rank, world_size=comm.size, rpc_backend_options=options)
    for name, count in ARGUMENTS.items():
        x, seconds = torch.ones(count, device=device), []
        for _ in range(WARMUP + CALLS):
            start = time.perf_counter()
            if comm.rank == 0:
                rpc_by_torch.rpc_sync("1", same, (x,))
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        found[f"{name}: ms"] = await worst(comm, seconds) * 1e3
    rpc_by_torch.shutdown()
    return found


def same(x: Tensor) -> Tensor:
    return x


async def training(comm: asyncoll.Communicator) -> Values:
    """Steps of a ResNet-50 with `OverlappedSGD`, against `AllreduceSGD`; and how much of an exchange is hidden."""
    needs_hardware()
    found: Values = {}
    for algorithm in ("allreduce_sgd", "overlapped_sgd"):
        settings = Settings.of(algorithm, workload="imagenet", full=True, device="cuda", rounds=20, batch=16)
        report = await experiment(comm, algorithm, settings)
        found[algorithm] = report.wall_s / report.rounds if report else 0.0
    hidden = await hidden_share(comm)
    ratio = found["overlapped_sgd"] / found["allreduce_sgd"] if comm.rank == 0 else 0.0
    return {"ratio": ratio, "hidden share": hidden, "ms": found["overlapped_sgd"] * 1e3}


async def echo(x: Tensor) -> Tensor:
    return x


TIMES = [
    Measurement(
        "copies",
        "copies through memory of the world, against cudaHostAlloc",
        copies,
        (("share", "least", 0.95),),
        ranks=(1,),
    ),
    Measurement("waits", "how long the host waits for the end of a short copy", waits, ()),
    Measurement(
        "allreduce",
        "allreduce against Gloo with tensors of the GPU",
        allreduce,
        tuple((f"{name}: times as fast", "least", limit) for name, limit in AGAINST_GLOO.items()),
    ),
    Measurement(
        "link", "the share of the link that a long allreduce uses", link, (("share of the link", "least", 0.7),)
    ),
    Measurement(
        "routes",
        "a long allreduce through the host, whole and in windows, and through memory of the GPU",
        routes,
        tuple(
            (f"{name}: {pair}", "least", limit)
            for name in ("16 MiB", "100 MB")
            for pair, limit in (("whole / windows", 1.5), ("windows / direct", 5.0))
        ),
    ),
    Measurement("matmul", "a matrix multiplication beside staged calls", matmul, (("slow-down", "most", 1.05),)),
    Measurement("lag", "the program's loop while 1 GB is staged", lag, (("p99 ms", "most", 1.0),), ranks=(2,)),
    Measurement(
        "solo", "a solo round with a late rank, against the host's and the copies", solo, (("ratio", "most", 1.1),)
    ),
    Measurement(
        "training", "steps with an overlapped exchange, against those without", training, (("ratio", "most", 1.0),)
    ),
    Measurement("rpc", "calls of functions with tensors of the GPU", rpc, (), ranks=(2,)),
    Measurement("torch-rpc", "the same with torch RPC", torch_rpc, (), ranks=(2,)),
]
