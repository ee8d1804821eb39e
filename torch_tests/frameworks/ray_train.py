"""Ray Train: `ray_train.py BACKEND RANKS [restart]` starts the ranks itself.

With "restart", the last rank is killed in its first backward pass, and Ray starts all ranks again.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from torch_tests import frameworks
from torch_tests.features.sabotage import named


def train(given: dict[str, Any]) -> None:
    """What each rank runs, in the process group that Ray has made."""
    folder, rank = Path(given["folder"]), dist.get_rank()
    assert (dist.get_backend(), dist.get_world_size()) == (given["backend"], given["ranks"])
    net: Any = prepare_model(frameworks.model())
    assert isinstance(net, DistributedDataParallel)
    if given["restart"] and rank == given["ranks"] - 1 and not (folder / "pid").exists():
        net.module[0].weight.register_hook(lambda _: die(folder))
    loader: Any = prepare_data_loader(DataLoader(TensorDataset(*frameworks.data()), batch_size=frameworks.EACH))
    optimizer = torch.optim.SGD(net.parameters(), lr=frameworks.RATE)
    for _ in range(frameworks.EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), targets)
            try:
                loss.backward()
            except RuntimeError as error:
                (folder / f"error-{rank}").write_text(str(error))
                raise
            optimizer.step()
    frameworks.check(net.module, given["ranks"])
    (folder / f"done-{rank}").touch()


def die(folder: Path) -> None:
    (folder / "pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def main(backend: str, ranks: int, restart: bool) -> None:
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise Ray writes one to the home folder
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as path:
        folder = Path(path)
        ray.init(
            num_cpus=ranks,
            include_dashboard=False,
            runtime_env={"worker_process_setup_hook": lambda: named(backend)},
            _temp_dir=path,
        )
        given = {"backend": named(backend), "ranks": ranks, "restart": restart, "folder": path}
        trainer = TorchTrainer(
            train,
            train_loop_config=given,
            torch_config=TorchConfig(backend=given["backend"]),
            scaling_config=ScalingConfig(num_workers=ranks),
            run_config=RunConfig(storage_path=path, failure_config=FailureConfig(max_failures=int(restart))),
        )
        try:
            trainer.fit()
        finally:
            ray.shutdown()  # its processes write to the folder
        assert all((folder / f"done-{rank}").exists() for rank in range(ranks))
        if restart:
            pid = (folder / "pid").read_text()
            for rank in range(ranks - 1):
                said = (folder / f"error-{rank}").read_text()
                assert f"rank {ranks - 1} (host " in said, said
                assert f"pid {pid}) is gone" in said, said


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "restart" in sys.argv[3:])
