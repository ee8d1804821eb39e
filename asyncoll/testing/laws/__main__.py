"""One rank of a case, under the launcher: `python -m asyncoll.testing.laws KIND SEED FOLDER`."""

from asyncoll.testing.laws.worlds import rank_main

rank_main()
