"""The choice of a decode config: tiles by head dims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutex.kernels.attention.decode.config import DecodeConfig

# by head dims: what differs from DecodeConfig's defaults
_TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"tile_n": 128},
    (96, 96): {"num_stages": 4},
    (192, 128): {"num_stages": 5, "ctas_per_sm": 1},
    (192, 192): {"num_stages": 4, "ctas_per_sm": 1},
    (256, 256): {"ctas_per_sm": 1},
}


def fitted(config: DecodeConfig) -> DecodeConfig:
    """`config`, whose fields say what is computed, with its tiles chosen."""
    return replace(config, **_TILES.get((config.head_dim, config.head_dim_v), {}))
