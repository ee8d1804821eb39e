"""The command `asyncoll`, which is `python -m asyncoll`. Ctrl-C ends it even while it imports what it needs."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command. Until its options are read, Ctrl-C ends the process at once; then it is KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise Ctrl-C is not for this process, as after nohup
        signal.signal(signal.SIGINT, _end)
    from asyncoll.cli import main as command

    command(prog_name="asyncoll", obj=lambda: signal.signal(signal.SIGINT, handler))


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)


if __name__ == "__main__":
    main()
