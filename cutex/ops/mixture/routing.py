"""Which rows each expert gets: tokens sorted by expert, in their own order within one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutex.ops.grouped.launch import arch_for
from cutex.ops.mixture.launch import sort
from cutex.ops.row.operators import define


class Routing(NamedTuple):
    """The rows of all experts, one expert after the other: R = T * J of them, those of no expert
    last."""

    tokens: Tensor  # (R,) int32: of each row
    places: Tensor  # (T, J) int32: the row of each token's j-th expert
    order: Tensor  # (R,) int32: the entry of expert_ids that each row comes from
    offs: Tensor  # (E,) int32: where each expert's rows end


def route(expert_ids: Tensor, experts: int) -> Routing:
    """The rows of `experts` experts, for ids (T, J); an id that is none of them counts nothing. One
    launch, of which nothing waits for the host."""
    return Routing(*ROUTE(expert_ids.detach(), experts))


def _run(expert_ids: Tensor, experts: int) -> list[Tensor]:
    made = _fake(expert_ids, experts)
    tokens, places, order, offs = made
    if not expert_ids.numel():
        arch_for(expert_ids)
        offs.zero_()
        return made
    flat = expert_ids.contiguous().view(-1)
    sort(flat, offs, tokens, order, places.view(-1), expert_ids.shape[1])
    return made


def _fake(expert_ids: Tensor, experts: int) -> list[Tensor]:
    def of(*shape: int) -> Tensor:
        return expert_ids.new_empty(shape, dtype=torch.int32)

    count = expert_ids.shape[0] * expert_ids.shape[1]
    return [of(count), of(*expert_ids.shape), of(count), of(experts)]


ROUTE: Any = define("moe_route", "(Tensor expert_ids, int experts) -> Tensor[]", _run, _fake)
