"""How far a kind of config was off the cost model: what its predicted time is multiplied by.

Kinds are told by how tiles are walked, the CTAs of a cluster along M, N and K, and warpgroups. Of
the logarithms of measured to predicted times of each kind, of configs close to the best of their
problem, the factor takes the mean and half a standard deviation, both drawn towards no error and
the deviation of all kinds as far as PRIOR measurements would: so a kind that misses by much, or was
seldom measured, must promise more to be chosen. Of problems held out whole the choices so made
lose 1.0 % of the best that was timed, not 1.2 % (docs/facts.md); tests/test_cost_model_sm90.py
works the factors out again from results/configs.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutex.kernels.gemm.sm90.config import Sm90Config

PRIOR = 15  # measurements that a kind is taken to have beside its own: of no error
CAUTION = 0.5  # standard deviations

# by warpgroups; over problems of the half of the corpus that is for fitting, one H200
FACTORS: dict[str, dict[int, float]] = {
    "columns 1x1x1": {1: 1.026, 2: 1.021, 3: 1.022},
    "columns 1x1x2": {1: 1.015, 2: 1.023, 3: 1.034},
    "columns 1x1x3": {1: 1.025, 2: 1.007, 3: 1.019},
    "columns 1x1x4": {1: 1.032, 2: 1.028, 3: 1.03},
    "columns 1x2x1": {1: 1.03, 2: 1.011, 3: 1.015},
    "columns 1x4x1": {1: 1.037, 2: 1.039, 3: 1.037},
    "columns 4x1x1": {1: 1.031, 2: 1.028},
    "pingpong 1x1x1": {2: 1.023},
    "pingpong 1x2x1": {2: 1.015},
    "pingpong 2x1x1": {2: 1.017},
    "pingpong swapped 1x1x1": {2: 1.02},
    "pingpong swapped 1x2x1": {2: 1.02},
    "pingpong swapped 2x1x1": {2: 1.021},
    "rows 1x1x1": {1: 1.029, 2: 1.026, 3: 1.026},
    "rows 1x4x1": {1: 1.048, 2: 1.024, 3: 1.049},
    "rows 2x1x1": {1: 1.051, 2: 1.02, 3: 1.033},
    "rows 4x1x1": {1: 1.024, 2: 1.022, 3: 1.029},
    "spread 1x1x1": {1: 1.026, 2: 1.023},
    "walked 1x1x1": {1: 1.05, 2: 1.025, 3: 1.03},
    "walked 1x2x1": {1: 1.031, 2: 1.025, 3: 1.023},
    "walked 2x1x1": {1: 1.032, 2: 1.01, 3: 1.019},
    "walked swapped 1x1x1": {1: 1.033, 2: 1.02, 3: 1.021},
    "walked swapped 1x2x1": {1: 1.019, 2: 1.015, 3: 1.015},
    "walked swapped 2x1x1": {1: 1.088, 2: 1.027, 3: 1.029},
}
UNKNOWN = 1.033  # of a kind that was never measured


def kind(c: Sm90Config) -> str:
    """What `c` has in common with others that the model is off by as much, but for warpgroups."""
    if c.spread:
        walk = "spread"
    elif c.rows or c.columns:
        walk = "rows" if c.rows else "columns"
    else:
        walk = ("pingpong" if c.pingpong else "walked") + (" swapped" if c.swap_ab else "")
    return f"{walk} {c.cluster_m}x{c.cluster_n}x{c.split_k}"


def doubt(c: Sm90Config) -> float:
    """The factor of the kind of `c`."""
    return FACTORS.get(kind(c), {}).get(c.mma_warpgroups, UNKNOWN)


def factor(errors: Sequence[float], deviation: float) -> float:
    """The factor of a kind, from its errors, logarithms; `deviation`: of all kinds."""
    count = len(errors) + PRIOR
    mean = sum(errors) / count
    square = (sum((e - mean) ** 2 for e in errors) + PRIOR * deviation**2) / count
    return math.exp(mean + CAUTION * math.sqrt(square * (1 + PRIOR / count)))
