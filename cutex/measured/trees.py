"""A model's error as a sum of regression trees over its features.

Where places were measured nearby, nearby.py knows better; trees also say something far away, since
each splits by few features at a time. <name>-trees.npz holds those of a model; cutex/fit/trees.py
grows them.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Trees(NamedTuple):
    """Complete binary trees: node i has the children 2 i + 1 and, where the node's feature exceeds
    its threshold, 2 i + 2."""

    features: np.ndarray  # (TREE, NODE), an index each
    thresholds: np.ndarray  # (TREE, NODE)
    values: np.ndarray  # (TREE, LEAF)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """The sums of the trees' values at `features` (PLACE, FEATURE)."""
        features = features.astype(np.float32)
        rows = np.arange(len(features))[:, None]
        trees = np.arange(len(self.values))[None]
        nodes = np.zeros((len(features), len(self.values)), np.intp)
        for _ in range(self.values.shape[1].bit_length() - 1):
            of_node = features[rows, self.features[trees, nodes]]
            nodes = 2 * nodes + 1 + (of_node > self.thresholds[trees, nodes])
        found: np.ndarray = self.values[trees, nodes - self.features.shape[1]].sum(1)
        return found

    def save(self, name: str) -> None:
        np.savez_compressed(file_of(name), **self._asdict())


def file_of(name: str) -> Path:
    """The file of the trees of the model `name`."""
    return Path(__file__).with_name(f"{name}-trees.npz")


@lru_cache(maxsize=1)
def trees(name: str) -> Trees:
    """The trees of the model `name`."""
    with np.load(file_of(name)) as file:
        return Trees(file["features"].astype(np.intp), file["thresholds"], file["values"])
