"""A kernel whose cell runs two ranks. Each starts a child; the first argument's folder gets all pids."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from asyncoll import notebook

folder = Path(sys.argv[1])


async def main(comm):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # noqa: ASYNC220 (as users do)
    for pid in (os.getpid(), child.pid):
        (folder / str(pid)).touch()
    (folder / "folder").write_text(os.environ["ASYNCOLL_FOLDER"])
    await comm.barrier()
    print("ready", flush=True)
    await asyncio.Event().wait()


notebook.run(main, ranks=2)
