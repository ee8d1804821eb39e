"""Rank 1 stops itself, by when all others end; it writes its process id into the file that the argument names."""

import os
import signal
import sys
from pathlib import Path

if os.environ["RANK"] == "1":
    Path(sys.argv[1]).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    print("it went on")
