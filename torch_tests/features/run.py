"""Runs features with one backend.

    python -m torch_tests.features.run gloo|asyncoll|floats|bytes RANKS RESULTS [FEATURE...]

`floats` and `bytes` name a sabotaged asyncoll whose results are off by one in tensors of floats, or of all dtypes. A
line of JSON for each feature is appended to the file RESULTS. Ranks are forks of this process, which has torch.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import shutil
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_tests.features import Feature, load
from torch_tests.features.sabotage import SABOTAGES, named

LIMIT_S = 120  # of each feature


def _rank(name: str, backend: str, rank: int, size: int, folder: str, results: Any) -> None:
    feature = load()[name]
    backend = named(backend)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "TORCH_TESTS_FOLDER": folder,
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, f"inductor{rank}"),
    }
    torch.manual_seed(rank)
    try:
        if not feature.alone:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=LIMIT_S / 2),
            )
        feature.run(backend)
        if not feature.alone:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        results.send(traceback.format_exc())
        results.close()
        sys.stderr.flush()
        os._exit(1)
    results.send("")


def run(name: str, feature: Feature, backend: str, size: int) -> tuple[str, str]:
    """The outcome, and the error of the first rank that told one."""
    if feature.sizes is not None and size not in feature.sizes:
        return "skipped", f"for {' or '.join(map(str, feature.sizes))} ranks"
    if backend in SABOTAGES and feature.sabotage != backend:
        return "skipped", "does not depend on these values"
    folder = tempfile.mkdtemp()
    context = torch.multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(name, backend, rank, size, folder, theirs))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    until = time.monotonic() + LIMIT_S
    waiting, error = list(pipes), ""
    while waiting and not error:
        ready = multiprocessing.connection.wait(waiting, max(0, until - time.monotonic()))
        if not ready:
            error = f"ranks {[pipes.index(pipe) for pipe in waiting]} were not done after {LIMIT_S} s"
        for pipe in ready:
            waiting.remove(pipe)
            try:
                error = error or pipe.recv()
            except EOFError:
                error = error or f"rank {pipes.index(pipe)} died"
    for process in processes:
        process.join(0 if error else LIMIT_S)
        if process.is_alive():
            error = error or "a rank was done and did not end"
            process.kill()
            process.join()
    statuses = [process.exitcode for process in processes]
    if not error and any(statuses):
        error = f"the exit statuses of the ranks are {statuses}"
    shutil.rmtree(folder, ignore_errors=True)
    return ("failed", error) if error else ("passed", "")


def main(backend: str, size: int, path: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    features = load()
    with open(path, "a") as results:
        for name in names or features:
            began = time.monotonic()
            outcome, text = run(name, features[name], backend, size)
            line = {"test": name, "outcome": outcome, "text": text, "seconds": round(time.monotonic() - began, 1)}
            print(json.dumps(line), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
