"""Attention of few queries and long caches on Hopper: CTAs share the keys evenly.

A CTA has a warp that loads and a warpgroup of 64 packed rows: the queries of all heads that read
one head of K and V. What bounds it is memory: 13.6 bytes a cycle and SM of an H100. A block of 128
keys at head dim 128 takes 4800 cycles to come, 1024 of tensor cores and some 1300 of softmax.

Of up to 16 rows, or 32 in e4m3, each warp has other keys instead (few_rows.py).

Each CTA takes an equal share of all keys of all sequences (splits.py), and the last one that has
written its part of a unit merges the parts (out.py), or a second kernel does (Combine).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.pipeline import Warps, publish_barriers
from cutex.device.words import WordRing
from cutex.kernels.attention.decode.config import ROWS, DecodeConfig
from cutex.kernels.attention.decode.launch import CopyLoad, DecodeKernel, Load, kv_slots, ring
from cutex.kernels.attention.decode.out import out_of
from cutex.kernels.attention.decode.shared import PART, Shared
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.decode.sm90.compute import Compute, Wide, Widen, product_dtype
from cutex.kernels.attention.decode.sm90.few_rows import FewRows, Sums


class Decode(DecodeKernel[DecodeConfig]):
    """The decode kernel: its barriers and memory.

    barrier          arrives                                waits
    k.full, v.full   1: LOAD, and the bytes by TMA          COMPUTE; of 8 bits WIDEN, but few rows
                     (single rows 128: LOAD's threads)
    k.empty, v.empty 1 a warp that reads the slot           LOAD
    wide.full        4: WIDEN's warps for K, or for V       COMPUTE
    wide.empty       4: COMPUTE's warps                     WIDEN
    part full        1 a warp that loads                    COMPUTE, WIDEN: parts of 8 bits
    part empty       1 a warp that computes or widens       LOAD
    (warpgroup)      its threads, a part being written      the same, before it counts as written

    smem       bytes                                        hd 128   hd 64    hd 256
    sK, sV     tile_n * (D + DV) * 2 * num_stages           131072   196608   196608
    sQ         64 * D * 2, above head dim 192               -        -        32768
    wide       tile_n * (D + DV) * 4, if K and V are e4m3   65536    65536    65536
               and rows many
    sums       (64 * DV + 256) * 4, if rows are few         33792    17408    -
    words      less than 1024
    """

    arch = "sm_90a"

    name = "sm90_attention_decode"

    @property
    def compute_warps(self) -> Warps:
        return Warps(first=0, count=4)

    @property
    def widen_warps(self) -> Warps:
        return Warps(first=self.compute_warps.end, count=8 * self.config.widens)

    @property
    def load_warps(self) -> Warps:
        return Warps(first=self.widen_warps.end, count=self.config.load_warps)

    @property
    def registers(self) -> Any:
        """The RoleRegisters of its warpgroups; None where threads keep what they begin with."""
        return self.config.registers

    @property
    def num_threads(self) -> int:
        return self.config.num_threads

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        k: cpasync.TmaInfo,
        v: cpasync.TmaInfo,
        mO: cute.Tensor,
        args: KernelArgs,
        sizes: Sizes,
        pitches: tuple[Int32, Int32],
    ) -> None:
        c = self.config
        dtype = mQ.element_type
        smem = SmemAllocator()
        sQ = None
        if cutlass.const_expr(c.q_in_smem):
            sQ = allocate_slots(smem, dtype, kv_slots(dtype, ROWS, c.head_dim, 1))
        of_cache = k.atom.value_type
        sK, sV = (
            allocate_slots(smem, of_cache, kv_slots(of_cache, c.tile_n, d, c.num_stages))
            for d in c.head_dims
        )
        wide_tiles = Wide.tiles(smem, c, product_dtype(c, dtype)) if c.widens else []
        last = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        sums: Any = Sums.allocate(smem, c) if c.few_rows else None
        consumers = c.consumers
        k_ring = ring(smem, "k", c, c.k_bytes, consumers)
        v_ring = ring(smem, "v", c, c.v_bytes, consumers)
        wide: Any = None
        if cutlass.const_expr(c.widens):
            wide = Wide(Wide.ring(smem, "k"), Wide.ring(smem, "v"), *wide_tiles)
        parts: Any = None
        if cutlass.const_expr(c.tells_parts):
            parts = WordRing.allocate(smem, "part", PART, c.load_warps, self.load_warps.first)
        of_wide = () if wide is None else (wide.k, wide.v)
        of_parts = () if parts is None else (parts.ring,)
        publish_barriers((k_ring, v_ring, *of_wide, *of_parts))
        cute.arch.griddepcontrol_wait()
        sizes = sizes.known(c)
        info = sizes.block_info(c, args.band(c.causal))
        shared = Shared(c, info, args, sizes, sQ, sK, sV, k_ring, v_ring, parts)
        warp, registers = cute.arch.warp_idx(), self.registers
        if warp >= self.load_warps.first:
            if cutlass.const_expr(registers is not None):
                cute.arch.setmaxregister_decrease(registers.load)
            if warp < self.load_warps.end:
                load = CopyLoad if c.copies_rows else Load
                load(k, v, *pitches, warp - self.load_warps.first, shared).run()
        elif warp >= self.compute_warps.end:
            if cutlass.const_expr(c.widens):
                cute.arch.setmaxregister_decrease(registers.widen)
                keys, values = Widen.of(shared, wide)
                if warp < self.compute_warps.end + 4:
                    keys.run()
                else:
                    values.run()
        else:
            if cutlass.const_expr(registers is not None):
                cute.arch.setmaxregister_increase(registers.compute)
            out = out_of(c, mO, args, sizes, last)
            if cutlass.const_expr(c.few_rows):
                FewRows(mQ, out, shared, wide, sums).run()
            else:
                Compute(mQ, out, shared, wide).run()
