"""Names of allocations, read off the source of a kernel.

Of a call at a line and a column of the source the name is read off the statement around it: the
target, element or key that the call belongs to. A comprehension makes several objects at one
place, so the `turn` of the call counts: `a, b = (allocate(n) for n in sizes)` has the names a and
b, `ring = [allocate(n) for n in sizes]` ring[0], ring[1].
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

_COMPREHENSIONS = ast.GeneratorExp | ast.ListComp | ast.SetComp


class Call(NamedTuple):
    """A place in the source and its function; line and column count from 1, an unknown column is
    0."""

    file: str
    line: int
    column: int
    function: str


def assigned_name(stack: Iterable[Call], turn: int = 0) -> str:
    """The name of a call's result: the variables to which it is assigned on the way from the
    kernel, as `ab.full` for a `full` in the call that the kernel assigns to `ab`.
    """
    names: list[str] = []
    above: ast.stmt | None = None
    returned: int | None = None  # the place of the result in the tuple that the function returns
    for call in stack:
        statement, expression = _found(call)
        name = ""
        # NOTE: a comprehension has a frame of its own, of the statement that also calls it
        if statement is not above:
            name = _name(statement, expression, call, turn)
            if returned is not None and isinstance(statement, ast.Assign) and not name:
                name = _element(statement.targets[0], returned)
                names = [] if name else names
            returned = _returned(statement, call, name)
        above = statement
        if name and name not in names[-1:]:
            names.append(name)
    return ".".join(reversed(names))


def _name(statement: ast.stmt | None, expression: ast.Call | None, call: Call, turn: int) -> str:
    """The name that `statement` gives to the result of `expression`, or a text among its
    arguments."""
    at = call.line, call.column - 1
    target: ast.expr | None = None
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    value = getattr(statement, "value", None)
    if isinstance(value, ast.expr) and (name := _walrus(value, at)):
        return name
    if target is not None and value is not None and (name := _of(target, value, at, turn)):
        return name
    if value is not expression and (name := _appended_to(value)):
        return f"{name}[{turn}]"
    texts = [a.value for a in getattr(expression, "args", ()) if isinstance(a, ast.Constant)]
    return next((t for t in texts if isinstance(t, str)), "")


def _of(target: ast.expr, value: ast.expr, at: tuple[int, int], turn: int) -> str:
    """The name that assigning `value` to `target` gives to the call at a line and column."""
    inner = next((part for part in _parts(value) if _holds(part, at)), None)
    if isinstance(value, ast.Tuple | ast.List) and inner in value.elts:
        index = value.elts.index(inner)
        if isinstance(target, ast.Tuple | ast.List):
            if len(target.elts) != len(value.elts):
                return ""
            return _of(target.elts[index], inner, at, turn)
        return f"{_text(target)}[{index}]"
    if isinstance(value, ast.Dict) and inner in value.values:
        key = value.keys[value.values.index(inner)]
        return f"{_text(target)}[{ast.unparse(key)}]" if key is not None else _text(target)
    if isinstance(value, ast.Call) and (name := _text(target)):
        made = ast.unparse(value.func).rpartition(".")[2]
        field = next((k.arg for k in value.keywords if k.arg and _holds(k.value, at)), None)
        if field and made == "dict":
            return f"{name}[{field!r}]"
        if field and made[:1].isupper():  # a class
            return f"{name}.{field}"
    comprehension = next((part for part in _comprehensions(value) if _holds(part.elt, at)), None)
    if comprehension is not None:
        if isinstance(target, ast.Tuple | ast.List):
            return _element(target, turn)
        return f"{_text(target)}[{turn}]"
    return _text(target)


def _element(target: ast.expr, index: int) -> str:
    """The name that a target of several gives to the value of this number; they are counted anew
    behind the last one, unless one of them is starred.
    """
    if not isinstance(target, ast.Tuple | ast.List):
        return ""
    starred = next((i for i, t in enumerate(target.elts) if isinstance(t, ast.Starred)), None)
    if starred is None:
        return _text(target.elts[index % len(target.elts)])
    if index < starred:
        return _text(target.elts[index])
    rest = target.elts[starred]
    assert isinstance(rest, ast.Starred)
    last = starred == len(target.elts) - 1  # else it is not known how many belong to it
    return f"{_text(rest.value)}[{index - starred}]" if last else ""


def _returned(statement: ast.stmt | None, call: Call, name: str) -> int | None:
    """The place of a call's result in the tuple that its function returns, at once or by the
    ``name`` that it is assigned to.
    """
    at = call.line, call.column - 1
    if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
        return next((i for i, e in enumerate(statement.value.elts) if _holds(e, at)), None)
    if not name.isidentifier():
        return None
    statements, _ = _parsed("".join(linecache.getlines(call.file)))
    functions = [s for s in statements.get(call.line, []) if isinstance(s, ast.FunctionDef)]
    inside = ast.walk(functions[-1]) if functions else ()
    ends = [s.value for s in inside if isinstance(s, ast.Return)]
    if len(ends) != 1 or not isinstance(ends[0], ast.Tuple):
        return None
    names = [e.id if isinstance(e, ast.Name) else "" for e in ends[0].elts]
    return names.index(name) if names.count(name) == 1 else None


def _appended_to(value: ast.expr | None) -> str:
    """The list that `value` is a call of append of."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return _text(value.func.value) if value.func.attr == "append" else ""
    return ""


def _parts(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.Tuple | ast.List):
        return value.elts
    return value.values if isinstance(value, ast.Dict) else []


def _comprehensions(value: ast.expr) -> Iterator[ast.GeneratorExp | ast.ListComp | ast.SetComp]:
    return (node for node in ast.walk(value) if isinstance(node, _COMPREHENSIONS))


def _walrus(value: ast.expr, at: tuple[int, int]) -> str:
    for node in ast.walk(value):
        if isinstance(node, ast.NamedExpr) and _holds(node.value, at):
            return node.target.id
    return ""


def _text(target: ast.expr) -> str:
    """The name in an assignment's target; none of several that one call gives its result to."""
    if isinstance(target, ast.Name | ast.Attribute | ast.Subscript):
        return ast.unparse(target).removeprefix("self.")
    return ""


def _holds(node: ast.AST, at: tuple[int, int]) -> bool:
    begin = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    end = getattr(node, "end_lineno", None), getattr(node, "end_col_offset", None)
    return begin <= at and (end[0] is None or at < end)


def _found(call: Call) -> tuple[ast.stmt | None, ast.Call | None]:
    """The innermost statement at a place, and the innermost call that begins there."""
    statements, calls = _parsed("".join(linecache.getlines(call.file)))
    on_line = statements.get(call.line, [])
    at = call.line, call.column - 1
    holding = [s for s in on_line if call.column and _holds(s, at)]
    innermost = (holding or on_line)[-1:]
    return innermost[0] if innermost else None, calls.get((call.line, call.column))


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[dict[int, list[ast.stmt]], dict[tuple[int, int], ast.Call]]:
    """The statements of each line, the innermost last, and the innermost call that begins at a
    line and column.
    """
    statements: dict[int, list[ast.stmt]] = {}
    calls: dict[tuple[int, int], ast.Call] = {}
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return statements, calls
    for node in ast.walk(tree):  # the innermost come last
        if isinstance(node, ast.stmt):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                statements.setdefault(line, []).append(node)
        elif isinstance(node, ast.Call):
            calls[node.lineno, node.col_offset + 1] = node
    return statements, calls
