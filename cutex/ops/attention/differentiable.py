"""A call of attention of which gradients are wanted, on plain memory while nothing watches, as one
node of autograd.

torch.ops.cutex.flash_attn does the same for everything else. The dispatcher in between, and finding
the plan for each call anew, take the host several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cutex.ops.attention import planned, registered_backward
from cutex.ops.attention.backward import check_gradient
from cutex.ops.attention.call import AttentionCall
from cutex.ops.attention.known_gradients import KnownGradients
from cutex.ops.plain import nobody_watches

FIRST = 1  # the place of q among the arguments of Attention.apply


@dataclass
class Node:
    """What all calls of one plan share."""

    names: tuple[str, ...]  # of the tensors that are given
    options: dict[str, Any]  # the other arguments
    short: Callable[..., tuple[Tensor, Tensor]] | None = None  # the plan's launch of the tensors
    gradients: KnownGradients | None = None  # of the latest call

    @staticmethod
    def of(call: AttentionCall) -> Node:
        given = {f.name: x for f in fields(call) if (x := getattr(call, f.name)) is not None}
        names = tuple(name for name, x in given.items() if isinstance(x, Tensor))
        return Node(names, {name: x for name, x in given.items() if name not in names})

    def call(self, tensors: Sequence[Tensor]) -> AttentionCall:
        return AttentionCall(**dict(zip(self.names, tensors, strict=True)), **self.options)

    def launch(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return Attention.apply(self, *tensors)

    def launch_out(self, *tensors: Tensor) -> Tensor:
        return Attention.apply(self, *tensors)[0]


class Attention(torch.autograd.Function):
    """O and LSE from a Node and its tensors."""

    @staticmethod
    def forward(ctx: Any, node: Node, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        if node.short is not None:
            out, lse = node.short(*tensors)
        else:
            out, of_rows = planned.attend(node.call(tensors), with_lse=True)
            assert of_rows is not None
            lse = of_rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.node = node
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        saved, node = ctx.saved_tensors, ctx.node
        *tensors, out, lse = saved
        names = node.names
        sink = names.index("learnable_sink") if "learnable_sink" in names else None
        with_sink = sink is not None and ctx.needs_input_grad[FIRST + sink]
        plain = not with_sink and grad_lse is None and grad_out is not None
        known = node.gradients.of_alike(grad_out, saved) if plain and node.gradients else None
        if known is not None:
            return None, *known, *[None] * (len(names) - len(known))
        call = node.call(tensors)
        found = registered_backward.of_inputs(call, grad_out, grad_lse, out, lse, with_sink)
        if plain and node.short is not None and nobody_watches():
            node.gradients = KnownGradients.of(call, names, grad_out, saved)
        *of_operands, dsink = found
        of_others = [dsink if i == sink else None for i in range(len(of_operands), len(names))]
        return None, *of_operands, *of_others


def attend(
    call: AttentionCall, return_lse: bool, key: tuple[Any, ...] | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a checked call; with a `key`, later calls like it find a plan."""
    check_gradient(call)
    node = Node.of(call)
    out, lse = node.launch(*call.tensors)
    plan = planned.plan_of(call, with_lse=True)
    if key is not None and plan is not None and plan.short is not None:
        node.short = plan.short
        launch = node.launch if return_lse else node.launch_out
        planned.PLANS.remember(key, call.tensors, launch, differentiable=True)
    return (out, lse) if return_lse else out
