"""The operators for rows as torch sees them: registered, with fakes and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cutex.ops import differentiation
from cutex.ops.plain import bare

library = torch.library.Library("cutex", "FRAGMENT")


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Register the operator cutex::`name`, and return it. Without `backward`, what it computes is
    a gradient, which is not differentiated again."""
    library.define(f"{name}{schema}")

    @torch.no_grad()
    def launch(*args: Any) -> Any:
        return run(*map(bare, args))

    def refuse(ctx: Any, inputs: Any, output: Any) -> None:
        raise ValueError(f"cutex::{name} is a gradient, and cannot be differentiated again")

    for key in ("CUDA", "CPU"):
        library.impl(name, launch, key)
    torch.library.register_fake(f"cutex::{name}")(fake)
    differentiation.register(library, name, setup or refuse, backward or (lambda ctx, *g: None))
    return getattr(torch.ops.cutex, name)
