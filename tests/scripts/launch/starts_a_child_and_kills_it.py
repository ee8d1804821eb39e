"""Every rank starts a child; the first argument's folder gets all pids."""

import os
import signal
import subprocess
import sys
from pathlib import Path

folder = Path(sys.argv[1])
child = subprocess.Popen(["sleep", "1000"])
for pid in (os.getpid(), child.pid):
    (folder / str(pid)).touch()
(folder / f"template-{os.environ['RANK']}").write_text(str(os.getppid()))
print("ready", flush=True)
try:
    signal.pause()
finally:
    child.kill()
    child.wait()
