"""Tracing with the DSL: one kernel at a time, and without repeated look-ups.

The DSL looks up the place of each operation in its source: it walks up the stack to the first frame
that is not its own, and through that function's table of positions from the start. A kernel has
some 30,000 operations at a few thousand places, so within `tracing` each place is looked up once.
It also looks up a place for each value that it wraps, two of three look-ups, and then builds no
operation: within `tracing` it does not. Nor are cycles collected there, which takes long in a
process that holds torch and the DSL. The traced IR is the same, locations included.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

_one_at_a_time = threading.RLock()


@contextmanager
def tracing() -> Iterator[None]:
    """A context in which only this thread traces, and faster."""
    from cutlass._mlir_helpers import op

    with _one_at_a_time, uncollected(), _Places(op).looked_up(), _values_wrapped_as_they_are():
        yield


@contextmanager
def _values_wrapped_as_they_are() -> Iterator[None]:
    """A context in which a value of the IR that becomes an ArithValue has no place looked up for
    it: no operation is built."""
    from cutlass._mlir import ir
    from cutlass._mlir_helpers.arith import ArithValue
    from cutlass.base_dsl.common import is_pyir_enabled

    original: Any = ArithValue.__init__
    plain = getattr(original, "__wrapped__", None)
    if plain is None or is_pyir_enabled():  # which may load the value from where it is kept
        yield
        return

    def wrap(self: Any, v: Any, signed: Any = None, **where: Any) -> None:
        (plain if isinstance(v, ir.Value) else original)(self, v, signed, **where)

    ArithValue.__init__ = wrap
    try:
        yield
    finally:
        ArithValue.__init__ = original


@contextmanager
def uncollected() -> Iterator[None]:
    """A context without garbage collection of cycles, for code that makes few of them or frees its
    own."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Places:
    """The look-ups of the DSL's `op` for the places of one compile."""

    CALLER, LOCATION = "_get_caller_frame_info", "_get_location_from_frame_info"
    OWN, INFO = "_is_framework_stack_frame", "_fast_frameinfo"

    def __init__(self, op: ModuleType) -> None:
        self.op = op
        self.own: dict[int, bool] = {}  # by code: whether it is the DSL's
        self.infos: dict[tuple[int, int], Any] = {}  # by code and instruction
        self.locations: dict[int, Any] = {}  # by info
        self.codes: list[CodeType] = []  # NOTE: keeps them alive, so that each id stays unique

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        op = self.op
        names = (self.CALLER, self.LOCATION, self.OWN, self.INFO)
        if not all(hasattr(op, name) for name in names) or getattr(op, "_INCLUDE_LIB_FRAME", True):
            yield  # another DSL, or one that is being debugged, keeps its own look-ups
            return
        caller, self.locate = getattr(op, self.CALLER), getattr(op, self.LOCATION)
        self.is_own, self.inform = getattr(op, self.OWN), getattr(op, self.INFO)
        setattr(op, self.CALLER, self.caller)
        setattr(op, self.LOCATION, self.location)
        try:
            yield
        finally:
            setattr(op, self.CALLER, caller)
            setattr(op, self.LOCATION, self.locate)

    def caller(self) -> Any:
        """The place of the first frame that is not the DSL's, from the caller's caller on."""
        start: FrameType | None = sys._getframe(2)
        frame, own = start, self.own
        while frame is not None:
            code = id(frame.f_code)
            if code not in own:
                own[code] = self.is_own(frame)
                self.codes.append(frame.f_code)
            if not own[code]:
                break
            frame = frame.f_back
        frame = frame or start
        assert frame is not None
        place = id(frame.f_code), frame.f_lasti
        if place not in self.infos:
            self.infos[place] = self.inform(frame)
        return self.infos[place]

    def location(self, info: Any) -> Any:
        """The place in the IR; each of its contexts has a location of its own."""
        known = self.locations.get(id(info))
        if known is None or known.context != self.op.ir.Context.current:
            known = self.locations[id(info)] = self.locate(info)
        return known
