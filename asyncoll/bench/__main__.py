"""One rank of a benchmark, under the launcher, or all of one process: `python -m asyncoll.bench PLAN`."""

from asyncoll.bench.runs import main

main()
