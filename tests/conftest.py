"""One BLAS thread a test process: the products are small, and threads that wait for each other under pytest-xdist made
the slowest tests ten times slower. It must be said before NumPy and torch are loaded."""

import os

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
