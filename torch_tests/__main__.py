"""The tests of the torch.distributed backend that take long: `python -m torch_tests --help`, or `make torch-tests`."""

from __future__ import annotations

import argparse
import pathlib
import sys

from torch_tests import compare

PARTS = ("wheel",)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_tests", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="the sizes of the worlds")
    parser.add_argument("--gloo-again", action="store_true", help="do not use the results of Gloo of an earlier run")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("build/torch_tests"), help="for the results"
    )
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    given.folder.mkdir(parents=True, exist_ok=True)
    good = True
    for part in given.parts or PARTS:
        if part == "wheel":
            good = compare.run(given.ranks, given.folder, given.gloo_again) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
