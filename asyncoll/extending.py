"""What research adds to the library without editing it: policies of rounds, and sparse algorithms."""

from asyncoll.algorithms.rounds.policies import RoundView, policies, register_policy
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.sparse.own import SparseAlgorithm
from asyncoll.algorithms.sparse.selection import Part
from asyncoll.algorithms.sparse.sparse_operations import register_sparse_algorithm, sparse_algorithms

__all__ = [
    "Collectives",
    "Part",
    "RoundView",
    "SparseAlgorithm",
    "policies",
    "register_policy",
    "register_sparse_algorithm",
    "sparse_algorithms",
]
