"""PyTorch operators. Importing this registers them.

The first call with a new combination of dtypes, layouts and options compiles (seconds, once; kept
on disk), so call once before a CUDA graph captures.
"""

from __future__ import annotations

from cutex.ops import registered
from cutex.ops.device import simulated
from cutex.ops.eager import matmul
from cutex.ops.tuner import tune, tuning
from cutex.ops.warming import kernels_built, warm_up

__all__ = ["kernels_built", "matmul", "registered", "simulated", "tune", "tuning", "warm_up"]
