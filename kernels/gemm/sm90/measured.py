"""The cost model's error at a pair of a problem and a config, estimated from measured pairs nearby.

A pair is a point: the logarithms of the sizes of problem, tile and cluster, and features that
distinguish kinds of kernels, each scaled by how much it says about an error. The error of a pair
that was not measured is the mean of the measured ones, weighted by distance (a Nadaraya-Watson
estimate, shrunk towards zero), plus a little where few are near: an untested config must promise
more to be chosen. measured.npz holds places and errors; fit.py writes it.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from functools import lru_cache
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cutex.kernels.gemm.sm90.candidates import Majors
    from cutex.kernels.gemm.sm90.config import Sm90Config
    from cutex.kernels.gemm.sm90.cost_model import Counts
    from cutex.problem.gemm import GemmProblem

FILE = Path(__file__).with_name("measured.npz")
WIDTH = 0.85  # of the Gaussian weights of distance: sqrt(1/2) of a doubling of two sizes
SIZES = 3  # the first dimensions of a place: M, N and K
FARTHEST = 4.0  # in sizes: beyond, a weight is below 2e-5 and not computed
PRIOR = 0.3  # weight of the assumed zero error
CAUTION = 0.08  # added to the logarithm of the time where nothing was measured nearby
LARGEST = 0.35  # clip of a measured error, in logarithms


def place(
    config: Sm90Config, problem: GemmProblem, counts: Counts, majors: Majors, bits: int = 16
) -> tuple[float, ...]:
    """The point of the pair of `problem`, whose elements have `bits`, and `config`."""
    c = config
    return (
        *(log2(problem.m), 1.4 * log2(problem.n), log2(problem.k)),
        *(2.0 * log2(c.tile_m), 1.5 * log2(c.tile_n)),
        *(2.8 * log2(c.cluster_m), 4.0 * log2(c.cluster_n), 1.4 * log2(c.split_k)),
        *(1.5 * c.swap_ab, 3.0 * c.pingpong, 2.8 * (c.rows > 0), 2.8 * (c.columns > 0)),
        *(5.0 * c.spread - 5.0 * (c.stream_k > 0), 0.5 * c.mma_warpgroups),
        *(6.3 * counts.ctas / counts.sms / counts.rounds, log2(counts.rounds)),
        *(2.1 * counts.narrow, 0.5 * (1.0 - majors[0]), 1.5 * log2(16 / bits)),
    )


@lru_cache(maxsize=1)
def measured() -> tuple[np.ndarray, np.ndarray]:
    """The places (PAIR, DIMENSION) and errors (PAIR) of measured pairs, logarithms of measured over
    modelled time."""
    with np.load(FILE) as file:
        return file["places"].astype(np.float32), file["errors"].astype(np.float32)


def errors_nearby(places: np.ndarray, caution: float = CAUTION) -> np.ndarray:
    """The model's expected errors at `places` (PLACE, DIMENSION), as logarithms; with a `caution`
    below 0, an untested config is given the benefit of the doubt."""
    known, errors = measured()
    sizes, of_known = places[:, :SIZES], known[:, :SIZES]
    away = np.maximum(sizes.min(0) - of_known, of_known - sizes.max(0)).clip(0)
    near = (away**2).sum(1) < FARTHEST**2
    return estimate(places, known[near], errors[near], caution)


def estimate(
    places: np.ndarray, known: np.ndarray, errors: np.ndarray, caution: float = CAUTION
) -> np.ndarray:
    """The model's expected errors, as logarithms, at `places`, given its `errors` at the places
    `known`."""
    scale = WIDTH * 2**0.5
    places, known = places.astype(known.dtype) / scale, known / scale
    weights = 2 * places @ known.T  # in place from here on: 3 million pairs a problem
    weights -= (places**2).sum(1)[:, None]
    weights -= (known**2).sum(1)[None]
    np.exp(np.minimum(weights, 0, out=weights), out=weights)
    near = weights.sum(1)
    mean = weights @ errors.clip(-LARGEST, LARGEST) / (near + PRIOR)
    return mean + caution * np.sqrt(PRIOR / (near + PRIOR))
