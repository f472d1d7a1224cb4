"""Names for the warps of a kernel: the function that the kernel's body calls for them, or a name by
their events where the source is not here.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from cutex.debug_info import Call
from cutex.sim.ptx.program import Instruction
from cutex.sim.timing.events import Columns, Event, Load, Mma, Reply, Send, Store

_LIBRARIES = ("site-packages", "/device/", "/schedulers/")  # code that kernels share
_WHOLE = {"kernel", "__call__"}  # functions that all warps run
# functions with which a role begins, or of which it consists, in our kernels: not names of a role
_PARTS = {"give_registers", "take_registers", "run", "start", "part", "tile", "tile_counts"}
_METHOD = {"run", "start", "__call__"}  # methods of a role's object: its class has the name
_DEEDS = (r"wgmma\.mma_async|tcgen05\.mma", r"cp\.async\.bulk.*complete_tx")  # only roles run them
DEPTH = 7  # the calls, from the kernel's body on, in which roles may differ


def role(counts: list[tuple[Instruction, int]], program: list[Event]) -> tuple[str, ...]:
    """The names of a warp that executed instructions so many times, and has these events: first
    that of the function that the kernel's body calls, then that of the function below it.
    """
    if not any(isinstance(e, Load | Mma | Store | Columns | Send) for e in program):
        return (by_deeds(program),)
    if any(ins.source and ins.source.stack for ins, _ in counts):
        return tuple(_entered(counts, depth) or by_deeds(program) for depth in range(1, DEPTH))
    found: Counter[str] = Counter()
    called: set[str] = set()
    for ins, n in counts:
        if ins.source and not _shared(ins.source.file):
            called |= _called_by_kernel(ins.source.file)
            name = _function(*ins.source[:2])
            if name and name not in _WHOLE:
                found[name] += n
    for name, _ in found.most_common():
        if name in called:
            return (name,)
    return (by_deeds(program),)


def _entered(counts: list[tuple[Instruction, int]], depth: int) -> str:
    """The function, of those that are `depth` calls below the kernel's body, in which the warp
    issues MMAs, or else loads, or else spends most instructions; "" where that is shared code, or
    the kernel's body itself.
    """
    found: Counter[str] = Counter()
    by_deed: list[Counter[str]] = [Counter() for _ in _DEEDS]
    for ins, n in counts:
        stack = ins.source.stack if ins.source else ()
        if len(stack) <= depth:
            found[""] += n if len(stack) == 1 else 0
            continue
        entered = stack[-1 - depth]
        name = "" if _shared(entered.file) else _role_name(entered)
        found[name] += n
        for deed, by in zip(_DEEDS, by_deed, strict=True):
            if name and re.match(deed, ins.op):
                by[name] += n
    for names in (*by_deed, found):
        if names:
            return names.most_common(1)[0][0]
    return ""


def _role_name(entered: Call) -> str:
    """'load_tiles' for a method `load_tiles`; 'softmax' for the method `run` of a SoftmaxRole."""
    cls, _, function = entered.function.rpartition(".")
    if function not in _METHOD:
        return function
    cls = cls.rpartition(".")[2] or _class(entered.file, entered.line)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.removesuffix("Role")).lower() or function


def _shared(path: str) -> bool:
    return any(part in path for part in _LIBRARIES)


def distinct(names: dict[int, tuple[str, ...]], programs: dict[int, list[Event]]) -> dict[int, str]:
    """The name of each warp: the first of its `names` that no warp with different events shares, or
    else a name by its events.
    """
    deeds = {warp: by_deeds(programs.get(warp, [])) for warp in names}
    settled: dict[int, str] = {}
    for depth in range(max(map(len, names.values()), default=0)):
        open_ = [w for w, of in names.items() if w not in settled and len(of) > depth]
        of_name: dict[str, set[str]] = {}
        for warp in open_:
            of_name.setdefault(names[warp][depth], set()).add(deeds[warp])
        for warp in open_:
            name = names[warp][depth]
            if name not in _PARTS and len(of_name[name]) == 1:
                settled[warp] = name
    return {warp: settled.get(warp, deeds[warp]) for warp in names}


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
def _class(path: str, line: int) -> str:
    """The innermost class of the file around a line; "" if there is none."""
    around = [
        n
        for n in ast.walk(_tree(path))
        if isinstance(n, ast.ClassDef) and n.lineno <= line <= (n.end_lineno or n.lineno)
    ]
    return max(around, key=lambda n: n.lineno).name if around else ""


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
        return ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _functions(path: str) -> list[tuple[str, int, int]]:
    return [
        (n.name, n.lineno, n.end_lineno or n.lineno)
        for n in ast.walk(_tree(path))
        if isinstance(n, ast.FunctionDef)
    ]
