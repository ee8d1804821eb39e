"""Exhaustive exploration of protocols that are pure functions, in every order of messages and deaths."""

from asyncoll.testing.explore.channels import NodeNetwork, NodeProgram
from asyncoll.testing.explore.explorer import BrokenError, CounterexampleError, Exploration, Model, explore, wander

__all__ = [
    "BrokenError",
    "CounterexampleError",
    "Exploration",
    "Model",
    "NodeNetwork",
    "NodeProgram",
    "explore",
    "wander",
]
