"""Analyses of a program that are computed once, however often it is launched."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from cutex.sim.ptx.program import Program

Found = TypeVar("Found")


def once(derive: Callable[[Program], Found]) -> Callable[[Program], Found]:
    """``derive``, with its result cached in the program."""

    @wraps(derive)
    def derived(program: Program) -> Found:
        if derive not in program.derived:
            program.derived[derive] = derive(program)
        return program.derived[derive]

    return derived
