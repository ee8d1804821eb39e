"""Rely on everything that a plain interpreter does for `__main__`, and at its end."""

import atexit
import faulthandler
import multiprocessing
import pickle
import sys
import threading
import time


class Thing:
    """Pickled by name, so `__main__` must be this file."""

    value = 42


def double(number: int) -> int:
    return 2 * number


def late() -> None:
    threading.main_thread().join()
    print("thread done")


if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing())).value == 42  # noqa: S301 - our own bytes
    assert sys.argv == [__file__, "-n", "3", "--help"], sys.argv
    assert sys.stdin.read() == ""
    assert faulthandler.is_enabled()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("spawned", pool.map(double, [21]))
    atexit.register(print, "atexit done")
    threading.Thread(target=late).start()
    time.sleep(0)
    print("main done")
