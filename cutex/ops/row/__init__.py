"""Functions of rows as PyTorch functions: softmax, norms, cross-entropy. Importing this registers
the operators."""

from __future__ import annotations

from cutex.ops.row.cross_entropy import cross_entropy
from cutex.ops.row.histogram import histogram
from cutex.ops.row.linear_cross_entropy import linear_cross_entropy
from cutex.ops.row.map import map
from cutex.ops.row.norms import layer_norm, rms_norm
from cutex.ops.row.reduce import reduce
from cutex.ops.row.rope import rope
from cutex.ops.row.scan import scan
from cutex.ops.row.softmax import softmax

__all__ = [
    "cross_entropy",
    "histogram",
    "layer_norm",
    "linear_cross_entropy",
    "map",
    "reduce",
    "rms_norm",
    "rope",
    "scan",
    "softmax",
]
