"""UserFunction: a function of a user's own that a kernel traces, identified by its computation.

A compiled kernel may be reused only if the functions in it would be traced alike. The place where a
function is written does not decide that: two lambdas share a line, a global or a function in
another file changes. So the key holds everything that Python runs: the code, its closure, its
defaults, the globals and attributes of modules that it names, and the same of every function among
these. Anything that cannot be identified this way (an object of a foreign class, an attribute known
only at run time) makes the key unique, and the kernel is compiled again on every request.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from cutex.compile.sources import in_standard, is_built_in
from cutex.errors import CutexError

_VALUES = (type(None), bool, int, float, complex, str, bytes, type(...))
_FIXED = ("cutlass", "numpy", "torch")  # fixed by their versions, as the standard library is
# attributes that the DSL gives a function
_OF_DSL = re.compile(
    "_dsl_|_decorator_|_preprocess|_original_code$|__wrapped__$|set_name_prefix$|_name_prefix"
)
_NOTHING = object()
_EVASIVE = {"eval", "exec", "globals", "locals", "vars", "getattr", "__import__"}


class Unkeyable(CutexError):
    """A value whose computation cannot be determined by inspection."""


class UserFunction:
    """A user's function, called unchanged; equal to others that compute the same.

    `cacheable` says whether its key is valid in other processes too. `is_current()` says, after a
    few comparisons, whether everything that it refers to is unchanged since the key was made.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._watched: list[tuple[Callable[[], Any], Any]] = []
        self._stable = True  # whether everything that may change is watched
        digest = hashlib.sha256()
        try:
            for part in _Reader(self).parts(function):
                digest.update(part.encode() + b"\0")
            self.key, self.cacheable = digest.hexdigest()[:24], True
        except Unkeyable as reason:
            self.key, self.cacheable = f"{uuid4().hex}: {reason}", False
            self._stable = False

    def is_current(self) -> bool:
        return self._stable and all(look() is value for look, value in self._watched)

    def __call__(self, *args: Any) -> Any:
        result = self.function(*args)
        if result is None or isinstance(result, Collection):
            inner = inspect.unwrap(self.function)
            kind = "None" if result is None else type(result).__name__
            raise TypeError(f"{getattr(inner, '__qualname__', inner)} returns {kind}, not a number")
        return result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserFunction) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        inner = inspect.unwrap(self.function)
        name = getattr(inner, "__qualname__", type(inner).__name__)
        return f"UserFunction({name}, {self.key})"


def arguments_taken(function: Callable[..., Any], counts: Sequence[int]) -> int | None:
    """The first of `counts` that `function` accepts as its number of positional arguments; None if
    there is none, or if it has no signature, not being a Python function."""
    try:
        signature = inspect.signature(inspect.unwrap(function))
    except (TypeError, ValueError):
        return None
    for count in counts:
        with suppress(TypeError):
            signature.bind(*range(count))
            return count
    return None


class _Reader:
    """The reader of a function's parts, which form its key; it lets the owner watch those that may
    change."""

    def __init__(self, owner: UserFunction) -> None:
        self.owner = owner
        self.seen: dict[int, int] = {}

    def parts(self, value: Any) -> Iterator[str]:
        kind = type(value)
        if kind in _VALUES:
            yield f"{kind.__name__} {value!r}"
        elif kind in (tuple, frozenset, list, dict, set):
            # NOTE: a container that changes in place cannot be watched
            self.owner._stable &= kind in (tuple, frozenset)
            items = list(value.items() if kind is dict else value)
            yield f"{kind.__name__} of {len(items)}"
            for item in sorted(items, key=repr) if kind in (set, frozenset) else items:
                yield from self.parts(item)
        elif kind is types.ModuleType:
            # NOTE: of a module in a closure, a default or another name, any attribute may be read
            if not _is_of_fixed(vars(value)):
                raise Unkeyable(f"it reads of module {value.__name__} what its code does not say")
            yield f"module {value.__name__}"
        elif kind is types.CodeType:
            yield from self._code(value)
        elif _is_fixed(value):
            yield f"fixed {value.__module__}.{value.__qualname__}"
        elif id(value) in self.seen:
            yield f"again {self.seen[id(value)]}"
        else:
            self.seen[id(value)] = len(self.seen)
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[str]:
        if isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.MethodType):
            yield "method"
            yield from self.parts(value.__func__)
            yield from self.parts(value.__self__)
        elif isinstance(value, functools.partial):
            yield "partial"
            yield from self.parts((value.func, value.args, value.keywords))
        elif type(value).__module__.startswith("cutlass") and hasattr(value, "value"):
            yield f"number {type(value).__qualname__}"  # of the DSL, made on the host
            if not isinstance(value.value, _VALUES):
                raise Unkeyable(f"a {type(value).__qualname__} that was traced elsewhere")
            yield from self.parts(value.value)
        else:
            raise Unkeyable(f"it refers to a {type(value).__module__}.{type(value).__qualname__}")

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and _is_of_fixed(function.__globals__):
            yield "decorated"  # by the DSL, which traces the wrapped function
            yield from self.parts(wrapped)
            yield from self._attributes(function)
            return
        yield "function"
        code = _written(function)
        self._watch(functools.partial(_written, function), code)
        yield from self.parts(code)
        for name in ("__defaults__", "__kwdefaults__"):
            self._watch(functools.partial(getattr, function, name), getattr(function, name))
            yield from self.parts(getattr(function, name))
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:
                raise Unkeyable("it closes over a variable without a value") from None
            self._watch(functools.partial(getattr, cell, "cell_contents"), held)
            yield from self.parts(held)
        if wrapped is not None:
            yield from self.parts(wrapped)
        yield from self._attributes(function)
        yield from self._names(code, function.__globals__)

    def _attributes(self, function: types.FunctionType) -> Iterator[str]:
        """The parts of its attributes, which any code that reaches it may read."""
        if own := {name: x for name, x in vars(function).items() if not _OF_DSL.match(name)}:
            yield from self.parts(own)

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield f"code {code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}"
        yield f"{code.co_flags} {code.co_names} {code.co_varnames} {code.co_freevars}"
        yield code.co_code.hex()
        yield from self.parts(code.co_consts)

    def _names(self, code: types.CodeType, scope: dict[str, Any]) -> Iterator[str]:
        """The parts of the globals that the code names; of modules only the attributes that are
        used."""
        for path in sorted(set(_paths(code))):
            name, *attributes = path
            if name in _EVASIVE:
                raise Unkeyable(f"it calls {name}")
            look = functools.partial(_named, scope, name)
            value = look()
            if value is _NOTHING:
                raise Unkeyable(f"it names {name}, which has no value")
            self._watch(look, value)
            yield f"global {'.'.join(path)}"
            while attributes and type(value) is types.ModuleType:
                if _is_of_fixed(vars(value)):
                    break
                owner, attribute = value, attributes.pop(0)
                if not hasattr(owner, attribute):
                    raise Unkeyable(f"module {owner.__name__} has no {attribute}")
                value = getattr(owner, attribute)
                self._watch(functools.partial(getattr, owner, attribute, None), value)
            yield from self.parts(value)
        for inner in code.co_consts:
            if type(inner) is types.CodeType:
                yield from self._names(inner, scope)

    def _watch(self, look: Callable[[], Any], value: Any) -> None:
        self.owner._watched.append((look, value))


def _written(function: types.FunctionType) -> types.CodeType:
    """The code of a function as it was written: the DSL replaces that of what it has traced, and
    keeps the code that was there."""
    code: types.CodeType = getattr(function, "_original_code", None) or function.__code__
    return code


def _named(scope: dict[str, Any], name: str) -> Any:
    """What code in `scope` finds under a global's name; _NOTHING if it finds none."""
    return scope[name] if name in scope else vars(builtins).get(name, _NOTHING)


def _paths(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Every global that the code loads, with the chain of attributes that it loads from it."""
    path: list[str] = []
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname.startswith("IMPORT"):
            raise Unkeyable(f"it imports {name}")
        if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(name)
            continue
        if instruction.opname in ("CACHE", "PUSH_NULL", "PRECALL"):
            continue
        if path:
            yield tuple(path)
        path = [name] if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []


def _is_fixed(value: Any) -> bool:
    """Whether a class or a function is of Python, the DSL, numpy or torch."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, (type(None), types.ModuleType))
    if isinstance(value, types.FunctionType):
        inner = getattr(inspect.unwrap(value), "__globals__", {})
        return _is_of_fixed(value.__globals__) and _is_of_fixed(inner)
    return isinstance(value, type) and _is_of_fixed(_scope_of(value))


def _scope_of(kind: type) -> dict[str, Any]:
    """The globals of the module that a class is written in."""
    module = sys.modules.get(kind.__module__)
    return {"__name__": kind.__module__} if module is None else vars(module)


def _is_of_fixed(scope: dict[str, Any]) -> bool:
    """Whether the globals `scope` are those of a module whose version says what it computes: by
    where its file is, not by its name, which a module of the user's may have, too."""
    name, file = str(scope.get("__name__", "")), scope.get("__file__")
    top = name.partition(".")[0]
    if file is None:
        folders = scope.get("__path__")
        if folders is None:  # built into the interpreter, or of such a package
            return is_built_in(name) or top in _FIXED
        file = next(iter(folders), "")
    return _is_fixed_place(top, str(file))


@functools.cache
def _is_fixed_place(top: str, file: str) -> bool:
    place = Path(file)
    if top in sys.stdlib_module_names and in_standard(place):
        return True
    if top not in _FIXED:
        return False
    folders = sys.modules[top].__path__ if top in sys.modules else ()
    return any(Path(folder) in (place, *place.parents) for folder in folders)
