"""The choice of a backward config on Hopper: tiles by head dim and features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutex.kernels.attention.backward.config import TILE, BackwardConfig

_BY_64 = {"dq_columns": 64, "dq_slots": 1}
# by head dims: what differs from BackwardConfig's defaults
_TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"num_stages": 4, "dp_start": 0, "registers": (200, 104), **_BY_64, "dq_slots": 2},
    (96, 96): {"dq_columns": 96, "dq_slots": 2, "registers": (208, 88), "alternate": True},
    (128, 128): {"ds_slots": 3, "dp_start": 1},
    (192, 128): {"tile_n": 64, "pairs": True, "dp_start": 1, "registers": (216, 152, 136)},
    (192, 192): {
        **{"tile_n": 64, "pairs": True, "num_stages": 2, "dp_start": 1},
        "registers": (216, 152, 136),
    },
    (256, 256): {
        **{"tile_n": 64, "pairs": True, "num_stages": 2, "ds_slots": 1, "dq_columns": 64},
        "dp_start": 1,
        "registers": (240, 168, 96),
    },
}
# what differs without a soft cap, where the band has at most one bound or adds come in one order
_OWN_DQ = {
    **{"own_dq": True, "alternate": True, "num_stages": 2, "ds_slots": 2, "dq_columns": 64},
    **{"dq_slots": 4, "registers": (240, 24), "early_stats": True},
}
_UNCAPPED: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {**_OWN_DQ, "tile_m": 128, "score_m": 128},
    (128, 128): _OWN_DQ,
}


def fitted(config: BackwardConfig) -> BackwardConfig:
    """`config`, whose fields say what is computed, with its tiles chosen."""
    dims = config.head_dim, config.head_dim_v
    tiles = _TILES.get(dims, {})
    c = config
    if not c.softcap and (c.deterministic or c.causal or not any(c.window)):
        tiles = {**tiles, **_UNCAPPED.get(dims, {})}
        # NOTE: LSE of 128 queries, beside what a mask or a list of sequences needs, would spill
        plain = not (c.causal or c.window[0] or c.ragged_q or c.ragged_k)
        if tiles.get("tile_m") == 128:
            tiles |= {"early_stats": plain, "dq_last": c.causal}
        late = not c.deterministic and c.varlen_q == c.varlen_k
        tiles |= {"late_zeros": "own_dq" in tiles and late}
        equal = plain and not (c.deterministic or any(c.window))
        tiles |= {"spread": "own_dq" in tiles and equal}
        c = replace(c, **tiles)
        # NOTE: of 128 queries a block it pays where there are few tiles (ops, own_backward.py)
        tiles |= {"rotated": c.may_rotate and c.tile_m == TILE}
    # NOTE: with a soft cap its derivative takes the registers that the overlap needs
    return replace(config, **tiles, overlap=config.wide or not config.softcap)
