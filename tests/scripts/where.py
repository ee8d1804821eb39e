"""Say whether this process was forked from the template, and which module it thinks it is."""

import os
from pathlib import Path

command = Path("/proc/self/cmdline").read_bytes()
print("forked" if b"launch.template" in command else "afresh", __name__, os.environ["RANK"])
