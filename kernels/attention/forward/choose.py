"""The choice of an attention config for a problem: tiles by head dim, packed heads where queries
are few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from cutex.kernels.attention.forward.config import ForwardConfig
from cutex.kernels.attention.forward.sm100 import choose as sm100
from cutex.kernels.attention.forward.sm100.config import Sm100Config

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.attention import AttentionProblem

AnyConfig = ForwardConfig | Sm100Config
CONFIGS: dict[str, type[AnyConfig]] = {
    "sm_90a": ForwardConfig,
    "sm_100a": Sm100Config,
    "sm_103a": Sm100Config,
}

# by head dims of K and of V: the tiles that fit smem and registers
_TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"tile_m": 192, "tile_n": 128, "num_stages": 4, "halves": True},
    (96, 96): {"tile_m": 192, "tile_n": 80, "num_stages": 3, "q_in_registers": 64},
    (128, 128): {"tile_m": 128, "tile_n": 128, "halves": True},
    (192, 128): {"tile_m": 128, "tile_n": 112, "q_stages": 1},
    (192, 192): {"tile_m": 128, "tile_n": 96, "q_stages": 1, "o_parts": 2},
    # not optimistic where tiles are short: Q's only slot is released before the tile is known to be
    # valid, and tensor cores are busy anyway
    (256, 256): {"tile_m": 128, "tile_n": 64, "q_stages": 1, "o_parts": 2, "optimistic": False},
}
# what is faster from a number of keys on
_LONG: dict[tuple[int, int], dict[int, dict[str, Any]]] = {
    (128, 128): {8192: {"q_in_registers": 128}, 16384: {"halves": False}},
    # `alternate` would give head dim 128 1 %, too; a row's last bits then depend on other tiles
    (256, 256): {
        4096: {"q_in_registers": 64, "optimistic": True},
        8192: {"q_in_registers": 128},
        16384: {"alternate": True},
    },
}
# the number of keys from which on two CTAs load K and V for each other: causal; full, where at head
# dim 256 all CTAs read the same keys at one time anyway
_SHARED: dict[tuple[int, int], tuple[int, int | None]] = {
    (64, 64): (16384, 16384), (96, 96): (8192, 8192), (128, 128): (8192, 4096),
    (192, 128): (8192, 8192), (192, 192): (8192, 8192), (256, 256): (8192, None),
}  # fmt: skip
MANY_BLOCKS = 16  # of rows, in a sequence: little of the last tile of two CTAs is empty
MOST_PACKED = 64  # packed heads, at most the rows of a warpgroup


@dataclass(frozen=True)
class Shape:
    """The sizes that the choice depends on. No sequence has more than `longest_q` queries; what is
    said of keys, and the mean number of queries, only decides what is fast."""

    batch: int
    heads_q: int
    heads_kv: int
    longest_q: int
    longest_k: int
    mean_q: int


def fill(config: AnyConfig, shape: Shape, arch: Arch) -> AnyConfig:
    """`config`, whose fields of `Computed` are set, with tiles and rings chosen for `shape` and
    `arch`."""
    if isinstance(config, Sm100Config):
        return sm100.fill(config, shape, arch)
    tiles = _TILES.get((config.head_dim, config.head_dim_v), {})
    config = replace(config, **tiles)
    if config.modified:  # a user's functions need registers of their own
        tiles = {"tile_m": 128, "tile_n": min(config.tile_n, 96), "q_in_registers": 0}
        config = replace(config, **tiles, halves=False)
    else:
        for keys, better in _LONG.get((config.head_dim, config.head_dim_v), {}).items():
            config = replace(config, **better if shape.longest_k >= keys else {})
    group = shape.heads_q // shape.heads_kv
    pack = gcd(group, MOST_PACKED) if shape.longest_q < config.tile_m else 1
    return replace(config, pack=pack)


def on_gpu(config: AnyConfig, shape: Shape, num_sms: int, l2_bytes: int) -> AnyConfig:
    """`config` fitted to a GPU's SMs and its L2, of which Q and O take a share."""
    if isinstance(config, ForwardConfig) and shares(config, shape, num_sms):
        config = replace(config, share=True, tile_m=2 * config.tile_m)
    m_blocks = -(-shape.longest_q * config.pack // config.tile_m)
    if m_blocks * (shape.heads_q // config.pack) * shape.batch <= num_sms:
        config = replace(config, dispatch="one")  # there is nothing to hand out
    return replace(config, num_ctas=num_sms, l2_bytes=l2_bytes * 5 // 6)


def shares(config: ForwardConfig, shape: Shape, num_sms: int) -> bool:
    """Whether two CTAs should load K and V for each other: in long sequences, which run at the
    power limit, where less traffic is a higher clock. Never with a window, where the two see other
    keys."""
    causal, full = _SHARED.get((config.head_dim, config.head_dim_v), (None, None))
    keys = causal if config.causal else full
    if keys is None or shape.longest_k < keys or config.modified or any(config.window):
        return False
    m_blocks = shape.mean_q * config.pack // config.tile_m
    tiles = m_blocks * (shape.heads_q // config.pack) * shape.batch
    return m_blocks >= MANY_BLOCKS and tiles >= 2 * num_sms


def choose(problem: AttentionProblem, arch: Arch) -> AnyConfig:
    """The config for a problem of the ladder."""
    left, right = problem.bounds
    config = CONFIGS[arch.name](
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal,
        window=(left is not None, right is not None and not problem.causal),
        varlen_q=problem.varlen,
        varlen_k=problem.varlen,
        softcap=bool(problem.softcap),
    )
    shape = Shape(
        problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q, problem.seqlen_k,
        problem.seqlen_q,
    )  # fmt: skip
    return on_gpu(fill(config, shape, arch), shape, arch.num_sms, arch.l2_bytes)
