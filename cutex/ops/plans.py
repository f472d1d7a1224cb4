"""The plans of an operator's calls: from options and sizes, and a guard of tensors, to a launch.

Most calls of a program repeat an earlier one. A plan takes a call if its options are the same, by
hash, and a guard of torch.compile finds its tensors alike; it is then launched without the
decisions of the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cutex.ops.device import per_device
from cutex.ops.plain import (
    _dispatch_modes,
    _function_modes,
    guard,
    is_watched_unseen,
    nobody_watches,
    untraced,
)

ALIGN = 16  # bytes; a plan of `find` is of tensors that begin alike to them

_grad_enabled = torch.is_grad_enabled


class CachedPlan(NamedTuple):
    """A plan that takes its tensors as they are given."""

    takes: Callable[..., bool]  # whether tensors are like those that it was made for
    always: bool  # whether it is valid with gradients on or off, with no function that may change
    wants_gradient: bool
    differentiable: bool  # whether its result has gradients where some are wanted
    is_current: Callable[[], bool]  # whether the user's functions in it still compute the same
    launch: Callable[..., Any]  # of the tensors; has the result of the operator's function
    places: list[int]  # where its tensors begin, modulo ALIGN bytes

    @untraced
    def still(self) -> bool:
        """Whether it is valid now, if it is not always."""
        with_gradients = self.wants_gradient and _grad_enabled()
        return with_gradients == self.differentiable and self.is_current()


def guard_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A guard of these tensors, which may include one tensor several times, as in matmul(a, a): it
    accepts others that repeat in the same way."""
    ids = [id(x) for x in tensors]
    first = [ids.index(i) for i in ids]  # of each tensor, where it is given first
    apart = sorted(set(first))
    if len(apart) == len(first):
        return guard(tensors)
    alike = guard([tensors[i] for i in apart])
    again = [(i, j) for i, j in enumerate(first) if i != j]

    @untraced
    def takes(*given: Tensor) -> bool:
        if len(given) != len(first):
            return False
        for i, j in again:
            if given[i] is not given[j]:
                return False
        return alike(*[given[i] for i in apart])

    return takes


class PlanCache:
    """The plans of one operator, by the options and sizes of calls.

    NOTE: options are looked up by hash, so that a tensor given as an option, which checks refuse,
    is not compared with the number it holds: on a GPU that would wait for it.
    """

    def __init__(self, most: int = 4096, most_alike: int = 16) -> None:
        self.most, self.most_alike = most, most_alike
        self.known: dict[Hashable, tuple[CachedPlan, ...]] = per_device({})
        self.latest: dict[Hashable, CachedPlan] = per_device({})  # by what an operator chooses

    def __bool__(self) -> bool:
        return bool(self.known)

    @untraced
    def find(self, options: Hashable, *given: Tensor) -> CachedPlan | None:
        """The plan for these options that takes the tensors as they are: that of the latest call
        with them, as when a model's layers are alike, or another remembered under `key_of`. None
        also for arguments that are not tensors, and where torch has more to do than to run the
        call."""
        try:
            known = self.latest.get(options)
            if (
                known is not None
                and known.takes(*given)
                and [x.data_ptr() % ALIGN for x in given] == known.places
                and not is_watched_unseen()
                and (known.always or known.still())
            ):
                return known
            if not nobody_watches():
                return None
            for known in self.known.get(self.key_of(options, *given), ()):
                if known.takes(*given) and (known.always or known.still()):
                    self.latest[options] = known
                    return known
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            pass  # the checks of the call name an argument that is not what it should be
        return None

    def launched(self, options: Hashable, *given: Tensor) -> Any:
        """The result of the plan for these options that takes the tensors, whose launch itself
        refuses misaligned ones; None without a plan, or if it refuses."""
        try:
            known = self.latest.get(options)
            if (
                known is None
                or not known.takes(*given)
                # NOTE: is_watched_unseen, a call of which takes half as long again
                or _function_modes()
                or _dispatch_modes()
                or forward_ad._current_level >= 0
            ):
                known = self.find(options, *given)
            return None if known is None else known.launch(*given)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return None  # the checks of the call name what is wrong

    @staticmethod
    def key_of(options: Hashable, *given: Tensor) -> Hashable:
        """The key under which `find` looks for a plan."""
        return options, given[0].shape, *[x.data_ptr() % ALIGN for x in given]

    def remember(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        launch: Callable[..., Any],
        functions: Sequence[Any] = (),
        differentiable: bool = False,
        takes: Callable[..., bool] | None = None,
        below_autograd: bool = False,
    ) -> None:
        """Keep a plan for calls with this key whose tensors are like `tensors`, or those that it
        `takes`; `functions` are the user's in it. A `differentiable` plan serves calls that want
        a gradient, another all others; a plan of an operator's kernel `below_autograd` serves
        both."""
        if len(self.known) >= self.most:
            self.forget()
        wants_gradient = any(x.requires_grad for x in tensors)
        always = below_autograd or not (wants_gradient or functions)

        def is_current() -> bool:
            return all(f.is_current() for f in functions)

        places = [x.data_ptr() % ALIGN for x in tensors]
        takes = guard_of(tensors) if takes is None else takes
        found = CachedPlan(
            takes, always, wants_gradient, differentiable, is_current, launch, places
        )
        with suppress(TypeError):  # a function without a hash, as of a dataclass, is not looked up
            self.known[key] = (found, *self.known.get(key, ())[: self.most_alike - 1])

    def forget(self) -> None:
        self.known.clear()
        self.latest.clear()


class Argument(NamedTuple):
    """One argument of a launch, as a view of one of the call's tensors."""

    source: int  # the number of that tensor
    dtype: torch.dtype | None  # that it is viewed in; None: its own
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None  # shape and strides; None: its own

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        x = tensors[self.source]
        if self.dtype is not None:
            x = x.view(self.dtype)
        return x if self.layout is None else x.as_strided(*self.layout)


def arguments_of(passed: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Argument] | None:
    """How the arguments `passed` of a launch are views of a call's `tensors`, starting at the same
    addresses; None if one is a copy, or if it is unclear whose view it is."""
    begins: dict[int, int] = {}
    for i, x in enumerate(tensors):
        known = begins.setdefault(x.data_ptr(), i)
        if not x.data_ptr() or tensors[known] is not x:
            return None
    found = []
    for x in passed:
        if (source := begins.get(x.data_ptr())) is None:
            return None
        given = tensors[source]
        dtype = None if x.dtype == given.dtype else x.dtype
        same = dtype is None and x.shape == given.shape and x.stride() == given.stride()
        found.append(Argument(source, dtype, None if same else (tuple(x.shape), x.stride())))
    with suppress(RuntimeError):  # a view in wider elements, which not every layout has
        if all(
            x.of(tensors).data_ptr() == y.data_ptr() for x, y in zip(found, passed, strict=True)
        ):
            return found
    return None
