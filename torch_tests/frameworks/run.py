"""Runs the programs of the frameworks with one backend.

python -m torch_tests.frameworks.run gloo|asyncoll|floats RANKS RESULTS [PROGRAM...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
LIMIT_S = 180  # of each program


def programs(backend: str, size: int) -> dict[str, list[str]]:
    """The command of each."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    lightning = [sys.executable, str(FOLDER / "lightning_ddp.py"), backend, str(size)]
    ray = [sys.executable, str(FOLDER / "ray_train.py"), backend, str(size)]
    return {
        "lightning": lightning,
        "lightning_with_hook": [*lightning, "hook"],
        "lightning_with_registered_hook": [*lightning, "register"],
        "accelerate": [*torchrun, str(FOLDER / "accelerate_loop.py"), backend],
        "transformers_trainer": [*torchrun, str(FOLDER / "transformers_trainer.py"), backend],
        "ray_train": ray,
        "ray_train_with_restart": [*ray, "restart"],
    }


def main(backend: str, size: int, path: str, names: list[str]) -> None:
    root = FOLDER.parent.parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    commands = programs(backend, size)
    with open(path, "a") as results:
        for name in names or commands:
            began = time.monotonic()
            try:
                done = subprocess.run(commands[name], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
                outcome, text = ("failed", done.stderr) if done.returncode else ("passed", "")
            except subprocess.TimeoutExpired:
                outcome, text = "failed", f"Error: not done after {LIMIT_S} s"
            line = {"test": name, "outcome": outcome, "text": text, "seconds": round(time.monotonic() - began, 1)}
            print(json.dumps(line), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
