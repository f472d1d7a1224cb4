"""The operators in Triton, written for comparison: how far tiles, tuning, order and TMA go there.

The modules of this package import Triton, an extra; this one does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from typing import Any

Loader = Callable[[Any], tuple[Callable[..., Any], str]]


def peer(module: str, name: str) -> Loader:
    """The loader of a function of a module of this package, which returns a launch for a
    problem."""
    return partial(_load, module, name)


def _load(module: str, name: str, problem: Any) -> tuple[Callable[..., Any], str]:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ImportError("Triton is not installed: pip install triton") from None
    make = getattr(import_module(f"{__name__}.{module}"), name)
    return make(problem), f"triton {version}"
