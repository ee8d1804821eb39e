"""Print a draw of numpy's global generator."""

import numpy

print(numpy.random.randint(1 << 62))  # noqa: NPY002 - the global one is the point
