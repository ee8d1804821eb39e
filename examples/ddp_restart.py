"""Train with torch's DistributedDataParallel over asyncoll, and resume by itself after a rank has been killed.

Run `torchrun --nproc-per-node 3 --max-restarts 1 examples/ddp_restart.py --kill-at 12`. Rank 1 is killed in the
backward pass of step 12. The other ranks raise an error at once, which names it. Then torchrun starts all ranks again,
and they go on from the last checkpoint.
"""

import argparse
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from language import load, save
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

ROWS = 16  # of each rank and step


def make_model() -> torch.nn.Module:
    """The same model at each call."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def rows(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a rank in a step. They do not depend on earlier steps, so a run can resume anywhere."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x.sin().sum(dim=1, keepdim=True)


def kill(_: Tensor) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/restart"), help="for checkpoints; a run resumes there"
    )
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument(
        "--kill-at", type=int, default=-1, help="kill rank 1 in this step, unless it has been restarted"
    )
    args = parser.parse_args()

    dist.init_process_group("asyncoll", timeout=timedelta(minutes=1))
    rank = dist.get_rank()
    is_first_run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    saved = load(args.folder / "checkpoint.pt")  # before the first collective call, so no rank has saved a newer one
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        print(f"rank {rank} resumes at step {step}", flush=True)

    ddp = DistributedDataParallel(model)
    while step < args.steps:
        x, y = rows(step, rank)
        prediction = ddp(x)
        if rank == 1 and step == args.kill_at and is_first_run:
            prediction.register_hook(kill)  # runs as the backward pass begins
        loss = torch.nn.functional.mse_loss(prediction, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % args.every == 0 or step == args.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            save(args.folder / "checkpoint.pt", rank, state)
    if rank == 0:
        print(f"{step} steps done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
