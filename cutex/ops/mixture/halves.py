"""Gates of whose columns the first half gates the second, as transformers stores them.

    moe_halves          y = silu(h[:, :F]) * h[:, F:], with h (R, 2 F)
    moe_halves_product  the same of h = x @ w[e] in the product's store, where nobody needs h

Rows of no group are left as they are, in gradients too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutex.ops.grouped import launch as products
from cutex.ops.grouped.summed import run
from cutex.ops.matmul.arrange import aligned, normal, repacked
from cutex.ops.row.operators import define

UNIT = 8  # elements of 16 bytes
SILU = "gated_silu"


def takes_halves(rows: Tensor, up: Tensor) -> bool:
    """Whether there are kernels for the gate of rows (R, D) times up (E, D, 2 F)."""
    return up.shape[2] % (2 * UNIT) == 0 and rows.dtype == up.dtype


def gated_rows(h: Tensor, offs: Tensor) -> Tensor:
    """y (R, F) of h (R, 2 F) in the rows of groups."""
    return torch.ops.cutex.moe_halves(h, offs)


def gated_product(x: Tensor, up: Tensor, offs: Tensor) -> Tensor | None:
    """y (R, F) of x (R, D) and up (E, D, 2 F) by one kernel, without a gradient; None where there
    is none, or where a gradient is wanted."""
    if torch.is_grad_enabled() and (x.requires_grad or up.requires_grad):
        return None
    if not products.levels(x, x.shape[0], up, SILU):
        return None
    return torch.ops.cutex.moe_halves_product(x, up, offs)


def _halves(h: Tensor, offs: Tensor) -> Tensor:
    from cutex.kernels.mixture.halves import Halves, HalvesConfig

    y = _fake_halves(h)
    if y.numel():
        run(Halves, HalvesConfig(), [_rows(h), y, offs])
    return y


def _fake_halves(h: Tensor, *_: Tensor) -> Tensor:
    return h.new_empty((h.shape[0], h.shape[1] // 2))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _halves_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.cutex.moe_halves_gradient(grad, *ctx.saved_tensors), None


def _gradient(dy: Tensor, h: Tensor, offs: Tensor) -> Tensor:
    from cutex.kernels.mixture.halves import Halves, HalvesConfig

    dh = _fake_gradient(dy, h)
    if dh.numel():
        run(Halves, HalvesConfig(gradient=True), [_rows(h), _rows(dy), offs, dh])
    return dh


def _fake_gradient(_: Tensor, h: Tensor, *__: Tensor) -> Tensor:
    return h.new_empty(h.shape)


def _gradient_backward(ctx: Any, of_dh: Tensor) -> tuple[Tensor | None, ...]:
    """By torch, in fp32: gradients of gradients are rare."""
    dy, h, _ = ctx.saved_tensors
    y, (gate, up), (of_gate, of_up) = dy.float(), h.float().chunk(2, 1), of_dh.float().chunk(2, 1)
    inner = gate.sigmoid()
    slope = inner * (1 + gate * (1 - inner))
    bend = inner * (1 - inner) * (2 + gate * (1 - 2 * inner))
    of_dy = of_gate * up * slope + of_up * gate * inner
    of_h = torch.cat([of_gate * y * up * bend + of_up * y * slope, of_gate * y * slope], 1)
    return of_dy.to(dy.dtype), of_h.to(h.dtype), None


def _product(x: Tensor, up: Tensor, offs: Tensor) -> Tensor:
    out = _fake_product(x, up)
    if out.shape[0]:
        products.again("level", ("halves",), [x, up, out, offs], _product_call)
    return out


def _product_call(_: Any, passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    config, arch, tensors = products.level_call((SILU, True, True), passed)
    return replace(config, halves=True), arch, tensors


def _fake_product(x: Tensor, up: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], up.shape[2] // 2))


def _rows(x: Tensor) -> Tensor:
    """x (R, columns) with rows that are whole vectors apart."""
    return normal(x, -1) if aligned(x, -1) else repacked(x, -1)


define(
    "moe_halves", "(Tensor h, Tensor offs) -> Tensor", _halves, _fake_halves, _setup,
    _halves_backward,
)  # fmt: skip
define(
    "moe_halves_gradient", "(Tensor dy, Tensor h, Tensor offs) -> Tensor", _gradient,
    _fake_gradient, _setup, _gradient_backward,
)  # fmt: skip
define(
    "moe_halves_product", "(Tensor x, Tensor up, Tensor offs) -> Tensor", _product, _fake_product
)
