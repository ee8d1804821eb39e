"""`python -m asyncoll.testing.explore`: explores all cases, and prints how many states each has.

Exits with 1 and the shortest trace if a rule is broken. It takes no options: what is to be explored is in `cases.py`.
"""

from __future__ import annotations

import sys

from asyncoll.testing.explore.cases import LONG, SHORT
from asyncoll.testing.explore.explorer import CounterexampleError, explore


def main() -> int:
    """Explore all cases. Returns the exit code."""
    states, seconds = 0, 0.0
    for case in (*SHORT, *LONG):
        try:
            found = explore(case.model)
        except CounterexampleError as error:
            print(f"{case}\n{error}")
            return 1
        states, seconds = states + found.states, seconds + found.seconds
        counts = f"{found.states:>9,} states, {found.moves:>10,} moves, depth {found.depth:>2}, {found.seconds:6.1f} s"
        print(f"{counts}  {case}", flush=True)
    print(f"{states:>9,} states in {seconds:.0f} s of processor time: no rule is broken, and every wait can end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
