"""One rank of a case, under the launcher: `python -m asyncoll.testing.laws KIND SEED FOLDER CORES DEVICES`."""

from asyncoll.testing.laws.case_runs import rank_main

rank_main()
