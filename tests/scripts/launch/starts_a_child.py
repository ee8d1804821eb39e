"""Every rank starts a child, in a group of its own if asked to; the first argument's folder gets all pids."""

import os
import signal
import subprocess
import sys
from pathlib import Path

folder = Path(sys.argv[1])
child = subprocess.Popen(["sleep", "1000"], start_new_session="apart" in sys.argv)
for pid in (os.getpid(), child.pid):
    (folder / str(pid)).touch()
(folder / "template").write_text(str(os.getppid()))
(folder / "rendezvous").write_text(os.environ["ASYNCOLL_FOLDER"])
print("ready", flush=True)
if "leave" not in sys.argv:
    signal.pause()
child.returncode = 0
