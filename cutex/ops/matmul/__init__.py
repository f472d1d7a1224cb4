"""`cutex.matmul` and what prepares its calls. Importing this registers its operators with torch."""

from __future__ import annotations

from cutex.ops.matmul import registered
from cutex.ops.matmul.eager import matmul
from cutex.ops.matmul.tuned_call import tune
from cutex.ops.matmul.tuner import tuning
from cutex.ops.matmul.warming import kernels_built, warm_up

__all__ = ["kernels_built", "matmul", "registered", "tune", "tuning", "warm_up"]
