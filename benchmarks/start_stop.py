"""Start and stop ranks by each engine many times, and count what is left of them.

    python benchmarks/start_stop.py [--cycles 20] [--engines launch,hosts,torchrun,srun,notebook,ray,ray_cluster]

In every second cycle rank 1 is killed by SIGKILL: the log of the engine must then say first that rank 1 is lost. In the
others the ranks must end by themselves. Counted as left are processes, unix sockets and files whose environment or path
has the folder of this run, names in /dev/shm, children, threads and descriptors of this process and, of Ray, actors and
placement groups.

ssh and srun are the stubs of `tests/stubs`; torchrun has two agents. `ray` has one cluster for all cycles, and
`ray_cluster` one for each. Not counted is what torchrun and Ray leave themselves: folders of logs, and at each
`ray.init` an open log.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import Record, parser

import asyncoll
from asyncoll import notebook
from asyncoll.launch.process_tree import children
from asyncoll.launch.rank_environment import reserve_port
from asyncoll.transport.keys import write_key

ROOT = Path(__file__).parent.parent
ENGINES = ["launch", "hosts", "torchrun", "srun", "notebook", "ray", "ray_cluster"]
WAIT_S = 20.0  # for what is about to end
LOST = re.compile(r"rank (\d+) .*?(?:is gone|was killed|exited with)")
OTHERS = ("torchelastic_", "ray", "output-")  # of torchrun, of a cluster of Ray that runs, and of the stub of srun
Log = str  # all that an engine has shown
Cycle = Callable[[str], Log]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cycles", type=int, default=20)
    options.add_argument("--engines", type=lambda text: text.split(","), default=ENGINES)
    record = Record(options, "start_stop")
    chosen, raw = record.arguments, {}
    lines = [["engine", "cycles", "as they must", "left", "s per cycle"]]
    for engine in chosen.engines:
        with tempfile.TemporaryDirectory(prefix="cycles-", dir="/tmp", ignore_cleanup_errors=True) as name:
            with STARTS[engine](Path(name)) as cycle:
                raw[engine] = [one(cycle, Path(name), number) for number in range(chosen.cycles)]
        well = sum(each["well"] for each in raw[engine])
        left = [each["left"] for each in raw[engine] if each["left"]]
        seconds = sum(each["s"] for each in raw[engine]) / chosen.cycles
        lines.append([engine, str(chosen.cycles), str(well), str(left or "nothing"), f"{seconds:.1f}"])
        record.table(engine, [lines[0], lines[-1]])
        record.keep(raw)
    record.table("all", lines)
    record.write(raw)


def one(cycle: Cycle, folder: Path, number: int) -> dict[str, Any]:
    """One start and stop: whether it went as it must, what is left, and its time."""
    is_killed = bool(number % 2)
    begin, before = time.perf_counter(), state(folder)
    log = cycle("kill" if is_killed else "end")
    seconds = time.perf_counter() - begin
    while (left := state(folder) - before) and time.perf_counter() - begin < seconds + WAIT_S:
        time.sleep(0.05)
    lost = LOST.search(log)
    well = lost is not None and lost[1] == "1" if is_killed else "sum 1 1" in log
    if not well or (left and number > 1):  # the first cycles load modules, whose files stay open
        print(f"{cycle.__qualname__}, cycle {number}: left {left}\n{log}", file=sys.stderr, flush=True)
    return {"well": well, "left": sorted(left) if number > 1 else [], "s": seconds}


def state(folder: Path) -> set[str]:
    """What exists now."""
    found = {f"child {pid}" for pid in children()} | {f"thread {each.name}" for each in threading.enumerate()}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            if not (target := os.readlink(descriptor)).startswith(f"{folder}/ray/"):
                found.add(f"descriptor of {re.sub('[0-9]+', '', target)} {descriptor.name}")
    found |= {f"memory {name}" for name in os.listdir("/dev/shm") if name.startswith("asyncoll")}
    paths = [path.relative_to(folder) for path in folder.rglob("*")]
    found |= {f"file {path}" for path in paths if not any(part.startswith(OTHERS) for part in path.parts)}
    for line in Path("/proc/net/unix").read_text().splitlines():
        if str(folder) in line and "/ray" not in line:
            found.add(f"socket {line.split()[-1]}")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in (process / "environ").read_bytes():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if not re.search(r"ray/|ray::IDLE|setproctitle", command):
                    found.add(f"process {command:.80}")
    return found | ray_state()


def ray_state() -> set[str]:
    """The actors and placement groups of Ray that are not gone."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return set()
    actors = ray._private.state.actors().values()
    groups = ray.util.placement_group_table()
    return {f"actor {each['ActorID']}" for each in actors if each["State"] != "DEAD"} | {
        f"group {name}" for name, each in groups.items() if each["state"] != "REMOVED"
    }


# -- the engines ----------------------------------------------------------------------------------


@contextlib.contextmanager
def launch(folder: Path) -> Iterator[Cycle]:
    yield lambda how: shown(folder, [*asyncoll_command("launch", "-n", "2"), __file__, "as-rank", how])


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[Cycle]:
    yield lambda how: shown(folder, [*asyncoll_command("launch", "--hosts", "a:1,b:1"), __file__, "as-rank", how])


@contextlib.contextmanager
def srun(folder: Path) -> Iterator[Cycle]:
    write_key(folder / ".asyncoll.key")
    command = ["srun", "-N", "2", "-n", "2", sys.executable, __file__, "as-rank"]
    shown(folder, [*command, "end"])  # it makes the folders of its nodes
    yield lambda how: shown(folder, [*command, how])


@contextlib.contextmanager
def torchrun(folder: Path) -> Iterator[Cycle]:
    write_key(folder / ".asyncoll.key")
    for host in "ab":
        (folder / host).mkdir()

    def cycle(how: str) -> Log:
        with reserve_port() as held:
            place = f"localhost:{held.getsockname()[1]}"
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--local-addr", "localhost"]
            command += [__file__, "as-rank", how]
            agents = [start(folder, command, TMPDIR=str(folder / host)) for host in "ab"]
            logs = [agent.communicate()[0] for agent in agents]
        return "\n".join(logs)

    yield cycle


@contextlib.contextmanager
def cells(folder: Path) -> Iterator[Cycle]:
    tempfile.tempdir = str(folder)

    def cycle(how: str) -> Log:
        try:
            return "\n".join(notebook.run(work, how, ranks=2))
        except asyncoll.AsyncollError as error:
            return str(error)

    yield cycle


@contextlib.contextmanager
def ray(folder: Path) -> Iterator[Cycle]:
    with cluster(folder):
        yield ray_cycle


@contextlib.contextmanager
def ray_cluster(folder: Path) -> Iterator[Cycle]:
    def cycle(how: str) -> Log:
        with cluster(folder):
            return ray_cycle(how)

    yield cycle


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    from ray import init, shutdown

    small = {"include_dashboard": False, "object_store_memory": 80_000_000, "log_to_driver": False}
    init(num_cpus=2, _temp_dir=f"{folder}/ray", **small)
    try:
        yield
    finally:
        shutdown()


def ray_cycle(how: str) -> Log:
    import asyncoll.ray

    try:
        return "\n".join(asyncoll.ray.run(work, how, ranks=2))
    except asyncoll.AsyncollError as error:
        return str(error)


STARTS = dict(zip(ENGINES, [launch, hosts, torchrun, srun, cells, ray, ray_cluster], strict=True))


def asyncoll_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "asyncoll", *words]


def shown(folder: Path, command: list[str]) -> Log:
    return start(folder, command).communicate()[0]


def start(folder: Path, command: list[str], **more: str) -> subprocess.Popen[str]:
    """A program whose environment has the folder, which all processes that it starts inherit."""
    path = f"{ROOT / 'tests' / 'stubs'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {
        "STUB_HOSTS": str(folder),
        "TMPDIR": str(folder),
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": "",
        "PATH": path,
        **more,
    }
    return subprocess.Popen(
        command, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


# -- a rank ---------------------------------------------------------------------------------------


async def work(comm: asyncoll.Communicator, how: str) -> str:
    x = np.full(1, comm.rank)
    await comm.allreduce(x)
    if how == "kill" and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await comm.barrier()
    return f"sum {x[0]} {comm.size - 1}"


async def show(comm: asyncoll.Communicator, how: str) -> None:
    print(await work(comm, how), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["as-rank"]:
        asyncoll.run(show, sys.argv[2])
    else:
        main()
