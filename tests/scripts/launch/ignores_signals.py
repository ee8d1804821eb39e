"""A rank that finishes gracefully on the signals that the arguments name, and ignores the others."""

import signal
import sys

answered = {getattr(signal, name) for name in ("SIGINT", "SIGTERM") if name in sys.argv[1:]}
for signum in {signal.SIGINT, signal.SIGTERM} - answered:
    signal.signal(signum, signal.SIG_IGN)
# Blocked, then taken: a handler of Python's that is noted just before a `signal.pause` does not end that pause.
signal.pthread_sigmask(signal.SIG_BLOCK, answered)
print("ready", flush=True)
received = signal.sigwait(answered)
print("finished after", received.name)
