"""Which config computes a problem: tiles by head dim, packed heads where queries are few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from cutex.kernels.attention.config import ForwardConfig

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.attention import AttentionProblem

# by head dims of K and of V: what fits smem and registers
_TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"tile_m": 192, "tile_n": 128},
    (96, 96): {"tile_m": 128, "tile_n": 128},
    (128, 128): {"tile_m": 128, "tile_n": 128},
    (192, 128): {"tile_m": 128, "tile_n": 112, "q_stages": 1},
    (192, 192): {"tile_m": 128, "tile_n": 96, "q_stages": 1, "own_o": False},
    (256, 256): {"tile_m": 128, "tile_n": 80, "q_stages": 1, "own_o": False},
}
MOST_PACKED = 64  # rows of a warpgroup


@dataclass(frozen=True)
class Shape:
    """The sizes that a choice depends on: no sequence has more than `longest_q` queries."""

    batch: int
    heads_q: int
    heads_kv: int
    longest_q: int


def fill(config: ForwardConfig, shape: Shape) -> ForwardConfig:
    """`config`, which says what is computed, with how that is done."""
    tiles = _TILES.get((config.head_dim, config.head_dim_v), {})
    config = replace(config, **tiles)
    group = shape.heads_q // shape.heads_kv
    pack = gcd(group, MOST_PACKED) if shape.longest_q < config.tile_m else 1
    return replace(config, pack=pack)


def choose(problem: AttentionProblem, arch: Arch) -> ForwardConfig:
    """The config for a problem of the ladder."""
    left, right = problem.bounds
    config = ForwardConfig(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal,
        window=(left is not None, right is not None and not problem.causal),
        varlen_q=problem.varlen,
        varlen_k=problem.varlen,
        softcap=bool(problem.softcap),
    )
    shape = Shape(problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q)
    return fill(config, shape)
