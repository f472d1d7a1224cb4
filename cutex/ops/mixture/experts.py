"""The experts of transformers' models on cutex: `experts_implementation="cutex"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.grouped import grouped_mm
from cutex.ops.grouped.checks import DTYPES, MOST_GROUPS
from cutex.ops.grouped.gathered import gathered_rows
from cutex.ops.mixture.halves import gated_product, gated_rows, takes_halves
from cutex.ops.mixture.routing import route
from cutex.ops.mixture.rows import combined_rows, spread_rows, takes

NAME = "cutex"


def register() -> bool:
    """Register the experts in transformers, if its version takes any; return whether it does."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return False
    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
    return True


def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' part of a layer, as transformers' own `grouped_mm`; by that where cutex has no
    kernel for the dtype.

    An index that is no expert's, as under expert parallelism, counts nothing.
    """
    if not self.has_gate or self.gate_up_proj.dtype not in DTYPES:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        other = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        return other(self, hidden_states, top_k_index, top_k_weights)
    up, down = self.gate_up_proj, self.down_proj
    experts = up.shape[0]
    if experts > MOST_GROUPS:
        raise ValueError(f"a layer has {experts} experts, cutex takes up to {MOST_GROUPS}")
    if not self.is_transposed:
        up, down = up.mT, down.mT
    routing = route(top_k_index, experts)
    x = hidden_states.to(up.dtype)
    taken = takes(x, routing)
    rows = spread_rows(x, routing) if taken else gathered_rows(x, routing.tokens)
    biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
    y = _gated(self, rows, up, biases[0], routing.offs)
    z = grouped_mm(y, down, routing.offs, bias=biases[1], ragged=True)
    normed = getattr(self, "has_post_expert_norm", False)  # not every version has it
    if taken and not normed and hidden_states.dtype == z.dtype:
        return combined_rows(z, top_k_weights, routing)
    known = routing.places < routing.offs[-1]
    terms = torch.where(known[..., None], z[routing.places.long()], 0)  # (T, J, D)
    if normed:
        terms = self.post_expert_norm(terms)
    return (terms * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _gated(self: Any, rows: Tensor, up: Tensor, bias: Tensor | None, offs: Tensor) -> Tensor:
    """The up product of rows, gated: by our kernels if the gate is silu of the first half of the
    columns, else by the model's own."""
    ours = bias is None and takes_halves(rows, up) and _gates_by_silu(self)
    if ours and (y := gated_product(rows, up, offs)) is not None:
        return y
    h = grouped_mm(rows, up, offs, bias=bias, ragged=True)
    return gated_rows(h, offs) if ours else self._apply_gate(h)


def _gates_by_silu(self: Any) -> bool:
    """Whether `self._apply_gate` is transformers' default one, by silu."""
    from transformers.integrations import moe

    default = getattr(moe, "_default_apply_gate", None)
    plain = default is not None and getattr(type(self), "_apply_gate", None) is default
    name = type(getattr(self, "act_fn", None)).__name__
    return plain and "_apply_gate" not in vars(self) and name in ("SiLU", "SiLUActivation")
