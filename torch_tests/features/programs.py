"""Ways to start ranks, and other packages beside the process group."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import torch
import torch.distributed as dist
from torch.testing import assert_close

from torch_tests import launching
from torch_tests.features import feature

AGENT = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group(sys.argv[1])
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    n = dist.get_world_size()
    assert x.item() == n * (n + 1) / 2, x
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == n - 1:
        os._exit(3)
    dist.all_reduce(x)
    assert x.item() == n * n * (n + 1) / 2, x
    dist.barrier()
    if dist.get_rank() == 0:
        open(sys.argv[2], "w").write("done")
    dist.destroy_process_group()
"""

ALONE = """
    import sys
    import torch.distributed as dist
    import torch
    name, rank, size, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    for turn in range(3):
        dist.init_process_group(name, init_method=f"file://{path}{turn}", rank=rank, world_size=size)
        assert dist.get_backend() == name
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        assert x.item() == size * (size + 1) / 2, x
        dist.barrier()
        dist.destroy_process_group()
    print("done")
"""


def _folder() -> str:
    return os.environ["TORCH_TESTS_FOLDER"]


def _alone() -> tuple[bool, int]:
    """Whether this process is to start others, and how many: the other ranks of the test do nothing."""
    return os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"])


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


@feature(alone=True, sabotage=None)
def elastic_agent(backend: str) -> None:
    """Under torchrun, a rank dies in the first round, and the second one ends well."""
    first, size = _alone()
    if not first:
        return
    script, done = os.path.join(_folder(), "script.py"), os.path.join(_folder(), "done")
    with open(script, "w") as file:
        file.write(textwrap.dedent(AGENT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", script, backend, done]
    ended = launching.run(command, _plain_environment(), limit_s=80)
    assert not ended.returncode, ended.stderr
    with open(done) as file:
        assert file.read() == "done"


def _spawned(rank: int, size: int, backend: str, path: str) -> None:
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert_close(x, torch.tensor([size * (size + 1) / 2]))
    dist.destroy_process_group()


@feature(alone=True, sabotage=None)
def spawned_processes(backend: str) -> None:
    first, size = _alone()
    if first:
        torch.multiprocessing.spawn(_spawned, (size, backend, os.path.join(_folder(), "spawned")), nprocs=size)


def _doubled(x: Any) -> Any:
    return x * 2


@feature()
def remote_calls_beside(backend: str) -> None:
    """torch.distributed.rpc in the same processes: it has a network of its own."""
    import torch.distributed.rpc as rpc

    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{_folder()}/rpc", num_worker_threads=4)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert_close(x, torch.tensor([size * (size + 1) / 2]))
    assert_close(rpc.rpc_sync(f"worker{(rank + 1) % size}", _doubled, (x,)), x * 2)
    rpc.shutdown()
    y = torch.tensor([float(rank)])
    dist.all_reduce(y)
    assert_close(y, torch.tensor([size * (size - 1) / 2]))


@feature(alone=True)
def named_by_device(backend: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(f"cpu:{backend}", init_method=f"file://{_folder()}/devices", rank=rank, world_size=size)
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert_close(x, torch.tensor([size * (size + 1) / 2]))
    dist.destroy_process_group()


@feature()
def a_group_of_gloo_beside(backend: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    other = dist.new_group(backend="gloo")
    assert dist.get_backend(other) == "gloo"
    for group in (other, None):
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x, group=group)
        assert_close(x, torch.tensor([size * (size + 1) / 2]))


@feature()
def data_loaders(backend: str) -> None:
    """Forked and spawned workers of a DataLoader, with a sampler that shares the rows."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rank, size = dist.get_rank(), dist.get_world_size()
    rows = TensorDataset(torch.arange(24.0))
    for context in ("fork", "spawn"):
        sampler: Any = DistributedSampler(rows, shuffle=False)
        total = torch.zeros(1)
        for (part,) in DataLoader(rows, batch_size=2, sampler=sampler, num_workers=1, multiprocessing_context=context):
            total += part.sum()
        assert_close(total, torch.arange(24.0)[rank::size].sum()[None])
        dist.all_reduce(total)
        assert_close(total, torch.arange(24.0).sum()[None])


@feature(alone=True, sabotage=None)
def by_the_entry_point_alone(backend: str) -> None:
    """Three worlds, one after the other, of a program that imports torch alone.

    Without torch's search for entry points the same program does not know the backend: nothing else has imported it.
    """
    first, _ = _alone()
    if not first:
        return
    assert backend not in ALONE
    assert _ends_of_alone(backend, autoload="1") == ["done\n"] * _alone()[1]
    if backend != "gloo":
        assert not any(_ends_of_alone(backend, autoload="0"))


def _ends_of_alone(backend: str, autoload: str) -> list[str]:
    """What each rank of `ALONE` prints. Python is isolated: it looks for modules in its installation only."""
    folder = os.path.join(_folder(), f"autoload {autoload}")
    os.mkdir(folder)
    size = _alone()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-I", "-c", textwrap.dedent(ALONE), backend, str(rank), str(size), f"{folder}/store"],
            cwd=folder,
            env=_plain_environment() | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    return [rank.communicate(timeout=100)[0] for rank in ranks]
