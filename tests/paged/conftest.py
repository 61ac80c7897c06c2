"""Settings for kernels in an interpreter."""

import os

# The interpreter of Mosaic GPU kernels runs each warpgroup as a thread that blocks one of XLA's
# while it waits at a barrier. XLA has as many as the machine has cores, unless told otherwise, and
# on a small one all of them would wait.
os.environ.setdefault("NPROC", "16")
