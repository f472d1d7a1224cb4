"""Recipes and swizzles of scale factors as callers give them: members of torch's ScalingType and
SwizzleType, their names, or lists of either."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

# the names of the members of torch's enumerations by their ids: to hash one takes 0.6 us
_ENUMERATIONS = (getattr(F, name, None) for name in ("ScalingType", "SwizzleType"))
_MEMBERS = [x for kind in _ENUMERATIONS if kind is not None for x in kind.__members__.items()]
_NAMES = {id(member): name for name, member in _MEMBERS}


def names_of(*members: Any) -> tuple[Any, ...]:
    """The names that a plan identifies recipes and swizzles by; for a list, those of its
    entries."""
    return tuple(
        [
            names_of(*x) if type(x) is list or type(x) is tuple else _NAMES.get(id(x), x)
            for x in members
        ]
    )


def only(scale: Any) -> Any:
    """The factors in a list of one, which torch accepts, too; otherwise `scale`."""
    return scale[0] if (type(scale) is list or type(scale) is tuple) and len(scale) == 1 else scale


def name_of(member: Any) -> Any:
    """The name of a member of one of torch's enumerations, the first of a list; None of None."""
    if isinstance(member, list | tuple):
        member = member[0] if member else None
    if isinstance(member, str):
        return member
    # NOTE: dynamo of torch 2.11 traces no id() of a number or of a member of an enumeration
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling and (known := _NAMES.get(id(member))) is not None:
        return known
    return getattr(member, "name", member)
