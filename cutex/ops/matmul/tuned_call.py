"""`cutex.tune` of a call of matmul."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.ops.matmul.eager import matmul
from cutex.ops.matmul.tuner import SECONDS, configs_tuned, tuning

if TYPE_CHECKING:
    from cutex.kernels.gemm.config import GemmConfig


def tune(a: Tensor, b: Tensor, *, seconds: float = SECONDS, **options: Any) -> GemmConfig:
    """Tune this call of `cutex.matmul`, which takes the same `options`, in at most `seconds`.
    Return the tiles that it and calls like it then take. Calls that were tuned before are not tuned
    again.

    Raises what `cutex.matmul` raises, and ValueError for a call that launches nothing.
    """
    with configs_tuned() as found, tuning(seconds), torch.no_grad():
        matmul(a, b, **options)
    if not found:
        raise ValueError(
            "there is nothing to tune: the result is empty, or its tensors have no memory"
        )
    return found[-1].tiles
