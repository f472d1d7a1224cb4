"""Which rows each expert gets: tokens sorted by expert, in their own order within one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """The rows of all experts, one expert after the other: R = T * J of them, those of no expert
    last."""

    tokens: Tensor  # (R,) of each row
    places: Tensor  # (T, J) int32: the row of each token's j-th expert
    order: Tensor  # (R,): the entry of expert_ids that each row comes from
    offs: Tensor  # (E,) int32: where each expert's rows end


def route(expert_ids: Tensor, experts: int) -> Routing:
    """The rows of `experts` experts, for ids (T, J); an id that is none of them counts nothing."""
    flat = expert_ids.reshape(-1)
    known = torch.where((flat < 0) | (flat >= experts), experts, flat)
    ids, order = known.sort(stable=True)
    ends = torch.arange(1, experts + 1, device=ids.device, dtype=ids.dtype)
    offs = torch.searchsorted(ids, ends, out_int32=True)
    rows = torch.arange(flat.shape[0], device=ids.device, dtype=torch.int32)
    places = torch.empty_like(rows).scatter_(0, order, rows)
    tokens = order.div(expert_ids.shape[1], rounding_mode="floor")
    return Routing(tokens, places.view(expert_ids.shape), order, offs)
