"""The choice of a backward config, by arch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90 import choose as sm90
from cutex.kernels.attention.backward.sm100 import choose as sm100
from cutex.kernels.attention.backward.sm100.config import Sm100BackwardConfig

Config = BackwardConfig | Sm100BackwardConfig
CONFIGS: dict[str, type[BackwardConfig] | type[Sm100BackwardConfig]] = {
    "sm_90a": BackwardConfig,
    "sm_100a": Sm100BackwardConfig,
    "sm_103a": Sm100BackwardConfig,
}
_FITTED: dict[type, Callable[[Any, str], Any]] = {
    BackwardConfig: lambda config, dtype: sm90.fitted(config),
    Sm100BackwardConfig: sm100.fitted,
}


def fitted(config: Any, dtype: str = "bf16") -> Any:
    """`config`, which says what is computed, with its tiles chosen for `dtype`."""
    return _FITTED[type(config)](config, dtype)
