"""Numbers and flags among the arguments of a call."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch


def check_flag(name: str, x: Any) -> None:
    """Raise TypeError unless x is True or False: "no" and 0.0 would count as one of them, too."""
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False, got {x!r:.60}")


def number(name: str, x: Any) -> float:
    """x as a float; TypeError if it is not a number on the host, such as a tensor, ValueError if no
    float is as large."""
    if isinstance(x, torch.SymInt | torch.SymFloat):
        return x
    if not isinstance(x, Real):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None
