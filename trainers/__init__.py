"""`python -m trainers`: the algorithms of `asyncoll.training` on small workloads, with emulated time and imbalance.

`algorithms.py` and `workloads/` say what can be trained, `experiment.py` is the loop of one rank, and `report.py` its
record. `compare.py` runs several algorithms and seeds.
"""
