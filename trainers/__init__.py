"""Trainers: each algorithm is one short file that reads like its paper's pseudocode.

The coroutines `trainers.allreduce_sgd.allreduce_sgd` and `trainers.eager_sgd.eager_sgd` take your own model,
`torch.optim` optimizer and data; `python -m trainers` drives them on small workloads with emulated compute
time and imbalance, and reports.
"""
