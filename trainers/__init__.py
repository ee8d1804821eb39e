"""Trainers: each algorithm is one short file that follows its paper's pseudocode.

The async generators `allreduce_sgd`, `eager_sgd`, `wagma_sgd`, `dc_s3gd` and `oktopk_sgd`, each in the module of its
name, take your model, `torch.optim` optimizer and data. `python -m trainers` runs them on small workloads, with
emulated compute time and imbalance, and reports. `replicas.py` states how all trainers treat buffers, frozen parameters
and the state of the optimizer.
"""
