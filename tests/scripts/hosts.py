"""Run a script as if every rank were on a host of its own."""

import os
import runpy
import sys

from asyncoll import rendezvous

rendezvous._machine = lambda: os.environ["RANK"]
runpy.run_path(sys.argv[1], run_name="__main__")
