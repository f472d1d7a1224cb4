"""docs/api.md: the public functions and classes, from their signatures and docstrings.

`python tests/api_page.py`, from the clone's root, writes it; tests/package/test_api_page.py
compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path("docs/api.md")
# the modules whose names are for users, and the name that they are used under
MODULES = (
    ("cutex", "cutex"),
    ("cutex.ops", "cutex.ops"),
    ("cutex.ops.attention.activation", "cutex.attention"),
    ("cutex.sim", "cutex.sim"),
)
TITLE = """# API

Written by `python tests/api_page.py` from the docstrings. A function's arguments stand in its
signature; what it takes, returns and raises, below."""


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and classes of `module` that are for users, by name, in its own order."""
    here = [
        name
        for name, x in vars(module).items()
        if inspect.isfunction(x) and x.__module__ == module.__name__ and not name.startswith("_")
    ]
    for name in getattr(module, "__all__", here):
        x = getattr(module, name)
        if inspect.isfunction(x) or inspect.isclass(x):
            yield name, x


def entry(name: str, x: Any) -> str:
    """A heading, the signature of a function, and the docstring."""
    said = inspect.getdoc(x)
    if not said:
        raise ValueError(f"{name} has no docstring")
    parts = [f"### {name}"]
    if inspect.isfunction(x):
        parts.append(f"```python\n{name}{signature(x)}\n```")
    elif issubclass(x, Exception):
        parts[0] += f" ({x.__bases__[0].__name__})"
    # NOTE: an indented line of a docstring belongs to the argument above it, and is no code block
    parts.append("```text\n" + said.rstrip() + "\n```")
    return "\n\n".join(parts)


def signature(x: Any) -> str:
    """The parameters, one a line, as they are written, and what is returned."""
    found = inspect.signature(x)
    returns = found.return_annotation
    arrow = "" if returns is inspect.Signature.empty else f" -> {returns}"
    star, lines = False, []
    for p in found.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            lines.append("*")
        star |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        of_type = "" if p.annotation is p.empty else f": {p.annotation}"
        default = "" if p.default is p.empty else f" = {p.default!r}"
        lines.append(f"{mark}{p.name}{of_type}{default}")
    inside = "".join(f"\n    {line}," for line in lines)
    return f"({inside}\n){arrow}" if lines else f"(){arrow}"


def page() -> str:
    """The whole page."""
    parts, seen = [TITLE], set()
    for home, name in MODULES:
        found = [(n, x) for n, x in public(import_module(home)) if id(x) not in seen]
        seen |= {id(x) for _, x in found}
        parts += [f"## {name}", *(entry(f"{name}.{n}", x) for n, x in found)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
