"""The product of a mixture whose store gates and keeps what it gates, in tiles of equal width."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cutex.kernels.gemm.grouped import choose
from cutex.ops.grouped import launch as products
from cutex.ops.matmul.arrange import name_of, operand

SILU = "gated_silu"


def gates_in_store(x: Tensor, count: int, w_up: Tensor) -> bool:
    """Whether the store of `count` rows like those of x (T, D) times w_up (E, D, 2 F) gates, and
    stores what it gates, too."""
    return products.levels(x, count, w_up, SILU)


def gated_and_kept(x: Tensor, w_up: Tensor, offs: Tensor, y: Tensor, h: Tensor) -> None:
    """h (R, 2 F) = x @ w_up[e], rounded, and y (R, F) = silu(h[:, 0::2]) * h[:, 1::2]."""
    products.again("level", ("kept",), [x, w_up, products.with_padding(y), offs, h], _call)


def _call(_: Any, passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of such a product."""
    from cutex.kernels.gemm.grouped.config import LevelConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout
    from cutex.kernels.mixture.gate_ops import KeptGate

    x, w, out, edges, h = passed
    x, a, _ = operand(x, -1, True)
    w, b, _ = operand(w, -2, False)
    most = choose.most_groups(edges.shape[0])
    tiles = choose.level_tiles((w.shape[1], w.shape[2]), True, most)
    ops: Any = (KeptGate(name_of(h)),)  # an operation that only this kernel has
    product = GeneralConfig(tiles, a, b, OperandLayout(name_of(out)), ops)
    config = LevelConfig(product, most)
    return config, products.arch_for(x), [x, w, out, products.ends(edges), h]
