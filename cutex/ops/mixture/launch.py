"""The launches of a mixture's kernels beside its products."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.ops.device import current, launcher
from cutex.ops.grouped.launch import arch_for
from cutex.ops.matmul.arrange import name_of

if TYPE_CHECKING:
    from cutex.compile import Compiled


def combine(z: Tensor, places: Tensor, offs: Tensor, out: Tensor, weights: Tensor | None) -> None:
    """out[t] = sum over j of weights[t, j] * z[places[t, j]]; without weights, they are 1."""
    from cutex.kernels.mixture.combine import Combine, CombineConfig

    given = [] if weights is None else [weights.contiguous()]
    config = CombineConfig(places.shape[1], weighted=bool(given))
    run(Combine, config, [z, places, offs, out, *given])


def gate(h: Tensor, y: Tensor, offs: Tensor) -> None:
    """y = silu(h[:, 0::2]) * h[:, 1::2], in the rows of groups."""
    from cutex.kernels.mixture.gate import Gate, GateConfig

    run(Gate, GateConfig(), [h, y, offs])


def gate_gradient(
    h: Tensor, y: Tensor, offs: Tensor, s: Tensor, dy: Tensor, dh: Tensor, ds: Tensor
) -> None:
    """y, scaled by s, dh and ds, from h and dy, in the rows of groups."""
    from cutex.kernels.mixture.gate import Gate, GateConfig

    run(Gate, GateConfig(gradient=True), [h, y, offs, s, dy, dh, ds])


@lru_cache(maxsize=256)
def kernel_for(kind: Any, config: Any, dtype: str, arch: str) -> Compiled:
    """The kernel of a config."""
    from cutex.compile import compile

    return compile(kind(config), dtype, arch)


def run(kind: Any, config: Any, tensors: list[Tensor]) -> None:
    """Launch the kernel of a config on `tensors`."""
    compiled = kernel_for(kind, config, name_of(tensors[0]), arch_for(tensors[0]))
    with torch.no_grad(), current(tensors[0].device):
        launcher(compiled, tensors)(*tensors)
