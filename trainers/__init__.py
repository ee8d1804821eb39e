"""Trainers: each algorithm is one short file that reads like its paper's pseudocode.

The coroutines `allreduce_sgd`, `eager_sgd`, `wagma_sgd`, `dc_s3gd` and `oktopk_sgd`, each in the module of its name,
take your own model, `torch.optim` optimizer and data; `python -m trainers` drives them on small workloads with emulated
compute time and imbalance, and reports. `replicas.py` states what all trainers do with buffers, frozen parameters and
the state of the optimizer.
"""
