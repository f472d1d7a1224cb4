"""The gradients of a call like an earlier one, without the decisions of that one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutex.ops.attention import own_backward
from cutex.ops.attention.backward import Gradients
from cutex.ops.attention.call import AttentionCall
from cutex.ops.device import SEVERAL_GPUS, current
from cutex.ops.plain import nobody_watches
from cutex.ops.plans import ALIGN, guard_of
from cutex.simulation import current as simulation_here

LISTS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
OPERANDS = 4  # of the tensors given, that begin anywhere: the gradient of O, q, k and v

_grad_enabled = torch.is_grad_enabled
_in_one_order = torch.are_deterministic_algorithms_enabled


@dataclass(frozen=True)
class KnownGradients:
    """A plan of gradients of q, k and v, for calls whose tensors are like those that it was made
    for: the gradient of O; the call's tensors, q, k and v first; O and LSE."""

    takes: Callable[..., bool]
    places: list[int]  # where the first OPERANDS begin, modulo ALIGN bytes
    in_one_order: bool  # what torch.use_deterministic_algorithms was
    simulation: object  # that it is for; None: a GPU
    lists: list[int]  # which of the call's tensors are lists of lengths
    plan: own_backward.Plan

    @staticmethod
    def of(
        call: AttentionCall,
        names: Sequence[str],
        grad_out: Tensor,
        tensors: Sequence[Tensor],
    ) -> KnownGradients | None:
        """The plan of a call that has just been computed, whose tensors have `names` and stand in
        `tensors` before O and LSE; None if our kernels do not compute it."""
        plan = own_backward.plan_for(call, grad_out, tensors[-2], None)
        if plan is None:
            return None
        given = grad_out, *tensors
        lists = [i for i, name in enumerate(names) if name in LISTS]
        places = [x.data_ptr() % ALIGN for x in given[:OPERANDS]]
        return KnownGradients(
            guard_of(given), places, _in_one_order(), simulation_here(), lists, plan
        )

    def of_alike(self, grad_out: Tensor, tensors: Sequence[Tensor]) -> Gradients | None:
        """The gradients of a call whose tensors are alike; None of another one, or where torch has
        more to do than to compute them."""
        if (
            _grad_enabled()
            or not self.takes(grad_out, *tensors)
            or [x.data_ptr() % ALIGN for x in (grad_out, *tensors[: OPERANDS - 1])] != self.places
            or _in_one_order() != self.in_one_order
            or simulation_here() is not self.simulation
            or not nobody_watches()
        ):
            return None
        q, k, v, *_, out, lse = tensors
        given = (q, k, v, out, grad_out), lse, (), [tensors[i] for i in self.lists]
        if not SEVERAL_GPUS:  # NOTE: the context takes as long as the launch
            return self.plan.run(*given)
        with current(grad_out.device):
            return self.plan.run(*given)
