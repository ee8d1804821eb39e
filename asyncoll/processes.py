"""What the kernel says of a process, or a thread, of this host."""

from pathlib import Path


def is_gone(number: int) -> bool:
    """Whether it has ended, be it that nobody has taken note of its end."""
    return _state_of(number) in ("", "Z", "X")


def is_stopped(number: int) -> bool:
    """Whether it has been stopped, as by SIGSTOP or a debugger."""
    return _state_of(number) in ("T", "t")


def _state_of(number: int) -> str:
    """The letter that ps shows; empty if there is none of that number."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
