"""Growing the regression trees of a model's error (cutex/measured/trees.py), one after the other,
each on what those before leave (Friedman, "Greedy function approximation", 2001)."""

from __future__ import annotations

import numpy as np

from cutex.measured.trees import Trees

ROUNDS, DEPTH = 400, 5
RATE = 0.15  # share of a leaf's mean that is taken
BINS = 32  # of a feature's values, alike in number
LEAST = 8.0  # weight of a leaf
TIE = 1e-7  # share of a gain by which another is no better
SHRINK = 8.0  # weight of the assumed zero error in a leaf's mean


def grown(features: np.ndarray, errors: np.ndarray, weights: np.ndarray, seed: int = 0) -> Trees:
    """Trees whose sum is close to `errors` (PAIR) at `features` (PAIR, FEATURE); each splits by a
    random half of the features."""
    features = features.astype(np.float32)
    count = features.shape[1]
    cuts = np.linspace(0, 1, BINS + 1)[1:-1]
    edges = [np.unique(np.quantile(x, cuts).astype(np.float32)) for x in features.T]
    binned = np.stack([np.searchsorted(e, x) for e, x in zip(edges, features.T, strict=True)])
    rng = np.random.default_rng(seed)
    left, found = errors.astype(float), []
    for _ in range(ROUNDS):
        some = rng.choice(count, count // 2, replace=False)
        tree, leaves = _tree(binned, edges, left, weights, some)
        left = left - tree[2][leaves]
        found.append(tree)
    of_node, thresholds, values = (np.stack(x) for x in zip(*found, strict=True))
    return Trees(of_node.astype(np.intp), thresholds, values.astype(np.float32))


def _tree(
    binned: np.ndarray,
    edges: list[np.ndarray],
    errors: np.ndarray,
    weights: np.ndarray,
    some: np.ndarray,
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """A tree's features, thresholds and values, and the leaf of each pair."""
    nodes = np.zeros(len(errors), np.intp)  # within its level
    of_node = np.zeros(2**DEPTH - 1, np.int8)
    thresholds = np.full(2**DEPTH - 1, np.inf, np.float32)
    for level in range(DEPTH):
        size = 2**level
        split = _splits(
            np.stack([_gains(binned[x], nodes, size, errors, weights) for x in some.tolist()])
        )
        right = np.zeros(len(errors), bool)
        for node, (place, at) in split.items():
            feature = int(some[place])
            of_node[size - 1 + node] = feature
            thresholds[size - 1 + node] = edges[feature][at]
            right |= (nodes == node) & (binned[feature] > at)
        nodes = 2 * nodes + right
    sums, weight = (np.bincount(nodes, x, 2**DEPTH) for x in (errors * weights, weights))
    return (of_node, thresholds, RATE * sums / (weight + SHRINK)), nodes


def _splits(gains: np.ndarray) -> dict[int, tuple[int, int]]:
    """The feature and the bin by which to split each node, where a split of `gains` (FEATURE, NODE,
    BIN) gains anything.

    NOTE: features may tell pairs apart alike, and then rounding, which differs between CPUs, would
    decide between them: the first that is within TIE of the best is taken.
    """
    most = gains.max((0, 2))
    close = gains >= (most * (1 - TIE))[None, :, None]  # (FEATURE, NODE, BIN)
    first = {node: np.argwhere(close[:, node])[0] for node in np.flatnonzero(most > 1e-9).tolist()}
    return {node: (int(place), int(at)) for node, (place, at) in first.items()}


def _gains(
    bins: np.ndarray, nodes: np.ndarray, size: int, errors: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """By how much a split of each node behind each bin lessens the squares of the errors."""
    at = nodes * BINS + bins
    sums, weight = (
        np.bincount(at, x, size * BINS).reshape(size, BINS).cumsum(1)
        for x in (errors * weights, weights)
    )
    whole, of_all = sums[:, -1:], weight[:, -1:]
    right, beyond = whole - sums, of_all - weight
    gain = sums**2 / (weight + SHRINK) + right**2 / (beyond + SHRINK)
    gain -= whole**2 / (of_all + SHRINK)
    return np.where((weight >= LEAST) & (beyond >= LEAST), gain, -1.0)[:, :-1]
