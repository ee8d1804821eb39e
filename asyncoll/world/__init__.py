"""Joining and leaving a world: the environment, how its ranks meet, `run` and `connect`."""
