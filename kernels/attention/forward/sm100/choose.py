"""The choice of an attention config on Blackwell: tiles by head dim, pairs of CTAs where one CTA's
memory is too small, one Q tile where queries are few."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any

from cutex.kernels.attention.forward.sm100.config import ROWS, Sm100ForwardConfig
from cutex.kernels.attention.spec import AttentionSpec, Shape

if TYPE_CHECKING:
    from cutex.arch import Arch

# by head dims of K and of V; where a block's MMAs take twice as long as its exponentials on MUFU,
# neither FMA exponentials nor tentative ones are used: the simulator's clock predicts no gain
PAIR = {"pair": True, "dispatch": "static"}
_BOUND_BY_MMA = {**PAIR, "q_tiles": 1, "by_fma": 0, "tentative": False}
_TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"num_stages": 4},
    (96, 96): {"num_stages": 3},
    (128, 128): {"by_fma": 1},
    (192, 128): PAIR,
    (192, 192): {**_BOUND_BY_MMA, "num_stages": 3},
    (256, 256): _BOUND_BY_MMA,
}


def fitted(spec: AttentionSpec, shape: Shape, arch: Arch) -> Sm100ForwardConfig:
    """The tiles and rings that compute `spec` for `shape`."""
    config = Sm100ForwardConfig.computing(spec)
    config = replace(config, **_TILES.get((spec.head_dim, spec.head_dim_v), {}))
    if arch.exponentials > 16:  # MUFU has time to spare, beside 8192 FLOP a cycle
        config = replace(config, by_fma=0)
    if config.pair and (config.banded or config.ragged_q):
        config = replace(config, dispatch="clc")  # tiles differ: a static walk ends 4 to 18 % late
    group = shape.heads_q // shape.heads_kv
    pack = gcd(group, ROWS) if shape.longest_q < config.tile_m else 1
    if shape.longest_q * pack <= ROWS:
        config = replace(config, q_tiles=1)
    return replace(config, pack=pack)
