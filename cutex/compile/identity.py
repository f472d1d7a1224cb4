"""What the text of its files does not say about a kernel: the values in its config, in its class
and in the globals that a user's class reads.

A file's text says what cutex's own kernels compute. A user's may depend, too, on a constant that a
script sets, on the environment, or on the function that made its class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from typing import Any
from uuid import uuid4

from cutex.compile.sources import DEPENDENCIES, PACKAGE, is_standard
from cutex.compile.user_function import UserFunction
from cutex.errors import CutexError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_OF_TORCH = ("torch.dtype", "torch.device")  # whose repr says all
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)

Named = tuple[str, Any]


def text_of(value: Any) -> str:
    """A text that two values share only if kernels of them are traced alike; another text each
    time for a value that cannot be written down."""
    try:
        return _text(value, ())
    except _Unwritable:
        return uuid4().hex


def class_values(cls: type) -> list[str]:
    """What the user's classes among `cls` and its bases depend on beside their text, each as
    "name = text": attributes, what their methods close over, and the constants that those read."""
    return sorted(set(_values(cls)))


class _Unwritable(CutexError):
    pass


def _text(value: Any, around: tuple[int, ...]) -> str:
    kind = type(value)
    if kind in _PLAIN or kind is UserFunction or _name(kind) in _OF_TORCH:
        return repr(value)
    if id(value) in around:
        return f"itself, {len(around) - around.index(id(value))} up"
    text = functools.partial(_text, around=(*around, id(value)))
    if isinstance(value, type):
        made_by_a_function = "<locals>" in value.__qualname__
        return f"{_name(value)} {class_values(value) if made_by_a_function else ''}"
    if isinstance(value, Enum):
        return f"{_name(kind)}.{value.name}"
    if isinstance(value, _FUNCTIONS):
        return f"function {UserFunction(value).key}"
    if isinstance(value, (tuple, list)):
        return f"{_name(kind)}[{', '.join(map(text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{_name(kind)}[{', '.join(sorted(map(text, value)))}]"
    if isinstance(value, dict):
        return f"{_name(kind)}[{', '.join(f'{text(k)}: {text(x)}' for k, x in value.items())}]"
    return f"{_name(kind)}({', '.join(f'{name}={text(x)}' for name, x in _fields(value))})"


def _fields(value: Any) -> list[Named]:
    """The fields of an object that has no others; those of a dataclass that its repr leaves out,
    too."""
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if _is_of_dsl(type(value)) and type(getattr(value, "value", value)) in _PLAIN:
        return [("value", value.value)]  # a number, made on the host
    if _is_users(type(value).__module__) and hasattr(value, "__dict__"):
        return list(vars(value).items())
    raise _Unwritable


def _is_of_dsl(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "cutlass"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ---- a user's own classes


def _is_users(module: str) -> bool:
    top = module.partition(".")[0]
    return top != PACKAGE and top not in DEPENDENCIES and not is_standard(top)


def _values(cls: type) -> Iterator[str]:
    waiting: list[Named] = [(_name(b), b) for b in cls.__mro__ if _is_users(b.__module__)]
    seen: set[int] = set()
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        if isinstance(value, type):
            seen.add(id(value))
            waiting += _members(value)
        elif functions := [*_functions(value)]:
            seen.add(id(value))
            for function in functions:
                yield from _held(name, function)
                waiting += _read_by(function)
        else:
            with suppress(_Unwritable):  # no constant
                yield f"{name} = {_text(value, ())}"


def _members(cls: type) -> Iterator[Named]:
    """The members of a user's class but for those that Python gives each."""
    if _is_users(cls.__module__):
        for name, value in vars(cls).items():
            if not name.startswith("__") or [*_functions(value)]:
                yield f"{_name(cls)}.{name}", value


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The user's functions in a member of a class, or in a global: also those that a property or
    the DSL's decorator wraps."""
    parts = [value]
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property):
        parts = [value.func]
    for part in parts:
        inner = inspect.unwrap(part) if callable(part) else getattr(part, "__func__", None)
        if isinstance(inner, types.FunctionType) and _is_users(inner.__module__ or ""):
            yield inner


def _held(name: str, function: types.FunctionType) -> Iterator[str]:
    """The values that a function was made with: its defaults, and what it closes over."""
    yield f"{name} = {text_of((function.__defaults__, function.__kwdefaults__))}"
    for variable, cell in zip(
        _code(function).co_freevars, function.__closure__ or (), strict=False
    ):
        if variable != "__class__":
            with suppress(ValueError):  # the variable has no value yet
                yield f"{name}, {variable} = {text_of(cell.cell_contents)}"


def _read_by(function: types.FunctionType) -> Iterator[Named]:
    """The globals that a function names, and the attributes of a user's modules among them that it
    may read."""
    codes = [_code(function)]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    names = {name for code in codes for name in code.co_names if not name.startswith("__")}
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield f"{function.__module__}.{name}", value
        elif _is_users(value.__name__):
            inner = sorted(names & vars(value).keys())
            yield from ((f"{value.__name__}.{n}", vars(value)[n]) for n in inner)


def _code(function: types.FunctionType) -> types.CodeType:
    """The code as it was written: the DSL replaces that of what it has traced."""
    code: types.CodeType = getattr(function, "_original_code", None) or function.__code__
    return code
