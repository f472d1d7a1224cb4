"""Tensor memory: 128 lanes x 512 columns of 32 bits, where tcgen05.mma accumulates.

A warp may read only the 32 lanes of its quarter, (warp % 4) * 32 and up, so an accumulator of 128
rows is read by four consecutive warps, one row per thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

LANES = 128
COLUMNS = 512
WIDEST_LOAD = 64  # columns in one tcgen05.ld: 64 registers in flight


@dataclass(frozen=True)
class Tmem:
    """An allocation of tensor memory, held by the CTA from `acquire` to `free`.

    The CTAs of a `pair` allocate and free together: the same columns in each.
    """

    columns: int
    pair: bool
    address: cute.Pointer  # in smem: where the hardware writes the allocation's address

    @staticmethod
    def allocate(smem: SmemAllocator, columns: int, pair: bool = False) -> Tmem:
        if columns > COLUMNS:
            raise ValueError(f"{columns} columns of tensor memory, there are {COLUMNS}")
        # a power of two, at least 32 (PTX ISA, tcgen05.alloc)
        power = max(32, 1 << (columns - 1).bit_length())
        return Tmem(power, pair, smem.allocate_array(Int32, 1))

    def acquire(self) -> None:
        """Allocate the columns. The whole warp that later frees them calls it; a CTA barrier must
        come before `pointer`."""
        cute.arch.alloc_tmem(self.columns, self.address, is_two_cta=self.pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)

    def pointer(self) -> cute.Pointer:
        return cute.arch.retrieve_tmem_ptr(Float32, 16, self.address)

    def free(self, pointer: cute.Pointer) -> None:
        """Free the columns. The warp that acquired them calls it, after every other warp's last
        read."""
        cute.arch.dealloc_tmem(pointer, self.columns, is_two_cta=self.pair)


@dsl_user_op
def fence_after_sync(*, loc=None, ip=None) -> None:
    """Fence before the first tcgen05 instruction that relies on the barrier just passed (PTX ISA,
    tcgen05.fence::after_thread_sync)."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_before_sync(*, loc=None, ip=None) -> None:
    """Fence after the last tcgen05 instruction that the barrier about to be signalled must cover
    (PTX ISA, tcgen05.fence::before_thread_sync)."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


def load_columns(num_columns: int) -> int:
    """The columns of the widest load that divides `num_columns`."""
    return next(c for c in (WIDEST_LOAD, 32, 16) if num_columns % c == 0)


def make_load(tAcc: cute.Tensor) -> cute.TiledCopy:
    """The load of a tile tAcc (128, C) of tensor memory by 128 threads, one row each."""
    columns = cute.size(tAcc, mode=[1])
    repetition = tcgen05.Repetition(columns)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(repetition), Float32)
    return tcgen05.make_tmem_copy(atom, tAcc)
