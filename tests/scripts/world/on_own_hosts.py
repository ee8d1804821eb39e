"""Run a script as if every rank, or as many in a row as RANKS_PER_HOST says, were on a host of their own."""

import os
import runpy
import sys

from asyncoll.world import meeting

host = int(os.environ["RANK"]) // int(os.environ.get("RANKS_PER_HOST", "1"))
meeting._machine = lambda: str(host)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
