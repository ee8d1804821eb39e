"""Run a script in which rank 1 cannot map the memory of the others."""

import os
import resource
import runpy
import sys

if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
