"""Sparse allreduces: Ok-Topk, and the algorithms that its paper compares it with."""
