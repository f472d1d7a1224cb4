"""Whether the operators' CPU tensors run in the simulator, in this thread, and by whose launches.

Apart from cutex.ops, so that `python -m cutex.sim` may say so before a script imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class SimulatedDevice:
    """The device that CPU tensors stand for: its arch, and a function that launches a compiled
    kernel on its arguments."""

    arch: str
    launch: Callable[[Any, tuple[Any, ...]], None]


_current: ContextVar[SimulatedDevice | None] = ContextVar("simulation", default=None)


def current() -> SimulatedDevice | None:
    return _current.get()


@contextmanager
def simulating(simulation: SimulatedDevice) -> Iterator[None]:
    """A context in which this thread's CPU tensors run on `simulation`; the innermost counts."""
    token = _current.set(simulation)
    try:
        yield
    finally:
        _current.reset(token)
