"""Memory between the ranks of one host: the arena, its control blocks, locks and doorbells, and an in-process twin."""
