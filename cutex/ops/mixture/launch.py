"""The launches of a mixture's kernels beside its products."""

from __future__ import annotations

import torch
from torch import Tensor

from cutex.ops.grouped.summed import run
from cutex.ops.matmul.arrange import aligned, normal, repacked


def combine(z: Tensor, places: Tensor, offs: Tensor, out: Tensor, weights: Tensor | None) -> None:
    """out[t] = sum over j of weights[t, j] * z[places[t, j]]; without weights, they are 1."""
    from cutex.kernels.mixture.combine import Combine, CombineConfig

    given = [] if weights is None else [weights.contiguous()]
    config = CombineConfig(places.shape[1], weighted=bool(given))
    run(Combine, config, [z, places, offs, out, *given])


def combine_gradient(
    dout: Tensor, z: Tensor, s: Tensor, tokens: Tensor, order: Tensor, offs: Tensor, dz: Tensor,
    ds: Tensor,
) -> None:  # fmt: skip
    """dz and ds, of `combine`'s z and weights (the latter by entries, s), from the gradient of its
    out."""
    from cutex.kernels.mixture.combine_gradient import CombineGradient

    run(CombineGradient, None, [dout, z, s, tokens, order, offs, dz, ds])


def spread(x: Tensor, places: Tensor, offs: Tensor) -> Tensor:
    """Rows (R, D) of x (T, D): row places[t, j] is x[t]. Those of no group are left as they are."""
    from cutex.kernels.mixture.spread import Spread, SpreadConfig

    out = x.new_empty((places.numel(), x.shape[1]))
    x = normal(x, -1) if aligned(x, -1) else repacked(x, -1)
    run(Spread, SpreadConfig(places.shape[1]), [x, places, offs, out])
    return out


def gate(h: Tensor, y: Tensor, offs: Tensor) -> None:
    """y = silu(h[:, 0::2]) * h[:, 1::2], in the rows of groups."""
    from cutex.kernels.mixture.gate import Gate, GateConfig

    run(Gate, GateConfig(), [h, y, offs])


def gate_gradient(
    h: Tensor, y: Tensor, offs: Tensor, s: Tensor, dy: Tensor, dh: Tensor, ds: Tensor,
    order: Tensor,
) -> None:  # fmt: skip
    """y, scaled by s, dh and ds, from h and dy, in the rows of groups; s and ds by entries."""
    from cutex.kernels.mixture.gate import Gate, GateConfig

    run(Gate, GateConfig(gradient=True), [h, y, offs, s, dy, dh, ds, order])


def sort(
    ids: Tensor, offs: Tensor, tokens: Tensor, order: Tensor, places: Tensor, per_token: int
) -> None:
    """Sort entries (R) of expert ids, `per_token` of each token, by expert."""
    from cutex.kernels.mixture.route import CTAS, WARP, Route, RouteConfig

    buckets = WARP
    while buckets <= offs.shape[0]:
        buckets *= 2
    totals = ids.new_empty((CTAS, buckets), dtype=torch.int32)
    run(Route, RouteConfig(per_token, buckets), [ids, offs, tokens, order, places, totals])
