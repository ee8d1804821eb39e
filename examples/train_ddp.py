"""Train a language model with torch's DistributedDataParallel over gloo.

Run `torchrun --nproc-per-node 4 examples/train_ddp.py` or `asyncoll launch -n 4 examples/train_ddp.py`.
"""

import argparse
import contextlib
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from language import Batches, Transformer, loss_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

ACCUMULATE, CLIP_NORM, WARM_UP, SEED = 4, 1.0, 10, 0


def main() -> None:
    """Train, and print the validation loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/train"), help="for checkpoints; training resumes there"
    )
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints and validations")
    parser.add_argument("--straggle-s", type=float, default=0.0, help="sleep of one random rank in each step")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    batches = Batches()
    sampler: DistributedSampler[int] = DistributedSampler(batches, size, rank, seed=SEED, drop_last=True)
    loader = DataLoader(batches, batch_size=None, sampler=sampler, num_workers=1)
    validation = list(DataLoader(Batches(validation=True), batch_size=None))[::4]

    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def rate(step: int) -> float:
        return min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * min(step / args.steps, 1.0)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    step, checkpoint = 0, args.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        step = saved["step"]

    steps_per_epoch = len(loader) // ACCUMULATE
    started = time.perf_counter()
    while step < args.steps:
        epoch, done = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(loader):
            if index < done * ACCUMULATE or index >= steps_per_epoch * ACCUMULATE:
                continue  # the run that saved the checkpoint has used it, or it is not enough for a step
            is_last = (index + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                    loss = loss_of(model, inputs, targets) / ACCUMULATE
                loss.backward()
            if not is_last:
                continue
            straggler = int(torch.randint(size, (), generator=torch.Generator().manual_seed(step)))
            if rank == straggler:
                time.sleep(args.straggle_s)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % args.every == 0 and rank == 0:
                with torch.no_grad():
                    mean = sum(loss_of(model.module, *batch).item() for batch in validation) / len(validation)
                print(f"step {step}: validation loss {mean:.4f}, {time.perf_counter() - started:.1f} s", flush=True)
                args.folder.mkdir(parents=True, exist_ok=True)
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"scheduler": scheduler.state_dict(), "step": step}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
            if step == args.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
