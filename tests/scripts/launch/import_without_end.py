"""A module whose import does not end."""

import sys
import threading

print("loading", file=sys.stderr, flush=True)
threading.Event().wait()
