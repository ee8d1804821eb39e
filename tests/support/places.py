"""Where the programs of the tests are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"  # programs that tests run as ranks, in folders as those of the tests
STUBS = ROOT / "tests" / "stubs"  # in place of ssh and srun
