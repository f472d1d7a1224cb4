"""Names of functions that are compiled anew, as the DSL does, are those of the source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from types import CodeType

import pytest

import cutex
from cutex.kernels.attention.forward import WAYS
from cutex.qualified_names import qualified_name


class Outer:
    def plain(self):
        return (lambda: (1, 2))()

    @staticmethod
    def decorated(x=(lambda: 3)):
        while x:
            x = None
        return x

    class Inner:
        def __init__(self):
            super().__init__()

        def plain(self):
            def step():
                return lambda: self

            return step


def plain():
    return 0


def rewritten(function) -> CodeType:
    """The code of a function of the source that is compiled alone, in a function of its own name
    where it has free variables; with its loop as a function, as the DSL makes of it."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    (made,) = tree.body
    assert isinstance(made, ast.FunctionDef)
    made.decorator_list = []
    for loop in [s for s in made.body if isinstance(s, ast.While)]:
        (part,) = ast.parse("def while_region_0(x): return x").body
        made.body[made.body.index(loop)] = ast.increment_lineno(part, loop.lineno - 1)
    if free := function.__code__.co_freevars:
        lets = ast.parse("\n".join(f"{n} = None" for n in free)).body
        around = ast.parse(f"def {made.name}(): return {made.name}").body[0]
        around.body[:0] = [*lets, made]
        tree.body = [around]
    code = compile(ast.fix_missing_locations(tree), inspect.getsourcefile(function), "exec")
    return next(within(code, function.__name__))


def within(code: CodeType, name: str):
    """The codes of this name in another's, the innermost first."""
    for inner in (c for c in code.co_consts if isinstance(c, CodeType)):
        yield from within(inner, name)
        if inner.co_name == name:
            yield inner


FUNCTIONS = [plain, Outer.plain, Outer.decorated, Outer.Inner.plain, Outer.Inner.__init__]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_a_function_has_the_name_of_its_source(function):
    code, anew = function.__code__, rewritten(function)
    assert anew is not code and qualified_name(anew) == function.__qualname__
    assert qualified_name(code) == function.__qualname__


def test_a_part_of_a_function_is_in_it():
    (step,) = within(rewritten(Outer.Inner.plain), "step")
    assert qualified_name(step) == "Outer.Inner.plain.<locals>.step"
    (last,) = within(step, "<lambda>")
    assert qualified_name(last) == "Outer.Inner.plain.<locals>.step.<locals>.<lambda>"
    (part,) = within(rewritten(Outer.decorated), "while_region_0")
    assert qualified_name(part) == "Outer.decorated.<locals>.while_region_0"
    (first,) = within(rewritten(Outer.plain), "<lambda>")
    assert qualified_name(first) == "Outer.plain.<locals>.<lambda>"


def test_a_function_without_a_source_keeps_its_name():
    (code,) = (c for c in compile("def f(): pass", "<none>", "exec").co_consts if c)
    assert qualified_name(code) == "f"


def test_the_functions_by_which_attention_takes_its_blocks_exist():
    """`--time` counts them by these names."""
    folder = Path(cutex.__file__).parent
    found = set()
    for file in [*folder.glob("device/attention/*.py"), *folder.glob("kernels/attention/*/*/*.py")]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            inner = node.body if isinstance(node, ast.ClassDef) else ()
            own = [f"{node.name}." for _ in inner][:1] or [""]
            found |= {own[0] + f.name for f in inner or [node] if isinstance(f, ast.FunctionDef)}
    wanted = {
        name
        for ways in WAYS.values()
        for names in (*ways.steps.values(), *ways.events.values(), ways.held)
        for name in names
    }
    assert len(wanted) > 5
    assert {name for name in wanted if not any(f.endswith(name) for f in found)} == set()
