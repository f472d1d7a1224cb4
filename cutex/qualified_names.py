"""Qualified names of functions, read off their source.

A function that the DSL rewrites is compiled anew, alone: its code calls itself `first` where the
source has `Softmax.first`; that of a function with free variables stands in one more function of
its own name. The lines of its code remain those of the source, which tells where it stands.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

_LOCALS = ".<locals>."
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef
_BELOW = "body", "handlers", "orelse", "finalbody", "cases"  # where a node has statements
_COMPOUND = tuple(  # statements and parts of them that have others
    kind
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.stmt | ast.ExceptHandler | ast.match_case)
    if {*_BELOW} & {*getattr(kind, "_fields", ())}
)


class _Definition(NamedTuple):
    """A function of the source, with its decorators."""

    name: str  # qualified
    begin: int  # lines
    end: int


def qualified_name(code: CodeType) -> str:
    """The name of a function as Python gives it to one that no one has rewritten: `Softmax.first`,
    `kernel.<locals>.step`. Functions that a rewriting made of parts of another are in it.
    """
    own = code.co_qualname
    if own.startswith("<"):  # a module's or a class's own lambda
        return own
    parts = own.split(_LOCALS)
    found = _definitions("".join(linecache.getlines(code.co_filename)))
    around = [d for d in found if d.begin <= code.co_firstlineno <= d.end]  # the innermost is last
    outermost = next((d.name for d in around if _LOCALS not in d.name), "")
    if not around or outermost == parts[0]:
        return own
    inner = around[-1].name.rpartition(".")[2]
    known = [i for i, part in enumerate(parts) if part.rpartition(".")[2] == inner]
    return _LOCALS.join([around[-1].name, *parts[known[-1] + 1 :]]) if known else own


@lru_cache(maxsize=256)
def _definitions(text: str) -> list[_Definition]:
    """The functions of a source, each behind those that it is in."""
    try:
        return list(_within(ast.parse(text), ""))
    except (SyntaxError, ValueError):
        return []


def _within(node: ast.AST, prefix: str) -> Iterator[_Definition]:
    """The functions below a node. They are statements: expressions, most of a tree, have none."""
    below = (x for field in _BELOW for x in getattr(node, field, ()))
    for child in below:
        if isinstance(child, _DEFINITIONS):
            begin = min((d.lineno for d in child.decorator_list), default=child.lineno)
            name = f"{prefix}{child.name}"
            yield _Definition(name, min(begin, child.lineno), child.end_lineno or child.lineno)
            yield from _within(child, f"{name}{_LOCALS}")
        elif isinstance(child, ast.ClassDef):
            yield from _within(child, f"{prefix}{child.name}.")
        elif isinstance(child, _COMPOUND):
            yield from _within(child, prefix)
