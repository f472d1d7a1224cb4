"""The choice of an MLA config."""

from __future__ import annotations

from dataclasses import replace

from cutex.kernels.attention.mla.config import MlaConfig

CONFIGS: dict[str, type[MlaConfig]] = {"sm_90a": MlaConfig}


def fitted(config: MlaConfig, rows: int) -> MlaConfig:
    """`config`, whose fields say what is computed, with its tiles chosen for `rows` packed rows of
    each sequence."""
    share = -(-rows // config.tile_m) % 2 == 0
    return replace(config, share=share)
