"""Train a language model with AD-PSGD: `train_ddp.py`,
in which a rank averages its model with one other rank at a time.

Run `torchrun --nproc-per-node 4 examples/train_adpsgd.py`
or `asyncoll launch -n 4 examples/train_adpsgd.py`.
"""

import argparse
import math
import os
import time
from pathlib import Path

import torch
from language import Batches, Transformer, loss_of, straggle
from torch.utils.data import DataLoader, DistributedSampler

import asyncoll
from asyncoll.training import ADPSGD, Checkpoints

MICRO, CLIP, WARM_UP = 4, 1.0, 10


async def main(comm: asyncoll.Communicator) -> None:
    """Train, and print the validation loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("runs/train"), help="for checkpoints; a run resumes there")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints and validations")
    parser.add_argument("--straggle-s", type=float, default=0.0, help="sleep of one random rank in each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    args = parser.parse_args()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)
    batches = Batches()
    sampler: DistributedSampler[int] = DistributedSampler(batches, size, rank, seed=args.seed, drop_last=True)
    loader = DataLoader(batches, batch_size=None, sampler=sampler, num_workers=1)
    validation = list(DataLoader(Batches(validation=True), batch_size=None))[::4]

    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def rate(step: int) -> float:
        return min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * min(step / args.steps, 1.0)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    sgd = ADPSGD(comm, model, optimizer, clip_norm=CLIP, accumulate=MICRO, scheduler=scheduler)
    step, due = 0, args.every
    saved = await Checkpoints(comm, args.folder).newest(common=False)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        sgd.load_state_dict(saved["sgd"])
        step, due = saved["step"], saved["step"] + args.every

    steps_per_epoch = len(loader) // MICRO
    started = time.perf_counter()
    while step < args.steps:
        epoch, done = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(loader):
            if index < done * MICRO or index >= steps_per_epoch * MICRO:
                continue  # the run that saved the checkpoint has used it, or it is not enough for a step
            if index % MICRO == 0:
                straggle(step, rank, size, args.straggle_s)
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = loss_of(model, inputs, targets)
            loss.backward()
            await sgd.step()
            if (index + 1) % MICRO:
                continue
            step += 1
            if step >= due:
                due += args.every
                if rank == 0:
                    with torch.no_grad():
                        mean = sum(loss_of(model, *batch).item() for batch in validation) / len(validation)
                    print(f"step {step}: validation loss {mean:.4f}, {time.perf_counter() - started:.1f} s", flush=True)
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "step": step,
                    "sgd": sgd.state_dict(),
                }
                Checkpoints(comm, args.folder).save(step, **state)
            if step >= args.steps:
                break
    await sgd.finish()


if __name__ == "__main__":
    asyncoll.run(main)
