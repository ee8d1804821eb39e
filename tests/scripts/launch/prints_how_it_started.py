"""Say whether this process was forked from the template, which module it thinks it is, and whether numpy is loaded."""

import os
import sys
from pathlib import Path

command = Path("/proc/self/cmdline").read_bytes()
print("forked" if b"launch.template" in command else "afresh", __name__, "numpy" in sys.modules, os.environ["RANK"])
