"""Sparse allreduces: Ok-Topk and the algorithms that it is compared with."""
