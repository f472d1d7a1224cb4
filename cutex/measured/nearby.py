"""A model's error where nothing was measured, estimated from measured places nearby.

A place is a point whose coordinates its model chooses, each scaled by how much it says about an
error. The error at a place that was not measured is the mean of the measured ones, weighted by
distance (a Nadaraya-Watson estimate, shrunk towards zero), plus a little where few are near: what
was never tried must promise more to be chosen. <name>.npz holds the places and errors of a model.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

WIDTH = 0.85  # of the Gaussian weights of distance: sqrt(1/2) of a doubling of two sizes
SIZES = 3  # the first dimensions of a place: the sizes of the problem
FARTHEST = 4.0  # in sizes: beyond, a weight is below 2e-5 and not computed
PRIOR = 0.3  # weight of the assumed zero error
CAUTION = 0.08  # added to the logarithm of the time where nothing was measured nearby
LARGEST = 0.35  # clip of a measured error, in logarithms


def file_of(name: str) -> Path:
    """The file of the places and errors of the model `name`."""
    return Path(__file__).with_name(f"{name}.npz")


@lru_cache(maxsize=1)
def measured(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The places (PAIR, DIMENSION) and errors (PAIR) of measured pairs, logarithms of measured over
    modelled time."""
    with np.load(file_of(name)) as file:
        return file["places"].astype(np.float32), file["errors"].astype(np.float32)


def errors_nearby(name: str, places: np.ndarray, caution: float = CAUTION) -> np.ndarray:
    """The expected errors of the model `name` at `places` (PLACE, DIMENSION), as logarithms; with a
    `caution` below 0, what was never tried is given the benefit of the doubt."""
    if not len(places):
        return np.zeros(0, np.float32)
    known, errors = measured(name)
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
