"""Names for the warps of a kernel: the function of its source in which they execute most of their
instructions, or a name by their events where the source is not here.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from cutex.sim.ptx.parse import Instruction
from cutex.sim.timing.events import Columns, Event, Load, Mma, Reply, Store

_LIBRARIES = ("site-packages", "/device/", "/schedulers/")  # code that kernels share
_WHOLE = {"kernel", "__call__"}  # functions that all warps run
# functions with which a role begins, or of which it consists, in our kernels: not names of a role
_PARTS = {"give_registers", "take_registers", "run", "start", "part", "tile_counts"}


def role(counts: list[tuple[Instruction, int]], program: list[Event]) -> str:
    """The name of a warp that executed instructions so many times, and has these events."""
    if not any(isinstance(e, Load | Mma | Store | Columns) for e in program):
        return by_deeds(program)
    found: Counter[str] = Counter()
    called: set[str] = set()
    for ins, n in counts:
        if ins.source and not any(part in ins.source[0] for part in _LIBRARIES):
            called |= _called_by_kernel(ins.source[0])
            name = _function(*ins.source[:2])
            if name and name not in _WHOLE:
                found[name] += n
    for name, _ in found.most_common():
        if name in called:
            return name
    return by_deeds(program)


def distinct(names: dict[int, str], programs: dict[int, list[Event]]) -> dict[int, str]:
    """The names of warps: the function's, or one by events where that names no role, or where warps
    with different events share it.
    """
    deeds = {warp: by_deeds(programs.get(warp, [])) for warp in names}
    of_name: dict[str, set[str]] = {}
    for warp, name in names.items():
        of_name.setdefault(name, set()).add(deeds[warp])
    return {
        warp: deeds[warp] if name in _PARTS or len(of_name[name]) > 1 else name
        for warp, name in names.items()
    }


def by_deeds(program: list[Event]) -> str:
    kinds = Counter(type(e) for e in program)
    if kinds[Load] and not kinds[Mma]:
        return "load"
    if kinds[Mma]:
        return "load and mma" if kinds[Load] else "mma"
    if kinds[Columns] or kinds[Store]:
        return "epilogue"
    return "schedule" if kinds[Reply] else "others"


def _function(path: str, line: int) -> str:
    best, width = "", 1 << 30
    for name, first, last in _functions(path):
        if first <= line <= last and last - first < width:
            best, width = name, last - first
    return best


@cache
def _called_by_kernel(path: str) -> frozenset[str]:
    """The methods that a `kernel` of the file calls."""
    names = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef) and node.name in _WHOLE:
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    names.add(call.func.attr)
    return frozenset(names)


@cache
def _tree(path: str) -> ast.Module:
    try:
        return ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _functions(path: str) -> list[tuple[str, int, int]]:
    return [
        (n.name, n.lineno, n.end_lineno or n.lineno)
        for n in ast.walk(_tree(path))
        if isinstance(n, ast.FunctionDef)
    ]
