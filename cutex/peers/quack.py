"""quack's kernels (quack-kernels)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any


def gemm(tuned: bool) -> tuple[Callable[..., Any], str]:
    """c = a @ b.T with its default config, or with the one that its tuner finds."""
    from quack.gemm_interface import gemm

    version = metadata.version("quack-kernels")
    return lambda a, b, c: gemm(a, b.T, out=c, tuned=tuned), f"quack-kernels {version}"


def gemm_with(config: Mapping[str, Any]) -> Callable[..., Any]:
    """c = a @ b.T with a given config, the fields of quack's own GemmConfig."""
    from quack.gemm_config import GemmConfig as QuackConfig
    from quack.gemm_interface import gemm_tuned

    more = {"cluster_n": 1, "is_dynamic_persistent": False, "device_capacity": 9}
    chosen = QuackConfig(**config, **more)
    return lambda a, b, c: gemm_tuned.fn(a, b.T, c, config=chosen)


def layer(dtype: str) -> Callable[..., Any]:
    """out = a @ b with its default config."""
    from quack.gemm_interface import gemm

    if dtype == "e4m3":
        raise ValueError("quack's gemm is timed with 16-bit operands")
    return lambda a, b, out: gemm(a, b, out=out, tuned=False)


def rmsnorm() -> tuple[Callable[..., Any], str]:
    """rmsnorm_fwd(x, weight, eps=), whose first result is the norm; and the version."""
    from quack.rmsnorm import rmsnorm_fwd

    return rmsnorm_fwd, metadata.version("quack-kernels")


def softmax() -> tuple[Callable[..., Any], str]:
    """softmax_fwd(x), of rows; and the version."""
    from quack.softmax import softmax_fwd

    return softmax_fwd, metadata.version("quack-kernels")
