"""`asyncoll bench`: micro-benchmarks of this host. Every measured result is checked; `#wrong` counts wrong elements.

commands ── the command line        plan          ── one benchmark, sent to ranks        runs  ── starts the ranks
tune     ── sizes in memory         dense, skewed ── the measurements                    table ── prints the rows
"""
