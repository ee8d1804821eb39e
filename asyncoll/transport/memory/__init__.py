"""Memory between the ranks of one host: the arena between processes and in one process, and their common parts."""
