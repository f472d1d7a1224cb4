"""One product per arch: every source of A, every kind of element and every major, exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass

import cutlass
import pytest
import torch
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warpgroup
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.memory import SmemAllocator

from cutex.compile import Compiled, Operand, compile
from cutex.device.atoms.mma import allocate_slots, contiguous_rows_layout, slots_layout
from cutex.device.atoms.tma import load_operand, tile_loads
from cutex.device.atoms.tmem import Tmem, fence_after_sync, fence_before_sync
from cutex.device.atoms.umma import Umma, UmmaProduct
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct
from cutex.device.attention.tmem_rows import columns_of, store_columns
from cutex.device.pipeline import Barrier, publish_barriers
from cutex.dtypes import DTYPES
from cutex.sim import simulate

N, K_BYTES, SLOTS = 32, 128, 2
MAJORS = {"K": OperandMajorMode.K, "MN": OperandMajorMode.MN}


@dataclass(frozen=True)
class ProductConfig:
    """A (M, K) times B (N, K), each K or MN-major; K in two slots, of which slot 1 is twice."""

    a_from: str  # "smem", "registers", "both" or "tmem"
    a_major: str = "K"
    b_major: str = "K"


class Kernel:
    """mC = A[0] B[0]^T + A[1] B[1]^T, with A and B loaded into slots by TMA."""

    dtypes = ("bf16", "fp16", "e4m3", "e5m2", "fp32")
    rows: int

    def __init__(self, config: ProductConfig) -> None:
        self.config = config

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        c = self.config
        of = {"K": -1, "MN": -2}
        return (
            Operand("mA", ("m", "k"), dtype, of[c.a_major]),
            Operand("mB", ("n", "k"), dtype, of[c.b_major]),
            Operand("mC", ("m", "n"), "fp32"),
        )

    def slots(self, mX: cute.Tensor, rows: int, major: str) -> cute.ComposedLayout:
        dtype = mX.element_type
        k = 8 * K_BYTES // dtype.width
        if major == "MN":
            return contiguous_rows_layout(dtype, rows, k, SLOTS)
        return slots_layout(dtype, rows, k, SLOTS, 128)

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        a = load_operand(mA, self.slots(mA, self.rows, self.config.a_major))
        b = load_operand(mB, self.slots(mB, N, self.config.b_major))
        self.kernel(a, b, mC).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.jit
    def load(
        self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, sA: cute.Tensor, sB: cute.Tensor, loaded
    ) -> None:
        """Load both slots. Warp 0 calls it."""
        with cute.arch.elect_one():
            loaded.arrive_expecting(SLOTS * K_BYTES * (self.rows + N))
        for slot in cutlass.range_constexpr(SLOTS):
            tile_loads(a, sA, 0).load(slot, slot, loaded[0])
            tile_loads(b, sB, 0).load(slot, slot, loaded[0])


class HopperProduct(Kernel):
    arch = "sm_90a"
    name = "sm90_product_test"
    rows = 64

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor) -> None:
        c, smem = self.config, SmemAllocator()
        dtypes = a.atom.value_type, b.atom.value_type
        sA, sB = (allocate_slots(smem, x.atom.value_type, x.smem_layout) for x in (a, b))
        loaded = Barrier.allocate(smem, "loaded", arrivals=1)
        publish_barriers([loaded])
        if cute.arch.warp_idx() == 0:
            self.load(a, b, sA, sB, loaded)
        loaded.wait(0)
        mma = Wgmma(N, *dtypes, MAJORS[c.a_major], MAJORS[c.b_major])
        acc = mma.accumulator()
        product = WgmmaProduct(mma, mma.a_slots(sA), mma.b_slots(sB), acc)
        for slot in cutlass.range_constexpr(SLOTS):
            if cutlass.const_expr(c.a_from == "smem"):
                product.issue(slot, accumulate=slot > 0)
            else:
                k = cute.size(sA, mode=[1]) // (2 if c.a_from == "both" else 1)
                registers = self.in_registers(mma, sA[None, None, slot], k)
                kept = registers
                if cutlass.const_expr(c.a_from == "both"):
                    kept = registers, product.a[None, None, None, slot]
                product.of(kept).issue(slot, accumulate=slot > 0)
            warpgroup.wait_group(0)
        thread, _, _ = cute.arch.thread_idx()
        tCgC = mma.tiled().get_slice(thread).partition_C(cute.local_tile(mC, (64, N), (0, 0)))
        tCgC.store(acc.load())

    @cute.jit
    def in_registers(
        self, mma: cutlass.Constexpr[Wgmma], sA: cute.Tensor, k: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """The first `k` elements of K of sA (bM, bK) in registers."""
        thread, _, _ = cute.arch.thread_idx()
        tiled_mma = mma.tiled(warpgroup.OperandSource.RMEM)
        cA = cute.make_identity_tensor((self.rows, k))
        tCcA = tiled_mma.get_slice(thread).partition_A(cA)  # (MMA, MMA_M, MMA_K)
        registers = mma.a_registers(k)
        values = cute.recast_tensor(registers, sA.element_type)
        for i in cutlass.range(cute.size(values), unroll_full=True):
            values[i] = sA[tCcA[i]]
        return registers


class BlackwellProduct(Kernel):
    arch = "sm_100a"
    name = "sm100_product_test"
    rows = 128

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor) -> None:
        c, smem, warp = self.config, SmemAllocator(), cute.arch.warp_idx()
        dtypes = a.atom.value_type, b.atom.value_type
        sA, sB = (allocate_slots(smem, x.atom.value_type, x.smem_layout) for x in (a, b))
        loaded, done = (Barrier.allocate(smem, x, arrivals=1) for x in ("loaded", "MMA done"))
        tmem = Tmem.allocate(smem, columns=2 * N + K_BYTES // 4 * SLOTS)
        if warp == 0:
            tmem.acquire()
        publish_barriers([loaded, done])
        if warp == 0:
            self.load(a, b, sA, sB, loaded)
        loaded.wait(0)
        pointer = tmem.pointer()
        mma = Umma(self.rows, N, *dtypes, MAJORS[c.a_major], MAJORS[c.b_major])
        # into the second of two accumulators side by side
        acc = mma.accumulator(pointer)
        product = UmmaProduct(mma, mma.a_slots(sA), mma.b_slots(sB), acc).at(Int32(N))
        if cutlass.const_expr(c.a_from == "tmem"):
            self.to_tmem(sA, pointer)
        if warp == 0:
            for slot in cutlass.range_constexpr(SLOTS):
                if cutlass.const_expr(c.a_from == "tmem"):
                    k = cute.size(sA, mode=[1])
                    tA = mma.a_tmem(pointer, 2 * N + slot * K_BYTES // 4, k)
                    product.of(tA).issue(slot, accumulate=slot > 0)
                else:
                    product.issue(slot, accumulate=slot > 0)
            product.commit(done[0])
        done.wait(0)
        fence_after_sync()
        self.store(mC, pointer)
        fence_before_sync()
        cute.arch.sync_threads()
        if warp == 0:
            tmem.free(pointer)

    @cute.jit
    def to_tmem(self, sA: cute.Tensor, pointer: cute.Pointer) -> None:
        """Copy sA to tensor memory behind the accumulators, a row each thread."""
        thread, _, _ = cute.arch.thread_idx()
        for slot in cutlass.range_constexpr(SLOTS):
            row = cute.make_rmem_tensor(cute.make_layout(cute.size(sA, mode=[1])), sA.element_type)
            for i in cutlass.range(cute.size(row), unroll_full=True):
                row[i] = sA[thread, i, slot]
            column = 2 * N + slot * K_BYTES // 4
            store_columns(pointer, column, cute.recast_tensor(row, Float32))
        cute.arch.fence_view_async_tmem_store()
        fence_before_sync()
        cute.arch.sync_threads()
        fence_after_sync()

    @cute.jit
    def store(self, mC: cute.Tensor, pointer: cute.Pointer) -> None:
        thread, _, _ = cute.arch.thread_idx()
        values = columns_of(pointer, N, N).load(0)
        for i in cutlass.range_constexpr(N):
            mC[thread, i] = values[i]


def result(kernel: type[Kernel], config: ProductConfig, dtype: str) -> tuple[torch.Tensor, ...]:
    """The product by the kernel in the simulator, and the exact one."""
    k = SLOTS * 8 * K_BYTES // DTYPES[dtype].bits
    a, b = (torch.randint(-3, 4, (rows, k)).float() for rows in (kernel.rows, N))
    given = []
    for x, major in ((a, config.a_major), (b, config.b_major)):
        x = x.to(DTYPES[dtype].torch)
        given.append(x.mT.contiguous().mT if major == "MN" else x)
    c = torch.full((kernel.rows, N), float("nan"))
    compiled: Compiled = compile(kernel(config), dtype, kernel.arch)
    report = simulate(compiled, *given, c)
    assert not report.findings, "\n".join(map(str, report.findings))
    return c, a @ b.T


BOTH = ("K", "MN")
HOPPER = [
    *((dtype, "smem", a, b) for dtype in ("bf16", "fp16") for a in BOTH for b in BOTH),
    *((dtype, source, "K", b) for dtype in ("bf16",) for source in ("registers", "both")
      for b in BOTH),
    *((dtype, source, "K", "K") for dtype in ("e4m3", "e5m2", "fp32")
      for source in ("smem", "registers", "both")),
]  # fmt: skip
BLACKWELL = [
    *((dtype, "smem", a, b) for dtype in ("bf16", "e4m3", "fp32") for a in BOTH for b in BOTH),
    *((dtype, "tmem", "K", b) for dtype in ("fp16", "e5m2", "fp32") for b in BOTH),
]


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("dtype", "source", "a", "b"), HOPPER)
def test_a_wgmma_product_takes_every_operand(dtype: str, source: str, a: str, b: str) -> None:
    found, exact = result(HopperProduct, ProductConfig(source, a, b), dtype)
    assert torch.equal(found, exact)


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("dtype", "source", "a", "b"), BLACKWELL)
def test_a_umma_product_takes_every_operand(dtype: str, source: str, a: str, b: str) -> None:
    found, exact = result(BlackwellProduct, ProductConfig(source, a, b), dtype)
    assert torch.equal(found, exact)


@pytest.mark.parametrize("dtype", [cutlass.Float8E4M3FN, cutlass.Float32])
@pytest.mark.parametrize("side", ["a_major", "b_major"])
def test_wgmma_refuses_other_majors_than_hopper_has(dtype, side: str) -> None:
    mma = Wgmma(N, dtype, **{side: OperandMajorMode.MN})
    with pytest.raises(ValueError, match=re.escape("with K contiguous only")):
        mma.op(warpgroup.OperandSource.SMEM)


def test_a_kind_holds_32_bytes_of_k_an_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    # on a Hopper GPU the DSL makes no operation of Blackwell's unless it compiles for it
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "_arch", "sm_100a")
    kinds = (cutlass.BFloat16, 16), (cutlass.Float8E5M2, 32), (cutlass.Float32, 8)
    for dtype, k in kinds:
        assert Wgmma(N, dtype).k == Umma(128, N, dtype).k == k
        assert Umma(128, N, dtype).op(tcgen05.OperandSource.SMEM).shape_mnk == (128, N, k)
