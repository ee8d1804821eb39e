"""Runs a program as torchrun does, in ranks that are forks of this process, so none of them has to import torch.

Arguments: the number of ranks, the number of restarts, and the program with its arguments. A rank that raises an
exception shows it at once. torchrun ends the other ranks by SIGTERM; here they ignore it, and so tell their own error.

With JOB and ENDPOINT in the environment this is one of two agents of that job, which meet there.
"""

import os
import runpy
import signal
import sys
import traceback
import uuid

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank(*command):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.argv = [*command]
    sys.path[0] = os.path.dirname(command[0])
    try:
        runpy.run_path(command[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        raise


if __name__ == "__main__":
    size, restarts, *program = sys.argv[1:]
    job = os.environ.get("JOB")
    nodes = 2 if job else 1
    here = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=int(size),
        max_restarts=int(restarts),
        monitor_interval=0.1,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint=os.environ.get("ENDPOINT", "localhost:0"),
        run_id=job or str(uuid.uuid4()),
        local_addr="127.0.0.1" if job else None,
    )
    elastic_launch(here, rank)(*program)
