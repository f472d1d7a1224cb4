"""Facts of a kernel's trace that its PTX lacks: call stacks, and names of shared memory.

A .loc of PTX names one line, though functions called from several places have that line, and of
shared memory PTX has only offsets. A `Recorder` watches while the DSL traces a kernel, and gives
each further call stack of a line a column number of its own (the first keeps the true column: a
column changes no instruction). It writes its findings as one comment at the end of the PTX, which
`debug_info_of` reads.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from cutex.assigned_names import Call, assigned_name
from cutex.qualified_names import qualified_name

FORMAT = 2  # version of the comment's format
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_MARK = "// cutex: "
_KERNEL, _OUTSIDE = 0, -1  # paths: to a kernel's own body; outside of a kernel
_CODES = range(1000, 1 << 16)  # columns that stand for a call stack; 16 bits in LLVM
_KERNEL_EDGE = "kernel_wrapper"  # the DSL's function that calls a kernel's body
_GENERATED = re.compile(r"(ifexp_)?(\w+_block|\w+_region|loop_body)_\d+")  # by the DSL's rewriting
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)", re.M)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)


def where(at: Any) -> str:
    """'kernel.py:74:9' of a place with a file, a line and a column, relative to the working
    directory where the file is below it; cutex's own files are called cutex/... wherever it is
    installed.
    """
    file = at.file.removeprefix(os.getcwd() + os.sep)
    if file.startswith(_PACKAGE + os.sep):
        file = os.path.basename(_PACKAGE) + file.removeprefix(_PACKAGE)
    return f"{file}:{at.line}:{at.column}" if at.column else f"{file}:{at.line}"


Stack = tuple[Call, ...]  # innermost first; the last is in the kernel itself


class Buffer(NamedTuple):
    """A named part of a CTA's dynamic shared memory."""

    name: str
    offset: int
    size: int  # bytes
    unit: int  # bytes of an element; 0: unknown


class DebugInfo(NamedTuple):
    """Facts of one PTX text: stacks by (file, line, column of the .loc); buffers by the kernel's
    function."""

    calls: dict[tuple[str, int, int], Stack]
    buffers: dict[str, list[Buffer]]

    def of_kernel(self, entry: str, entries: int) -> list[Buffer]:
        """The buffers of an entry of the PTX; none if more than one kernel's may be meant."""
        if len(self.buffers) == entries == 1:
            return next(iter(self.buffers.values()))
        named = [b for function, b in self.buffers.items() if f"_{function}_" in f"_{entry}_"]
        return named[0] if len(named) == 1 else []


def debug_info_of(ptx: str) -> DebugInfo:
    """The findings that a `Recorder` wrote into the text; empty where none ran, or where its
    comment was changed."""
    at = ptx.rfind(f"\n{_MARK}")
    if at >= 0:
        with suppress(ValueError, IndexError, KeyError, TypeError, AttributeError):
            return _read(json.loads(ptx[at + 1 + len(_MARK) :].partition("\n")[0]))
    return DebugInfo({}, {})


def _read(written: dict[str, Any]) -> DebugInfo:
    frames = [Call(*f) for f in written["frames"]]
    calls = {(f, n, c): tuple(frames[i] for i in stack) for f, n, c, stack in written["calls"]}
    return DebugInfo(calls, {k: [Buffer(*b) for b in v] for k, v in written["smem"].items()})


@contextmanager
def recording() -> Iterator[Recorder]:
    """A context that records what the DSL traces in it."""
    from cutlass.memory import SmemAllocator

    recorder = Recorder()
    original = SmemAllocator._smem_alloca

    def alloca(self: Any, layout: Any, dtype: Any, alignment: int, *args: Any, **named: Any) -> Any:
        recorder.allocate(layout, dtype, alignment, named.get("struct_fields"))
        return original(self, layout, dtype, alignment, *args, **named)

    from cutlass._mlir_helpers import op

    # NOTE: it passes for a function of the DSL, so its operations get the caller's location
    alloca.__code__ = alloca.__code__.replace(co_filename=original.__code__.co_filename)
    SmemAllocator._smem_alloca = alloca
    # NOTE: the same for the stand-ins through which a script's calls pass: an operation of which no
    # author's function is part gets the place of the script, not of a stand-in
    prefixes = op._FRAMEWORK_MODULE_PREFIXES
    op._FRAMEWORK_MODULE_PREFIXES = (*prefixes, "cutex.sim")
    try:
        with op.loc_transform(recorder.locate):
            yield recorder
    finally:
        SmemAllocator._smem_alloca = original
        op._FRAMEWORK_MODULE_PREFIXES = prefixes


class Recorder:
    """Records the call stacks and the shared memory of one compilation."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int, int], Stack] = {}
        self.buffers: dict[str, list[Buffer]] = {}
        self._codes: dict[tuple[str, int], int] = {}  # columns in use, by file and line
        self._columns: dict[Stack, int] = {}
        self.turns: Counter[Stack] = Counter()  # allocations so far, by their place
        self._paths = _Paths()
        self._known: dict[int, Any] = {}  # locations, by path

    def annotate(self, ptx: str) -> str:
        """The text with the stacks and buffers of its lines, as a comment at its end."""
        ptx = ptx.rstrip("\0")
        files = dict(_FILE.findall(ptx))
        there = {(files.get(f, ""), int(n), int(c)) for f, n, c in _LOC.findall(ptx)}
        frames: dict[Call, int] = {}
        calls = [
            [*place, [frames.setdefault(call, len(frames)) for call in stack]]
            for place, stack in self.calls.items()
            if place in there
        ]
        written = {"frames": list(frames), "calls": calls, "smem": self.buffers}
        return f"{ptx.rstrip()}\n{_MARK}{json.dumps(written, separators=(',', ':'))}\n"

    # -- call stacks -------------------------------------------------------------------------------

    def locate(self, loc: Any) -> Any:
        """The location of the operation that the DSL is about to build, distinguished by its
        stack."""
        path = self._paths.of(sys._getframe(2))
        if path <= _KERNEL:
            return loc
        if path not in self._known:
            self._known[path] = self._location(_stack(self._paths.frames(path), self._paths.names))
        return self._known[path] or loc

    def _location(self, stack: Stack) -> Any:
        """A location with a column that stands for the stack; None if the true column does."""
        from cutlass._mlir import ir

        here = stack[0]
        if stack not in self._columns:
            column = max(0, here.column - 1)
            if (here.file, here.line, column) in self.calls:
                column = self._codes.get((here.file, here.line), _CODES.start)
                if column not in _CODES:
                    return None
                self._codes[here.file, here.line] = column + 1
            self._columns[stack] = column
            self.calls[here.file, here.line, column] = stack
        if self._columns[stack] not in _CODES:
            return None
        place = ir.Location.file(here.file, here.line, self._columns[stack])
        return ir.Location.name(here.function, childLoc=place)

    # -- shared memory -----------------------------------------------------------------------------

    def allocate(self, layout: Any, dtype: Any, alignment: int, fields: Any) -> None:
        """Record an allocation; the DSL places them one after another."""
        from cutlass import cute

        frame = sys._getframe(2)
        stack = _stack(self._paths.frames(self._paths.of(frame)), self._paths.names)
        if not stack:
            return
        buffers = self.buffers.setdefault(stack[-1].function.rpartition(".")[2], [])
        with suppress(TypeError):  # a layout that is not static
            size = cute.cosize(layout) * dtype.width // 8
            alignment = max(alignment, dtype.width // 8)
            end = buffers[-1].offset + buffers[-1].size if buffers else 0
            at = -(-end // alignment) * alignment
            name = assigned_name(stack, self.turns[stack])
            self.turns[stack] += 1
            if not fields:
                buffers.append(Buffer(name, at, size, _element_bytes(frame)))
                return
            prefix = f"{name}." if name else ""
            for field, bytes_, offset in fields:
                unit = 8 if bytes_ % 8 == 0 else 4
                buffers.append(Buffer(f"{prefix}{field}", at + offset, bytes_, unit))
            if buffers[-1].offset + buffers[-1].size < at + size:  # the padding of a struct
                buffers.append(Buffer(f"{prefix}padding", at + size, 0, 0))


class _Paths:
    """Numbers for the call paths from the kernel, through functions of its author, to a place.

    NOTE: an operation is built every 50 microseconds, 50 calls deep. Most come from the function
    that built the one before, so the path to that is kept.
    """

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        self.names: dict[int, str] = {}  # of an author's functions
        self.codes: list[CodeType] = []  # NOTE: keeps them alive, so that each id stays unique
        self.number: dict[tuple[int, int, int], int] = {}
        self.steps: list[tuple[CodeType | None, int, int]] = [(None, 0, _KERNEL)]
        self.way: list[FrameType] = []  # the calls under way, the kernel's first
        self.above: dict[FrameType, int] = {}  # the path of each of their callers

    def of(self, frame: FrameType | None) -> int:
        """The path to the innermost of an author's functions; _OUTSIDE where there is no kernel."""
        entered: list[FrameType] = []
        path = _OUTSIDE
        while frame is not None:
            kind = self.kinds.get(id(frame.f_code)) or self._kind(frame)
            if kind == "user":
                entered.append(frame)
                if frame in self.above:
                    path = self.above[frame]
                    break
            elif kind == "edge":
                path = _KERNEL
                break
            frame = frame.f_back
        if path == _OUTSIDE:
            return _OUTSIDE
        while self.way and not (entered and self.way[-1] is entered[-1]):
            del self.above[self.way.pop()]
        for frame in reversed(entered):
            if frame not in self.above:
                self.way.append(frame)
                self.above[frame] = path
            path = self._step(frame.f_code, frame.f_lasti, path)
        return path

    def frames(self, path: int) -> tuple[tuple[CodeType, int], ...]:
        """The code and the instruction of each step of a path, innermost first."""
        found = []
        while path > _KERNEL:
            code, at, path = self.steps[path]
            assert code is not None
            found.append((code, at))
        return tuple(found)

    def _step(self, code: CodeType, at: int, path: int) -> int:
        key = id(code), at, path
        if key not in self.number:
            self.number[key] = len(self.steps)
            self.steps.append((code, at, path))
        return self.number[key]

    def _kind(self, frame: FrameType) -> str:
        """A function's author: a user, the DSL, or the DSL where it calls a kernel's body."""
        from cutlass._mlir_helpers import op

        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        kind = "edge" if code.co_name == _KERNEL_EDGE else "framework"
        # NOTE: a script's calls pass through the first, a @deprecated function's through the second
        stand_in = module.startswith("cutex.sim.") or module == "typing_extensions"
        if not (
            stand_in or op._is_framework_module(module) or op._is_framework_frame(code.co_filename)
        ):
            kind = "user"
            self.names[id(code)] = qualified_name(code)
        self.codes.append(code)
        self.kinds[id(code)] = kind
        return kind


def _stack(frames: tuple[tuple[CodeType, int], ...], names: dict[int, str]) -> Stack:
    """The call stack of frames, without the functions that the DSL makes of loops and branches; of
    functions with these names, by their code's id."""
    stack: list[Call] = []
    inner = ""  # the enclosing functions of a generated one
    for code, at in frames:
        name = names[id(code)]
        own = _own(name)
        if not (inner and own == inner):
            line, column = _position(code, at)
            stack.append(Call(code.co_filename, line, column, own.replace(".<locals>", "")))
        inner = own if own != name else ""
    return tuple(stack)


@lru_cache(maxsize=4096)
def _own(name: str) -> str:
    """The name of the function that the DSL made this one of a loop or a branch of."""
    parts = name.split(".<locals>.")
    while _GENERATED.fullmatch(parts[-1]) and len(parts) > 1:
        parts.pop()
    return ".<locals>.".join(parts)


def _position(code: CodeType, at: int) -> tuple[int, int]:
    places = _positions(code)
    line, column = places[at // 2] if at // 2 < len(places) else (None, None)
    return line or code.co_firstlineno, 0 if column is None else column + 1


@lru_cache(maxsize=1024)
def _positions(code: CodeType) -> list[tuple[int | None, int | None]]:
    """The line and the column of each instruction."""
    return [(line, column) for line, _, column, _ in code.co_positions()]


def _element_bytes(frame: FrameType | None) -> int:
    """Bytes of an element of the allocate_array or allocate_tensor call above this frame; 0 without
    one."""
    for _ in range(8):
        if frame is None:
            break
        if frame.f_code.co_name in ("allocate_array", "allocate_tensor"):
            return int(getattr(frame.f_locals.get("element_type"), "width", 0)) // 8
        frame = frame.f_back
    return 0
