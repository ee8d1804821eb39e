"""`asyncoll bench`: micro-benchmarks of this host.

Every result is checked. The column `#wrong` counts the wrong elements over all ranks.

commands ── the command line        plan          ── one benchmark, sent to ranks        runs  ── starts the ranks
tune     ── sizes in memory         dense, skewed ── the measurements                    table ── prints the rows
"""
