"""What ranks do together: the dense, wait-avoiding and sparse collectives, and the backends that carry them out.

The algorithms are coroutines over flat numpy arrays. By message they use a `Lane` (`runtime.group`), and rounds also a
`Port` (`runtime.port`); in memory they use control blocks and an arena. They do not see the endpoint of their rank,
which only the backends and the announcement of operations use, nor sockets or torch.
"""
