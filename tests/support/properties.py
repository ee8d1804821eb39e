"""Hypothesis with the settings of all tests. A module of tests takes it from here, before it declares a property."""

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

__all__ = ["example", "given", "settings", "st"]

# On a busy machine a deadline for each example makes tests flaky, and so does a different draw in each run. So there is
# no deadline, every run draws the same examples, and no database of failures is needed.
settings.register_profile(
    "asyncoll", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("asyncoll")
