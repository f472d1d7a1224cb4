"""PyTorch operators. Importing this registers them.

The first call with a new combination of dtypes, layouts and options compiles (seconds, once; kept
on disk), so call once before a CUDA graph captures.
"""

from __future__ import annotations

from cutex.ops.device import simulated
from cutex.ops.matmul import kernels_built, tune, tuning, warm_up

__all__ = ["kernels_built", "simulated", "tune", "tuning", "warm_up"]
