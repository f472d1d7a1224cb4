"""The source files that a kernel is built from, found by following imports.

The key of a compiled kernel holds the digest of these files, so none may be missing that the
kernel could execute, a user's own included. The search starts at the modules that define the
kernel's class, its bases and the objects in its config, and follows every import statement, inside
functions too, to modules and to the packages around them. Two things are identified by their
version: the standard library, and installed distributions other than cutex and the kernel's own.
Where its file is decides what a module belongs to: a user's profile.py or code.py is the user's.

Nothing is imported for the search; reading and scanning all of cutex takes some milliseconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

PACKAGE = __name__.partition(".")[0]
INSTALLED = ("site-packages", "dist-packages")  # folders of installed distributions
STANDARD = {  # folders of the standard library
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")
}
# Packages that cutex depends on: pinned by version even where a config holds one of their objects.
DEPENDENCIES = {"cuda", "cutlass", "ml_dtypes", "numpy", "torch", "tvm_ffi"}

# `from a.b import c, d` and `import a.b as c, d`, wherever a statement may begin
_IMPORT = re.compile(
    r"""(?: ^ | [;:] ) [ \t]*
    (?: from [ \t]+ (?P<dots> \.* ) [ \t]* (?P<origin> [\w.]* ) [ \t]+ import \b [ \t]*
        (?P<names> \( (?: [^()#] | \#[^\n]* )* \) | (?: [^\n;\#\\] | \\\r?\n )* )
      | import [ \t]+ (?P<modules> (?: [^\n;\#\\] | \\\r?\n )* ) )""",
    re.MULTILINE | re.VERBOSE,
)
_FOR_TYPES = re.compile(
    r"^([ \t]*)if (?:typing\.)?TYPE_CHECKING:[^\n]*\n(?:\1[ \t]+[^\n]*\n|[ \t]*\n)*", re.MULTILINE
)


class Source(NamedTuple):
    """One module's file as it is on disk."""

    module: str
    file: Path
    digest: bytes
    imports: frozenset[str]  # modules, or names that a module may define: both are looked up


class Location(NamedTuple):
    """The location of a module: its file, and the folders of its submodules if it is a package."""

    file: Path | None
    folders: tuple[str, ...] | None


def sources_digest(modules: Iterable[str]) -> str:
    """The digest of every file that `modules` may execute; it does not depend on where the files
    are.

    A module without a file, as in a notebook, gives another digest each time, so that its
    definitions are never taken from a cache.
    """
    names = frozenset(modules)
    if any(_is_fileless(name) for name in names):
        return uuid4().hex
    return _digest(names)


@cache
def _digest(modules: frozenset[str]) -> str:
    digest = hashlib.sha256()
    for source in closure(modules):
        digest.update(source.module.encode() + b"\0" + source.digest)
    return digest.hexdigest()


def closure(modules: Iterable[str]) -> list[Source]:
    """The sources of `modules` and of all that they import, by module name."""
    waiting = list(modules)
    own = {PACKAGE, *(name.partition(".")[0] for name in waiting)}
    found: dict[str, Source | None] = {}
    while waiting:
        name = waiting.pop()
        if name in found or _is_pinned(name.partition(".")[0], own):
            continue
        if package := name.rpartition(".")[0]:
            waiting.append(package)
        found[name] = source = _read(name)
        if source is not None:
            waiting += source.imports
    return sorted(source for source in found.values() if source is not None)


def places_of(modules: Iterable[str]) -> dict[str, str]:
    """The locations of the top-level modules among `closure(modules)`: a package's folder, else a
    file."""
    return _places(frozenset(modules))


@cache
def _places(modules: frozenset[str]) -> dict[str, str]:
    places = {}
    for top in sorted({source.module.partition(".")[0] for source in closure(modules)}):
        file, folders = _locate(top)
        if place := folders[0] if folders else file:
            places[top] = str(place)
    return places


def modules_of(*values: object) -> set[str]:
    """The modules that define the parts of `values`: classes, bases, functions, fields."""
    names: set[str] = set()
    waiting, seen = list(values), set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        value = inspect.unwrap(value) if callable(value) else value
        if inspect.isfunction(value):
            names.add(value.__module__)
            waiting += value.__defaults__ or ()
            waiting += [cell.cell_contents for cell in value.__closure__ or ()]
            continue
        cls = value if isinstance(value, type) else type(value)
        names |= {base.__module__ for base in cls.__mro__}
        waiting += _parts(value)
    return names


def _parts(value: Any) -> Iterable[object]:
    match value:
        case type():
            return ()
        case dict():
            return (*value.keys(), *value.values())
        case list() | tuple() | set() | frozenset():
            return value
    if dataclasses.is_dataclass(value):
        return (getattr(value, field.name) for field in dataclasses.fields(value))
    return ()


# ---- finding and reading


def _is_pinned(top: str, own: set[str]) -> bool:
    """Whether the version of a top-level module identifies its content."""
    if is_standard(top) or top in DEPENDENCIES:
        return True
    return top not in own and _is_installed(top)


@cache
def is_standard(top: str) -> bool:
    """Whether the top-level module of this name is one of the standard library."""
    if top not in sys.stdlib_module_names:
        return False
    file, folders = _locate(top)
    where = [*([file] if file else []), *map(Path, folders or ())]
    return all(map(in_standard, where)) if where else is_built_in(top)


def in_standard(place: Path) -> bool:
    """Whether a file or folder belongs to the standard library."""
    place = place.resolve()
    if any(folder in place.parts for folder in INSTALLED):
        return False
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return bool(STANDARD & {place, *place.parents}) or zipped in place.parts


def is_built_in(name: str) -> bool:
    """Whether a module without a file is one of the interpreter's."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = getattr(spec, "origin", None)
    return name in sys.builtin_module_names or origin in ("built-in", "frozen")


@cache
def _is_installed(top: str) -> bool:
    file, folders = _locate(top)
    where = [*([file] if file else []), *map(Path, folders or ())]
    return bool(where) and all(
        any(f in w.parts for f in INSTALLED) or _is_recorded(top, w) for w in where
    )


def _is_recorded(top: str, place: Path) -> bool:
    """Whether `place`, a file or folder of `top`, was installed into the folder around it, under
    any name of that folder, as by pip install --target."""
    root = (place if place.name in (top, f"{top}.py") else place.parent).parent
    start = re.compile(rf"^{re.escape(top)}(/|\.py,)", re.MULTILINE)
    records = root.glob("*.dist-info/RECORD")
    return any(
        start.search(record.read_text(errors="replace", encoding="utf-8")) for record in records
    )


def _is_fileless(name: str) -> bool:
    return _locate(name) == (None, None) and not is_built_in(name)


def _locate(name: str) -> Location:
    """The location that `name` was imported from or, if it was not imported yet, would be;
    Location(None, None) if it is no module."""
    module = sys.modules.get(name)
    if module is not None:
        file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
        return Location(Path(file) if file else None, tuple(folders) if folders else None)
    return _search(name)


@cache
def _search(name: str) -> Location:
    package = name.rpartition(".")[0]
    folders = _locate(package).folders if package else None
    if package and folders is None:
        return Location(None, None)
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, folders) if find else None
        if spec is not None:
            file = Path(spec.origin) if spec.origin and spec.has_location else None
            inside = spec.submodule_search_locations
            return Location(file, None if inside is None else tuple(inside))
    return Location(None, None)


@cache
def _read(name: str) -> Source | None:
    """The source of a module; None if it is no module, or has no Python source."""
    file, folders = _locate(name)
    if file is None or file.suffix != ".py":
        return None
    content = file.read_bytes()
    package = name if folders is not None else name.rpartition(".")[0]
    imports = frozenset(_imports(content.decode(errors="replace"), package))
    return Source(name, file, hashlib.sha256(content).digest(), imports)


def _imports(text: str, package: str) -> Iterator[str]:
    """The modules, or names in modules, that the import statements in `text`, a module of
    `package`, may load."""
    for statement in _IMPORT.finditer(_FOR_TYPES.sub("", text)):
        if statement["modules"] is not None:
            yield from _names(statement["modules"])
            continue
        origin = statement["origin"]
        if up := len(statement["dots"]):
            parents = package.split(".")[: package.count(".") + 2 - up]
            origin = ".".join([*parents, *([origin] if origin else [])])
        yield origin
        yield from (f"{origin}.{name}" for name in _names(statement["names"]) if name != "*")


def _names(listed: str) -> Iterator[str]:
    """The imported names in a list: `a.b as c, d` gives a.b and d."""
    for part in re.sub(r"#[^\n]*|[()\\]", " ", listed).split(","):
        if words := part.split():
            yield words[0]
