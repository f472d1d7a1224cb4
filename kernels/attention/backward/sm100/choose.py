"""The choice of a backward config on Blackwell: tiles by head dim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutex.kernels.attention.backward.sm100.config import Sm100BackwardConfig

# by head dims: what differs from Sm100BackwardConfig's defaults
_TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"do_stages": 2, "dq_width": 64, "persistent": True},
    (128, 128): {"late_dk": True, "persistent": True, "early_s": True},
    (96, 96): {"do_stages": 2, "dq_width": 96, "late_dk": True, "persistent": True},
    (192, 128): {"tile_m": 64, "do_stages": 2, "dq_width": 64, "persistent": True},
    (192, 192): {"tile_m": 64, "do_stages": 2, "dq_width": 64, "persistent": True},
    (256, 256): {"tile_m": 64, "splits": 2, "halves": True},
}


def fitted(config: Sm100BackwardConfig, dtype: str = "bf16") -> Sm100BackwardConfig:
    """`config`, whose fields say what is computed, with its tiles chosen."""
    tiles = {
        "late_dk": False,
        "early_s": False,
        **_TILES.get((config.head_dim, config.head_dim_v), {}),
    }
    if config.softcap:  # its derivative is held beside P
        tiles = {**tiles, "registers": (136, 144, 88)}
    # NOTE: LSE and delta need bf16's range, and 12 KB, which head dim 256 has not
    folded = dtype == "bf16" and not config.softcap and not tiles.get("halves", False)
    # NOTE: adds in turn wait for those of other tiles; a soft cap takes the registers
    persistent = tiles.pop("persistent", False) and not (config.deterministic or config.softcap)
    return replace(config, **tiles, folded=folded, persistent=persistent)
