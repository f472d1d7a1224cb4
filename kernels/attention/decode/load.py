"""Load: the warps of the decode kernel that load K and V, wherever they are."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.pipeline import PipelineState
from cutex.device.row_source import BoxLoads
from cutex.kernels.attention.decode.shared import Part, Shared
from cutex.kernels.attention.decode.splits import Splits


@dataclass(frozen=True)
class Load:
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    pitch_k: Int32  # rows from one page, or one sequence, to the next
    pitch_v: Int32
    number: Int32  # of this warp among those that load
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Load the keys of this CTA's parts, in the order in which the products need them."""
        s = self.shared
        for operand in (self.k, self.v):
            cpasync.prefetch_descriptor(operand.atom)
        splits, place, end = s.begin()
        fills = s.k.producer(), s.v.producer()
        part = s.part(splits, end, splits.begin, place)
        while part.end > part.first:
            fills, part = self.load(splits, end, part, fills)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load(
        self,
        splits: Splits,
        end: Int32,
        part: Part,
        fills: tuple[PipelineState, PipelineState],
    ) -> tuple[tuple[PipelineState, PipelineState], Part]:
        """Load the keys of a part; return the next one, which is looked for while the last slot is
        not free yet."""
        s = self.shared
        k_fill, v_fill = fills
        batch, _ = s.entry(part.entry)
        keys, head = s.sizes.keys(s.passed, batch), s.kv_head(part.head)
        of_k, of_v = (s.source(batch, keys, x) for x in (self.pitch_k, self.pitch_v))
        loads_k = BoxLoads(self.k, of_k, s.sK, head)
        loads_v = BoxLoads(self.v, of_v, s.sV, head)
        share = 0, self.number, s.config.load_warps
        loads_k.load(part.end - 1, k_fill.slot, s.k.acquire(k_fill), *share)
        k_fill.advance()
        for i in cutlass.range(part.end - 1 - part.first, unroll=1):
            block = part.end - 1 - i
            loads_k.load(block - 1, k_fill.slot, s.k.acquire(k_fill), *share)
            k_fill.advance()
            loads_v.load(block, v_fill.slot, s.v.acquire(v_fill), *share)
            v_fill.advance()
        following = s.part(splits, end, part.after, part.span)
        loads_v.load(part.first, v_fill.slot, s.v.acquire(v_fill), *share)
        v_fill.advance()
        return (k_fill, v_fill), following
