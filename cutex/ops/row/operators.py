"""The operators for rows as torch sees them: registered, with fakes and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutex.ops import differentiation
from cutex.ops.plain import bare, is_plain, nobody_watches, untraced

library = torch.library.Library("cutex", "FRAGMENT")
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling


class Operator(NamedTuple):
    """An operator for rows, and the ways to it that are shorter than torch's dispatcher."""

    through_torch: Callable[..., Any]
    run: Callable[..., Any]
    recorded: Callable[..., Any]  # as an autograd function

    def __call__(self, *args: Any) -> Any:
        """The results for checked arguments, by the shortest way that gives what torch would."""
        return self.through_torch(*args) if _is_compiling() else self._eager(*args)

    @untraced
    def _eager(self, *args: Any) -> Any:
        given = [x for x in args if isinstance(x, Tensor)]
        if not _all_plain(given):
            return self.through_torch(*args)
        return (self.recorded if _is_recorded(given) else self.run)(*args)


def needs_nothing(*tensors: Tensor | None) -> bool:
    """Whether torch has no more to do for checked tensors than to run what they are for."""
    if _is_compiling():
        return False
    given = [x for x in tensors if x is not None]
    return _all_plain(given) and not _is_recorded(given)


def _all_plain(given: list[Tensor]) -> bool:
    return nobody_watches() and all(map(is_plain, given))


def _is_recorded(given: list[Tensor]) -> bool:
    return _grad_enabled() and any(x.requires_grad for x in given)


def _no_view(output: Any) -> Any:
    """`output` with tensors of their own instead of views of what only it has: torch refuses to
    change in place a view that an autograd function has made."""
    if isinstance(output, Tensor):
        return output.data if output._is_view() else output
    if isinstance(output, tuple | list):
        return type(output)(map(_no_view, output))
    return output


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Operator:
    """Register the operator cutex::`name`. Without `backward`, what it computes is a gradient,
    which may be asked for as one to differentiate, as torch.func.grad does, but has none itself; or
    it is an operator without one."""
    library.define(f"{name}{schema}")

    @torch.no_grad()
    def launch(*args: Any) -> Any:
        return _no_view(run(*map(bare, args)))

    def keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise ValueError(f"cutex::{name} is not differentiable")

    keep = setup or keep_nothing
    for key in ("CUDA", "CPU"):
        library.impl(name, launch, key)
    torch.library.register_fake(f"cutex::{name}")(fake)
    differentiation.register(library, name, keep, backward or refuse)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = _no_view(run(*args))
            keep(ctx, args, output)
            return output

    Recorded.backward = staticmethod(backward or refuse)
    return Operator(getattr(torch.ops.cutex, name), run, Recorded.apply)
