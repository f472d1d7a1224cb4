"""Stage 9: fragments ahead: the words of the next k are loaded while this one is multiplied.

Stage 8 needs ten loads at once for four k, and all warps wait for them at one time. With K
outermost, as in stage 6, a k takes six loads into 24 registers, and there is room for two: those of
k + 1 are loaded while k is multiplied, across the barrier, too. cp.async cannot transpose 16 bytes,
so the next tile waits in registers: loaded when this one is begun, stored, transposed, before its
last k.

Lanes that differ in the lowest bit read the same words of B, and those that differ in the next the
same of A: the loads of 16 bytes of such a pair are served together, 16 lanes at a time instead of 8
(2 % more than with lanes in rows; docs/facts/gemm.md#fp32-fragments-ahead).

The registers of a warp are in two banks, even and odd, and an FMA is to take one of each: its word
of A is kept from the FMA before, so these are its sum and its word of B. Words come in fours, word
j in an odd register if j is odd, and so do sums, as they leave. So neighbouring columns of B change
places on their way to smem, and sum j meets the word that lies at j ^ 1; and each row goes through
the columns the other way than the row before, whose last word of B is then kept, too.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cutex.kernels.gemm.simt.config import VECTOR
from cutex.kernels.gemm.simt.stage0 import WARP
from cutex.kernels.gemm.simt.stage5 import REGISTERS, Lines
from cutex.kernels.gemm.simt.stage6 import Stage6
from cutex.kernels.gemm.simt.stage8 import LANES_M, LANES_N

OTHERS = 40  # registers of a thread for addresses and counts


class Held(NamedTuple):
    """The part of the next tile of A or B that a thread has in registers."""

    lines: Lines  # the rows
    k: Int32  # of the first element
    sources: list[cute.Pointer]  # in the first tile, of each row
    values: cute.Tensor  # (V, rows)


class Stage9(Stage6):
    @property
    def ctas_per_sm(self) -> int:
        """As many as leave a thread registers for its sums, the words of two k, its part of the
        next tile, and OTHERS."""
        c = self.config
        words = 2 * (c.thread_m + c.thread_n) + (c.tile_m + c.tile_n) * c.tile_k // self.num_threads
        return REGISTERS // (self.num_threads * (c.thread_m * c.thread_n + words + OTHERS))

    @property
    def width(self) -> int:
        """The elements of a load from memory."""
        return VECTOR if self.config.whole_k else 1

    @cute.jit
    def mainloop(self, mAB, sAB, corner, rAcc: cute.Tensor, thread: Int32) -> None:
        c, size_k = self.config, cute.size(mAB[0], mode=[1])
        held = [self.held(mAB[0], c.tile_m, corner[0], thread)]
        held.append(self.held(mAB[1], c.tile_n, corner[1], thread, turned=1))
        rA = cute.make_rmem_tensor((c.thread_m, 2), Float32)  # (tM, k in turn)
        rB = cute.make_rmem_tensor((c.thread_n, 2), Float32)  # (tN, k in turn)
        self.fetch(held, Int32(0), size_k)
        self.put(held, sAB, Int32(0))
        cute.arch.sync_threads()
        self.take(self.bases(sAB, Int32(0), thread), 0, (rA, rB), thread)
        slot = Int32(0)
        for k_tile in cutlass.range(cute.ceil_div(size_k, c.tile_k), unroll=1):
            self.fetch(held, k_tile + 1, size_k)
            here, following = (self.bases(sAB, x, thread) for x in (slot, 1 - slot))
            for k in cutlass.range_constexpr(c.tile_k):
                if cutlass.const_expr(k + 1 == c.tile_k):
                    self.put(held, sAB, 1 - slot)
                    cute.arch.sync_threads()
                self.take(here if k + 1 < c.tile_k else following, k + 1, (rA, rB), thread)
                self.outer_product(rA[None, k % 2], rB[None, k % 2], rAcc)
            slot = 1 - slot

    def outer_product(self, rA: cute.Tensor, rB: cute.Tensor, rAcc: cute.Tensor) -> None:
        """rAcc[i, j] += rA[i] * rB[j ^ 1], to and fro along j."""
        columns = range(cute.size(rB))
        for i in range(cute.size(rA)):
            for j in reversed(columns) if i % 2 else columns:
                rAcc[i, j] = rAcc[i, j] + rA[i] * rB[j ^ 1]

    # ---- from memory to smem

    def held(self, mX: cute.Tensor, rows: int, row: Int32, thread: Int32, turned: int = 0) -> Held:
        """What a thread loads of a tile: for smem's row i the tile's row i ^ turned."""
        lanes = self.config.tile_k // self.width  # along K
        lines = Lines(thread // lanes, tuple(range(0, rows, self.num_threads // lanes)))
        k, last = thread % lanes * self.width, cute.size(mX, mode=[0]) - 1
        sources = [
            mX.iterator + cute.crd2idx((cutlass.min(row + (at ^ turned), last), k), mX.layout)
            for at in lines.all()
        ]
        values = cute.make_rmem_tensor((self.width, len(sources)), Float32)  # (V, rows)
        values.fill(0)
        return Held(lines, k, sources, values)

    @cute.jit
    def fetch(self, held: list[Held], k_tile: Int32, size_k: Int32) -> None:
        """Load a tile's parts; zeros past the last k."""
        for i in cutlass.range_constexpr(2):
            x, from_k = held[i], k_tile * self.config.tile_k
            if from_k + x.k < size_k:
                for j in cutlass.range_constexpr(len(x.sources)):
                    at = (x.sources[j] + from_k).align(4 * self.width)
                    gX = cute.make_tensor(at, cute.make_layout(self.width))  # (V)
                    cute.autovec_copy(gX, x.values[None, j])
            else:
                x.values.fill(0)

    def put(self, held: list[Held], sAB, slot: Int32) -> None:
        """Store them to smem, transposed."""
        for x, sX in zip(held, sAB, strict=True):
            first = sX.iterator + cute.crd2idx((x.lines.first, x.k, slot), sX.layout)
            sX = cute.make_tensor(first, sX.layout)  # (bRows, bK, SLOT), from there
            for j, step in enumerate(x.lines.steps):
                for v in range(self.width):
                    sX[step, v, 0] = x.values[v, j]

    # ---- from smem to registers

    def bases(self, sAB, slot: Int32, thread: Int32) -> list[cute.Pointer]:
        """The addresses of a thread's first row and column in a slot."""
        first = self.rows(thread).first, self.columns(thread).first
        return [
            _address(sX.iterator + cute.crd2idx((at, 0, slot), sX.layout))
            for sX, at in zip(sAB, first, strict=True)
        ]

    def take(self, bases: list[cute.Pointer], k: int, fragments, thread: Int32) -> None:
        """Load the words of k, or of the first k of the next tile."""
        c = self.config
        sides = (c.tile_m, self.rows(thread)), (c.tile_n, self.columns(thread))
        for base, (rows, lines), rX in zip(bases, sides, fragments, strict=True):
            for i in range(0, len(lines.steps), VECTOR):
                at = base + (k % c.tile_k * (rows + VECTOR) + lines.steps[i])
                sX = cute.make_tensor(at.align(16), cute.make_layout(VECTOR))  # (V)
                to = cute.local_tile(rX[None, k % 2], (VECTOR,), (i // VECTOR,))  # (V)
                cute.autovec_copy(sX, to)

    def rows(self, thread: Int32) -> Lines:
        c = self.config
        warp = thread // WARP // (c.tile_n // (LANES_N * c.thread_n))
        return _in_fours(warp, thread % 2 + thread % WARP // 16 * 2, LANES_M, c.thread_m)

    def columns(self, thread: Int32) -> Lines:
        c = self.config
        warp = thread // WARP % (c.tile_n // (LANES_N * c.thread_n))
        return _in_fours(warp, thread // 2 % LANES_N, LANES_N, c.thread_n)


def _in_fours(warp: Int32, lane: Int32, lanes: int, count: int) -> Lines:
    """The rows of a lane of a warp: four neighbours, then those of the other lanes."""
    steps = (VECTOR * lanes * i + v for i in range(count // VECTOR) for v in range(VECTOR))
    return Lines(warp * lanes * count + VECTOR * lane, tuple(steps))


@dsl_user_op
def _address(at: cute.Pointer, *, loc=None, ip=None) -> cute.Pointer:
    """The same address, of whose bits the compiler knows nothing.

    NOTE: else it makes an OR of an addition that carries nothing, for which the address of a load
    has no room: 104 instructions for 1024 FMAs.
    """
    values = [at.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    ptx = "mov.b32 $0, $1;"
    same = llvm.inline_asm(T.i32(), values, ptx, "=r,r", has_side_effects=False, loc=loc, ip=ip)
    return cute.make_ptr(
        Float32, Int32(same), cute.AddressSpace.smem, assumed_align=16, loc=loc, ip=ip
    )
