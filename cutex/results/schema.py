"""The valid values of the fields of a ledger's rows, derived from their dataclasses.

A ledger travels: through git, from rented machines, by hand. Its readers rely on the types, so each
row is checked before it becomes a Result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from cutex.results.result import Peer, Result, Timing

Holds = Callable[[Any], bool]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # an operator's name, which is part of a file's name
_LARGEST = 1 << 62  # integers (sizes, counts and seeds) stay below


def _number(value: Any) -> bool:
    kind = type(value)
    return (kind is float and math.isfinite(value)) or (kind is int and abs(value) < _LARGEST)


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _problem(value: Any) -> bool:
    """Whether a value is a problem's fields: numbers and names, among them dtype and init."""
    return (
        type(value) is dict
        and type(value.get("dtype")) is str
        and type(value.get("init")) is str
        and all(_number(v) or type(v) in (str, bool, NoneType) for v in value.values())
    )


def positive(value: Any) -> bool:
    """Whether a value read from JSON is a finite number above 0, as a time is."""
    return _number(value) and value > 0


_BY_NAME: Mapping[tuple[type, str], Holds] = {  # where the type alone says too little
    (Result, "op"): lambda v: type(v) is str and _NAME.fullmatch(v) is not None,
    (Result, "problem"): _problem,
    (Result, "peers"): lambda v: type(v) is list and all(type(p) is Peer for p in v),
    (Result, "timing"): lambda v: v is None or type(v) is Timing,
    (Peer, "timing"): lambda v: type(v) is Timing,
    **{(Timing, name): positive for name in ("median_us", "p20_us", "p80_us")},
}
_BY_TYPE: Mapping[Any, Holds] = {
    Any: lambda v: True,
    str: lambda v: type(v) is str,
    bool: lambda v: type(v) is bool,
    int: _whole,
    float: _number,
    NoneType: lambda v: v is None,
}


def _holds(hint: Any) -> Holds:
    """The predicate whether a value read from JSON is of the annotated type."""
    if hint in _BY_TYPE:
        return _BY_TYPE[hint]
    inner = [_holds(argument) for argument in get_args(hint) if argument is not ...]
    match get_origin(hint):
        case origin if origin in (Union, UnionType):
            return lambda v: any(holds(v) for holds in inner)
        case origin if origin is list:
            return lambda v: type(v) is list and all(map(inner[0], v))
        case origin if origin is tuple:  # a list, in JSON
            return lambda v: type(v) in (list, tuple) and all(map(inner[0], v))
        case origin if origin is dict:
            return lambda v: type(v) is dict and all(map(inner[1], v.values()))
    raise TypeError(f"no field of a row may be {hint}")


def fields_of(cls: type) -> dict[str, Holds]:
    """For each field of a row's dataclass, the predicate whether a value is valid."""
    hints = get_type_hints(cls)
    return {name: _BY_NAME.get((cls, name)) or _holds(hint) for name, hint in hints.items()}
