"""One rank of a benchmark, under the launcher: `python -m asyncoll.bench PLAN FOLDER`."""

from asyncoll.bench.runs import rank_main

rank_main()
