"""Exhaustive exploration of protocols that are pure functions, in every order of messages and deaths."""

from asyncoll.testing.explore.explorer import BrokenError, CounterexampleError, Exploration, Model, explore, wander
from asyncoll.testing.explore.network import Network, Program

__all__ = ["BrokenError", "CounterexampleError", "Exploration", "Model", "Network", "Program", "explore", "wander"]
