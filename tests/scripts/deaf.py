"""A rank that finishes gracefully on the signals that the arguments name, and ignores the others."""

import signal
import sys


def finish(signum: int, frame: object) -> None:
    print("finished after", signal.Signals(signum).name)
    sys.exit(0)


for name in ("SIGINT", "SIGTERM"):
    signal.signal(getattr(signal, name), finish if name in sys.argv[1:] else signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
