"""The source files that a kernel is built from, found by following imports.

The key of a compiled kernel holds the digest of these files, so none may be missing that the
kernel could execute, a user's own included. The search starts at the modules that define the
kernel's class, its bases and the objects in its config, and follows every import statement, inside
functions too, and importlib.import_module of a written name, to modules and to the packages around
them. Not read are the standard library and the packages that cutex depends on, which versions
identify, and other installed distributions, whose RECORD has a sum of each file. What peers import
of others is left out: a kernel's Problem names its peers, and neither traces the other.
Where its file is decides what a module belongs to: a user's profile.py or code.py is the user's.

Python may hold another text of a module than its file does: the file is edited while the process
runs, before or after a reload. The digest of such files is therefore this process's own, and
another one after each edit; no other process finds what is kept under it.

Nothing is imported for the search; reading and scanning all of cutex takes some milliseconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
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
DEPENDENCIES = {"cuda", "cutlass", "filelock", "ml_dtypes", "numpy", "torch", "tvm_ffi"}

# `from a.b import c, d` and `import a.b as c, d`, wherever a statement may begin
_IMPORT = re.compile(
    r"""(?: ^ | [;:] ) [ \t\f]*
    (?: from \b [ \t\f]* (?P<dots> [. ]* ) (?P<origin> [\w.]* ) [ \t\f]* \b import \b [ \t\f]*
        (?P<names> \( (?: [^()#] | \#[^\n]* )* \) | [^\n;\#]* )
      | import [ \t\f]+ (?P<modules> [^\n;\#]* ) )""",
    re.MULTILINE | re.VERBOSE,
)
_BY_NAME = re.compile(
    r"""\b(?:import_module|__import__)\s*\(\s*(?:name\s*=\s*)?["'](\.*)([\w.]+)["']"""
)
_FOR_TYPES = re.compile(
    r"^([ \t]*)if (?:typing\.)?TYPE_CHECKING:[^\n]*\n(?:\1[ \t]+[^\n]*\n|[ \t]*\n)*", re.MULTILINE
)


def _began() -> float:
    """When this process began, or the one that it is a fork of, as time.time()."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        ticks = int(stat.rpartition(")")[2].split()[19]) + 1
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()


_BEGAN = _began()
_HERE = uuid4().hex  # with the process's number, this process and no other


class State(NamedTuple):
    """What changes with a file."""

    changed: int  # ns; of its content, name or owner
    modified: int
    size: int

    @property
    def is_newer(self) -> bool:
        """Whether the file changed since this process began."""
        return max(self.changed, self.modified) / 1e9 > _BEGAN


class Source(NamedTuple):
    """One module's file as it is on disk, or the files of an installed package."""

    module: str
    file: Path
    state: State
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
    known = _digests.get(names)
    if known is None or any(_state(file) != state for file, state in known[1]):
        known = _digests[names] = _digest(names)
    return known[0]


_digests: dict[frozenset[str], tuple[str, list[tuple[Path, State]]]] = {}  # and what it was made of


def _digest(modules: frozenset[str]) -> tuple[str, list[tuple[Path, State]]]:
    digest = hashlib.sha256()
    sources = closure(modules)
    for source in sources:
        digest.update(source.module.encode() + b"\0" + source.digest)
    if newer := [(source.module, source.state) for source in sources if source.state.is_newer]:
        digest.update(f"{_HERE} {os.getpid()} {newer}".encode())
    return digest.hexdigest(), [(source.file, source.state) for source in sources]


def closure(modules: Iterable[str]) -> list[Source]:
    """The sources of `modules` and of all that they import, by module name."""
    waiting = list(modules)
    own = {PACKAGE, *(name.partition(".")[0] for name in waiting)}
    found: dict[str, Source | None] = {}
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in found or _is_pinned(top):
            continue
        if top not in own and _is_installed(top):
            found[top] = _recorded(top)
            if found[top] is not None:
                continue
        if package := name.rpartition(".")[0]:
            waiting.append(package)
        found[name] = source = _read(name)
        if source is not None:
            waiting += filter(_may_trace(name), source.imports)
    return sorted(source for source in found.values() if source is not None)


def _may_trace(importer: str) -> Callable[[str], bool]:
    """Whether a kernel may execute what module `importer` imports. A peer imports another library
    when it is asked for, and no kernel is traced from it: an upgrade of quack or of Triton
    compiles nothing of ours anew."""
    if f"{importer}.".startswith(f"{PACKAGE}.peers."):
        return lambda name: name.partition(".")[0] == PACKAGE
    return lambda _: True


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


def _is_pinned(top: str) -> bool:
    """Whether a version that is in every key identifies the content of a top-level module."""
    return is_standard(top) or top in DEPENDENCIES


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
    return next(_records(top, place), None) is not None


def _records(top: str, place: Path) -> Iterator[tuple[Path, list[str]]]:
    """The RECORD files of the distributions that brought `place`, a file or folder of `top`, each
    with its lines for `top`: the files, their sums and sizes."""
    root = (place if place.name in (top, f"{top}.py") else place.parent).parent
    line = re.compile(rf"^{re.escape(top)}(?:/|\.\w).*$", re.MULTILINE)
    for record in sorted(root.glob("*.dist-info/RECORD")):
        if lines := line.findall(record.read_text(errors="replace", encoding="utf-8")):
            yield record, lines


@cache
def _recorded(top: str) -> Source | None:
    """An installed package as its distributions' RECORD has it; None without one."""
    file, folders = _locate(top)
    where = [*([file] if file else []), *map(Path, folders or ())]
    found = [entry for place in where for entry in _records(top, place)]
    if not found:
        return None
    listed = sorted({line for _, lines in found for line in lines if ".pyc," not in line})
    record = found[0][0]
    digest = hashlib.sha256("\n".join(listed).encode()).digest()
    return Source(top, record, _state(record), digest, frozenset())


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
        try:
            spec = find(name, folders) if find else None
        except KeyError:  # a namespace inside a package that is not imported yet
            inner = name.rpartition(".")[2]
            places = [Path(folder, inner) for folder in folders or ()]
            return Location(None, tuple(str(p) for p in places if p.is_dir()) or None)
        if spec is not None:
            file = Path(spec.origin) if spec.origin and spec.has_location else None
            inside = spec.submodule_search_locations
            # NOTE: a namespace package asks for the module around it, which may not be imported
            inside = getattr(inside, "_path", inside)
            return Location(file, None if inside is None else tuple(inside))
    return Location(None, None)


def _state(file: Path) -> State:
    try:
        found = file.stat()
    except OSError:
        return State(0, 0, 0)
    return State(found.st_ctime_ns, found.st_mtime_ns, found.st_size)


def _read(name: str) -> Source | None:
    """The source of a module; None if it is no module, or has no file."""
    file, folders = _locate(name)
    if file is None:
        return None
    if not file.is_file():  # in an archive
        return Source(name, file, _state(file), uuid4().bytes, frozenset())
    return _read_file(name, file, folders is not None, _state(file))


@cache
def _read_file(name: str, file: Path, is_package: bool, state: State) -> Source:
    content = file.read_bytes()
    imports: frozenset[str] = frozenset()
    if file.suffix == ".py":
        imports = frozenset(_imports(_text(content), name if is_package else _around(name)))
    return Source(name, file, state, hashlib.sha256(content).digest(), imports)


def _around(name: str) -> str:
    return name.rpartition(".")[0]


def _text(content: bytes) -> str:
    """The text of a Python file, each line that goes on after a backslash as one."""
    try:
        text = importlib.util.decode_source(content)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        text = content.decode(errors="replace")
    return text.replace("\\\n", " ")


def _imports(text: str, package: str) -> Iterator[str]:
    """The modules, or names in modules, that the import statements in `text`, a module of
    `package`, may load."""
    for statement in _IMPORT.finditer(_FOR_TYPES.sub("", text)):
        if statement["modules"] is not None:
            yield from _names(statement["modules"])
            continue
        origin = _absolute(statement["dots"].replace(" ", ""), statement["origin"], package)
        yield origin
        yield from (f"{origin}.{name}" for name in _names(statement["names"]) if name != "*")
    for dots, name in _BY_NAME.findall(text):
        yield _absolute(dots, name, package)


def _absolute(dots: str, origin: str, package: str) -> str:
    """The whole name of a module that one of `package` names with leading dots."""
    if not dots:
        return origin
    parents = package.split(".")[: package.count(".") + 2 - len(dots)]
    return ".".join([*parents, *([origin] if origin else [])])


def _names(listed: str) -> Iterator[str]:
    """The imported names in a list: `a.b as c, d` gives a.b and d."""
    for part in re.sub(r"#[^\n]*|[()]", " ", listed).split(","):
        if words := part.split():
            yield words[0]
