"""Rank 1 ends in the way that the first argument names; the others wait for ever."""

import os
import signal
import sys
import threading

if os.environ["RANK"] == "1":
    match sys.argv[1]:
        case "raise":
            raise ValueError("rank one is unwell")
        case "lingering":
            threading.Thread(target=threading.Event().wait).start()
            raise ValueError("rank one is unwell, and its thread does not end")
        case "status":
            sys.exit(7)
        case "message":
            sys.exit("rank one gives up")
        case "abrupt":
            os._exit(9)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
signal.pause()
