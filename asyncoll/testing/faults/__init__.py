"""Faults that strike ranks at named points, for tests of any program; and the matrix of faults, `asyncoll faults`."""
