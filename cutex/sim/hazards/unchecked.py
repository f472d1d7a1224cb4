"""The stand-in for race checks in a run without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unchecked:
    """A check that finds nothing: every method does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*_: Any) -> None:
    return None
