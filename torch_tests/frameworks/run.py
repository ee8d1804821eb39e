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

from torch_tests import launching

FOLDER = Path(__file__).parent
LIMIT_S = 180  # of each program


def programs(backend: str, size: int) -> dict[str, list[str]]:
    """The command of each."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    lightning = [sys.executable, str(FOLDER / "lightning_ddp.py"), backend, str(size)]
    ray = [sys.executable, str(FOLDER / "ray_train.py"), backend, str(size)]
    accelerate = [*torchrun, str(FOLDER / "accelerate_loop.py"), backend]
    trainer = [*torchrun, str(FOLDER / "transformers_trainer.py"), backend]
    return {
        "lightning": lightning,
        "lightning_with_hook": [*lightning, "hook"],
        "lightning_with_wrapped_hook": [*lightning, "wrapped_hook"],
        "lightning_with_registered_hook": [*lightning, "registered_hook"],
        "lightning_with_oktopk": [*lightning, "oktopk"],
        "lightning_with_eager_sgd": [*lightning, "eager_sgd"],
        "lightning_with_a_late_rank": [sys.executable, str(FOLDER / "lightning_late_rank.py"), backend, str(size)],
        "accelerate": accelerate,
        "accelerate_with_oktopk": [*accelerate, "oktopk"],
        "accelerate_with_eager_sgd": [*accelerate, "eager_sgd"],
        "transformers_trainer": trainer,
        "transformers_trainer_with_oktopk": [*trainer, "oktopk"],
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
                done = launching.run(commands[name], environment, LIMIT_S)
                outcome, text = ("failed", done.stderr) if done.returncode else ("passed", "")
            except subprocess.TimeoutExpired:
                outcome, text = "failed", f"Error: not done after {LIMIT_S} s"
            line = {"test": name, "outcome": outcome, "text": text, "seconds": round(time.monotonic() - began, 1)}
            print(json.dumps(line), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
