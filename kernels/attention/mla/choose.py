"""The MLA configs of each arch."""

from __future__ import annotations

from cutex.kernels.attention.mla.config import MlaConfig
from cutex.kernels.attention.mla.sm90.config import Sm90MlaConfig
from cutex.kernels.attention.mla.sm100.config import Sm100MlaConfig

CONFIGS: dict[str, type[MlaConfig]] = {"sm_90a": Sm90MlaConfig, "sm_100a": Sm100MlaConfig}
