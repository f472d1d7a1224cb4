"""The choice of a backward config: tiles by head dim and features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutex.kernels.attention.backward.config import BackwardConfig

# by head dim: what differs from BackwardConfig's defaults
_TILES: dict[int, dict[str, Any]] = {
    # more columns of dQ at a time would read dS less often, but 64 of them give 472 TFLOPS, not 510
    64: {"num_stages": 4},
}


def fitted(config: BackwardConfig) -> BackwardConfig:
    """`config`, whose fields say what is computed, with its tiles chosen."""
    tiles = _TILES.get(config.head_dim, {})
    # NOTE: with a soft cap its derivative takes the registers that the overlap needs
    return replace(config, overlap=not config.softcap, **tiles)
