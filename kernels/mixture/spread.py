"""Rows of tokens copied to where each of their experts has them: out[places[t, j]] = x[t].

A token's row is read once and written once for each of its experts, by bulk copies through smem:
no register holds an element, and what an index_select would read again is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from cutex.compile import Argument, Bound, Operand
from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing, Run
from cutex.kernels.mixture.combine import ARCHS

WARP = 32
PART = 4096  # elements of a row that a warp copies at a time
STAGES = 4
CTAS = 132 * 6  # at most


@dataclass(frozen=True)
class SpreadConfig:
    """The config: the experts of a token, up to 32."""

    experts: int


class Spread:
    """A warp copies one part of a token's row after the other.

    barrier     arrives                                  waits
    full[slot]  1: lane 0, and the bytes of the part     the warp, before it stores the slot

    smem        bytes
    slots       2 * (PART + 16) * STAGES
    """

    archs = ARCHS

    def __init__(self, config: SpreadConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "mixture_spread"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        """X (T, D), places (T, J), edges (E), out (R, D)."""
        plain: dict[str, Any] = {"aligned": False, "whole": False}
        each = (Bound("j", self.config.experts, self.config.experts),)
        return (
            Operand("x", ("t", "d"), dtype),
            Operand("places", ("t", "j"), "int32", bounds=each, **plain),
            Operand("edges", ("e",), "int32", **plain),
            Operand("out", ("r", "d"), dtype),
        )

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        places: cute.Tensor,
        edges: cute.Tensor,
        mOut: cute.Tensor,
        stream: Any,
    ) -> None:
        """Launch with x (T, D), places (T, J), edges (E), out (R, D), and a stream."""
        units = cute.size(mX, mode=[0]) * parts_of(mX)
        self.kernel(mX, places, edges, mOut).launch(
            grid=(cutlass.min(units, CTAS), 1, 1), block=(WARP, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, places: cute.Tensor, edges: cute.Tensor, mOut: cute.Tensor
    ) -> None:
        """Copy."""
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        lane, experts = cute.arch.lane_idx(), self.config.experts
        ring = BulkRing.allocate(mX.element_type, PART, STAGES)
        publish_barriers((ring.full,))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        end, parts = edges[cute.size(edges) - 1], parts_of(mX)
        units = cute.size(mX, mode=[0]) * parts
        turns = (units - first + (step - 1)) // step
        for turn in cutlass.range_constexpr(STAGES - 1):
            if lane == 0 and turn < turns:
                ring.load(part_of(mX, first + turn * step, parts), Int32(turn))
        for turn in cutlass.range(turns, unroll=1):
            unit = first + turn * step
            token, place = unit // parts, end
            if lane < experts:
                place = places[token, lane]
            ring.wait(turn)
            if place < end:
                part_of(mOut, place * parts + (unit - token * parts), parts).send(ring[turn])
            cute.arch.cp_async_bulk_commit_group()
            # NOTE: the slot of the turn before is loaded again when all lanes' stores have read it
            cute.arch.cp_async_bulk_wait_group(1, read=True)
            cute.arch.sync_warp()
            if lane == 0 and turn + (STAGES - 1) < turns:
                later = turn + (STAGES - 1)
                ring.load(part_of(mX, first + later * step, parts), later)
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def parts_of(mX: cute.Tensor) -> Int32:
    """The parts of a row of mX (rows, columns)."""
    return cute.ceil_div(cute.size(mX, mode=[1]), PART)


def part_of(mX: cute.Tensor, unit: Int32, parts: Int32) -> Run:
    """Part `unit` of all parts of mX (rows, columns), row by row."""
    row = unit // parts
    column = (unit - row * parts) * PART
    gX = cute.domain_offset(column, mX[row, None])  # (columns - column)
    count = cutlass.min(cute.size(mX, mode=[1]) - column, PART)
    whole = cute.make_tensor(gX.iterator, cute.make_layout(count))
    return Run(whole, Int32(0), Boolean(True), Boolean(True), whole=True)
