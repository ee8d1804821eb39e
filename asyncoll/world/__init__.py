"""Joining and leaving a world: the environment, the rendezvous of its ranks, `run` and `connect`."""
