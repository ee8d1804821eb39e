"""`asyncoll bench`: micro-benchmarks of this host.

Every result is checked. The column `#wrong` counts the wrong elements over all ranks.

commands ── the command line        plan          ── one benchmark, sent to ranks        runs  ── starts the ranks
tune     ── sizes in memory         dense, sparse, skewed ── the measurements            table ── prints the rows
claims   ── of the page of benchmarks (claims.toml)              suite ── measures them on this host, and compares
waiting, late_training, between_processes, fault_times ── the cells of the claims that need no peer
late_ranks ── the ranks of late_training, which load torch
"""
