"""Collectives as coroutines over a `Lane`. They see flat numpy arrays, never bytes, sockets, clocks or torch."""
