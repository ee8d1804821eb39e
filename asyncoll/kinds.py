"""The kinds of worlds that `asyncoll laws` draws. This imports nothing, because the command names them in its help."""

OF_ROUNDS = ("solo", "majority", "quorum", "full", "candidates", "group", "policy")
ALL = (*OF_ROUNDS, "gossip", "dense", "sparse", "training", "ending", "epochs")
