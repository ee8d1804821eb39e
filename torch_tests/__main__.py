"""The tests of the torch.distributed backend that take long: `python -m torch_tests`, or `make torch-tests`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch_tests import compare

PARTS = {
    "wheel": compare.wheel,
    "features": compare.features,
    "frameworks": compare.frameworks,
    "sabotage": compare.sabotage,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_tests", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="the sizes of the worlds")
    parser.add_argument("--gloo-again", action="store_true", help="do not use the results of Gloo of an earlier run")
    parser.add_argument("--folder", type=Path, default=Path("build/torch_tests"), help="for results and logs")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    runs = compare.Runs(given.folder, given.gloo_again)
    good = True
    for part in given.parts or PARTS:
        for size in given.ranks[:1] if part == "sabotage" else given.ranks:
            good = PARTS[part](runs, size) and good
            sys.stdout.flush()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
