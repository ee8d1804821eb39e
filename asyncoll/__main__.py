"""The command `asyncoll`, which is `python -m asyncoll`. Ctrl-C ends it even while it imports what it needs."""

import errno
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command. Until its options are read, Ctrl-C ends the process at once; then it is KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise Ctrl-C is not for this process, as after nohup
        signal.signal(signal.SIGINT, _end)
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    from asyncoll.cli import main as command

    try:
        command(prog_name="asyncoll", obj=lambda: signal.signal(signal.SIGINT, handler))
    except OSError as error:
        if error.filename is not None or error.errno != errno.ENOSPC:
            raise
        os.write(2, f"Error: the output cannot be written: {error.strerror}\n".encode())
        os._exit(1)  # without another try to write it


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)


if __name__ == "__main__":
    main()
