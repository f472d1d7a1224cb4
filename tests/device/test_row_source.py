"""Sources of rows: their boxes on the host, their tiles in kernels, with poison beside the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from torch import Tensor

from cutex.compile import Operand, Scalar, compile
from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.tma import AbLoads, load_operand, tile_loads
from cutex.device.atoms.wgmma import Wgmma, wgmma
from cutex.device.pipeline import Barrier, publish_barriers
from cutex.device.row_source import (
    BoxLoads,
    DenseRows,
    GatheredRows,
    PagedRows,
    RowSource,
    box_operand,
    page_pitch,
    swizzle_bytes,
    why_not_pages,
)
from cutex.sim import simulate

KINDS = ("dense", "paged", "gathered")


def rows_of(source: RowSource, tile_rows: int, tiles: int) -> list[int | None]:
    """The place in memory of each row of the first tiles; None for those that do not count."""
    size, found = source.box_rows(tile_rows), []
    assert tile_rows % size == 0
    for row in range(0, tiles * tile_rows, size):
        box = source.box(row, size)
        assert 0 <= box.count <= size
        found += [box.offset + i if i < box.count else None for i in range(size)]
    return found


@pytest.mark.sweep(5)
@pytest.mark.parametrize("length", [1, 7, 16, 33, 64])
@pytest.mark.parametrize("page_size", [1, 2, 8, 12, 16, 24, 48, 64, 128])
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_boxes_hold_the_rows_of_a_sequence_in_order(tile_rows, page_size, length):
    pages = -(-length // page_size)
    table = [(7 * i + 3) % 101 for i in range(pages)]
    index = [(11 * i + 5) % 67 for i in range(length)]
    beyond = [None] * (2 * 64 - length)
    paged = [table[i // page_size] * 130 + i % page_size for i in range(length)]
    sources: list[tuple[RowSource, list[int]]] = [
        (DenseRows(9, length), [9 + i for i in range(length)]),
        (PagedRows(table, length, page_size, 130), paged),
        (GatheredRows(index, length), index),
    ]
    for source, rows in sources:
        assert rows_of(source, tile_rows, 128 // tile_rows) == [*rows, *beyond]


def test_a_page_is_loaded_at_once_where_it_is_of_whole_swizzle_atoms():
    def box_rows(page_size: int) -> int:
        return PagedRows([0], 1, page_size, page_size).box_rows(64)

    assert [box_rows(n) for n in (1, 4, 8, 16, 24, 64, 128, 192)] == [1, 1, 8, 16, 8, 64, 64, 64]


def test_pages_whose_rows_make_no_list_are_refused():
    pages = torch.empty(5, 2, 16, 4, 64)  # K and V in turn
    for x in (pages[:, 0], pages[:, 1], pages.transpose(2, 3)[:, 0].transpose(1, 2)):
        assert why_not_pages(x.stride()) is None
    apart = torch.empty(5, 16 * 256 + 8)[:, : 16 * 256].view(5, 16, 4, 64)
    assert "4104 elements apart, no multiple of its rows' 256" in (
        why_not_pages(apart.stride()) or ""
    )
    assert "rows' 0" in (why_not_pages(pages[:, 0, :1].expand(5, 16, 4, 64).stride()) or "")


@dataclass(frozen=True)
class CopyConfig:
    kind: str
    tile: tuple[int, int]
    page_size: int = 1


class Copy:
    """CTA (i, h) copies tile i of head h of a source's rows through smem to mOut (rows, heads, D).

    mX is (pages, page size, heads, D), or for the other kinds (rows, heads, D).
    """

    dtypes = ("bf16", "fp32")

    def __init__(self, config: CopyConfig, arch: str) -> None:
        self.config, self.arch = config, arch

    @property
    def name(self) -> str:
        return f"{self.arch.rstrip('a').replace('_', '')}_row_source_copy"

    def operands(self, dtype: str) -> tuple[Operand | Scalar, ...]:
        sizes = ("pages", "size") if self.config.kind == "paged" else ("rows",)
        return (
            Operand("mX", (*sizes, "h", "d"), dtype),
            Operand("mOut", ("r", "h", "d"), dtype),
            Operand("places", ("p",), "int32", aligned=False, whole=False),
            Scalar("length", "int32"),
        )

    def source(self, places: cute.Tensor, length: Int32, pitch: Int32) -> RowSource:
        c = self.config
        if c.kind == "dense":
            return DenseRows(places[0], length)
        if c.kind == "gathered":
            return GatheredRows(places, length)
        return PagedRows(places, length, c.page_size, pitch)

    @cute.jit
    def __call__(
        self, mX: cute.Tensor, mOut: cute.Tensor, places: cute.Tensor, length: Int32, stream
    ) -> None:
        pitch = Int32(0)
        if cutlass.const_expr(self.config.kind == "paged"):
            pitch = page_pitch(mX)
        rows = self.source(places, length, pitch).box_rows(self.config.tile[0])
        x = box_operand(mX, self.config.tile, rows)
        grid = cute.ceil_div(mOut.shape[0], self.config.tile[0]), mOut.shape[1], 1
        self.kernel(x, mOut, places, length, pitch).launch(
            grid=grid, block=(64, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cpasync.TmaInfo,
        mOut: cute.Tensor,
        places: cute.Tensor,
        length: Int32,
        pitch: Int32,
    ) -> None:
        rows, columns = self.config.tile
        dtype = mOut.element_type
        smem = SmemAllocator()
        swizzle = swizzle_bytes(columns * dtype.width // 8)
        sX = allocate_slots(smem, dtype, slots_layout(dtype, rows, columns, 2, swizzle))
        loaded = Barrier.allocate(smem, "loaded", arrivals=1)
        publish_barriers([loaded])
        tile, head, _ = cute.arch.block_idx()
        if cute.arch.warp_idx() == 1:
            with cute.arch.elect_one():
                loaded.arrive_expecting(rows * columns * dtype.width // 8)
            source = self.source(places, length, pitch)
            BoxLoads(x, source, sX, head).load(tile, Int32(1), loaded[0])
        loaded.wait(0)
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(thread, rows * columns, 64, unroll=1):
            row = tile * rows + i // columns
            if row < mOut.shape[0]:
                mOut[row, head, i % columns] = sX[i // columns, i % columns, 1]


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan")).to(dtype)


def copied(config: CopyConfig, arch: str, length: int, dtype: str = "bf16", fused: bool = False):
    """What the kernel copies, and the rows with zeros behind them; all else in memory is NaN."""
    heads, (tile, columns) = 3, config.tile
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    rows = torch.randn(length, heads, columns).to(kind)
    if config.kind == "paged":
        size = config.page_size
        pages = -(-length // size)
        places = torch.randperm(pages + 3)[:pages].to(torch.int32)
        mX = poisoned(pages + 3, 2, size, heads, columns, dtype=kind)[:, 1]
        mX = mX if fused else mX.clone(memory_format=torch.contiguous_format)
        for i in range(length):
            mX[places[i // size], i % size] = rows[i]
    else:
        places = torch.randperm(length + 9)[:length].to(torch.int32)
        if config.kind == "dense":
            places = torch.arange(length, dtype=torch.int32) + 5
        mX = poisoned(length + 9, heads, columns, dtype=kind)
        mX[places.long()] = rows
    total = -(-length // tile) * tile + tile  # the last tile has no row
    out = poisoned(total, heads, columns, dtype=kind)
    report = simulate(compile(Copy(config, arch), dtype, arch), mX, out, places, length)
    assert not report.findings, "\n".join(map(str, report.findings))
    return out, torch.cat([rows, torch.zeros(total - length, heads, columns, dtype=kind)])


CASES: dict[str, tuple[CopyConfig, int]] = {
    "dense": (CopyConfig("dense", (64, 64)), 100),
    "dense, two columns": (CopyConfig("dense", (32, 128)), 33),
    "pages of a tile": (CopyConfig("paged", (64, 64), 64), 130),
    "pages of two tiles": (CopyConfig("paged", (64, 128), 128), 200),
    "pages of a quarter": (CopyConfig("paged", (64, 64), 16), 70),
    "small pages, wide rows": (CopyConfig("paged", (64, 192), 8), 61),
    "pages that tiles cut": (CopyConfig("paged", (64, 64), 24), 70),
    "pages of 4 rows": (CopyConfig("paged", (32, 64), 4), 37),
    "single rows in pages": (CopyConfig("paged", (32, 128), 1), 33),
    "narrow rows": (CopyConfig("paged", (64, 96), 16), 50),
    "gathered": (CopyConfig("gathered", (64, 64), 1), 70),
    "gathered, wide rows": (CopyConfig("gathered", (32, 128), 1), 1),
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", CASES)
def test_tiles_hold_the_rows_of_their_source_and_zeros_behind_them(case: str, arch: str) -> None:
    out, exact = copied(CASES[case][0], arch, CASES[case][1])
    assert torch.equal(out, exact)


def test_pages_of_k_and_v_in_turn_and_of_fp32_are_loaded_alike() -> None:
    out, exact = copied(CopyConfig("paged", (64, 32), 16), "sm_90a", 45, "fp32", fused=True)
    assert torch.equal(out, exact)


# ---- A of a GEMM by its index, as the rows of an expert


@dataclass(frozen=True)
class GatherGemmConfig:
    tile_n: int = 64


class GatherGemm:
    """mC (M, N) = A[index] B^T: a CTA computes 64 rows of A, gathered, over all of K."""

    arch = "sm_90a"
    name = "sm90_gather_gemm_test"
    dtypes = ("bf16",)
    TILE_M, TILE_K = 64, 64

    def __init__(self, config: GatherGemmConfig) -> None:
        self.config = config

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        return (
            Operand("mA", ("rows", "k"), dtype),
            Operand("mB", ("n", "k"), dtype),
            Operand("mC", ("m", "n"), "fp32"),
            Operand("index", ("m",), "int32", aligned=False, whole=False),
        )

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, index: cute.Tensor, stream
    ) -> None:
        a = box_operand(mA, (self.TILE_M, self.TILE_K), 1)
        slots = slots_layout(mB.element_type, self.config.tile_n, self.TILE_K, 1, 128)
        grid = *cute.ceil_div(mC.shape, (self.TILE_M, self.config.tile_n)), 1
        self.kernel(a, load_operand(mB, slots), mC, index).launch(
            grid=grid, block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor, index: cute.Tensor
    ) -> None:
        smem, dtype, tile_n = SmemAllocator(), b.atom.value_type, self.config.tile_n
        slots = slots_layout(dtype, self.TILE_M, self.TILE_K, 1, 128)
        sA = allocate_slots(smem, dtype, slots)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN, bK, SLOT)
        loaded = Barrier.allocate(smem, "loaded", arrivals=1)
        publish_barriers([loaded])
        m, n, _ = cute.arch.block_idx()
        source = GatheredRows(index, cute.size(index, mode=[0]))
        loads = AbLoads(BoxLoads(a, source, sA).of(m), tile_loads(b, sB, n))
        mma = wgmma(Wgmma(tile_n, dtype), sA, sB)
        for k_tile in cutlass.range(loads.num_k_tiles, unroll=1):
            if cute.arch.warp_idx() == 0:
                with cute.arch.elect_one():
                    loaded.arrive_expecting((self.TILE_M + tile_n) * self.TILE_K * 2)
                loads.load(k_tile, Int32(0), loaded[0])
            loaded.wait(k_tile % 2)
            mma.issue(0, accumulate=k_tile > 0)
            warpgroup.wait_group(0)
            cute.arch.sync_threads()
        thread, _, _ = cute.arch.thread_idx()
        thr_mma = mma.mma.tiled().get_slice(thread)
        tile, at = (self.TILE_M, tile_n), (m, n)
        tCgC = thr_mma.partition_C(cute.local_tile(mC, tile, at))  # (MMA, MMA_M, MMA_N)
        cC = cute.local_tile(cute.make_identity_tensor(mC.shape), tile, at)
        tCcC = thr_mma.partition_C(cC)  # (MMA, MMA_M, MMA_N)
        for i in cutlass.range(cute.size(tCcC), unroll_full=True):
            if cute.elem_less(tCcC[i], mC.shape):
                tCgC[i] = mma.acc[i]


def test_a_gemm_reads_the_rows_of_a_that_its_index_says() -> None:
    m, n, k = 100, 64, 200
    a, b = torch.full((300, k), float("nan")), torch.randint(-3, 4, (n, k)).float()
    index = torch.randperm(300)[:m]
    a[index] = torch.randint(-3, 4, (m, k)).float()
    c = torch.full((m, n), float("nan"))
    compiled: Any = compile(GatherGemm(GatherGemmConfig()), "bf16", "sm_90a")
    report = simulate(compiled, a.bfloat16(), b.bfloat16(), c, index.to(torch.int32))
    assert not report.findings, "\n".join(map(str, report.findings))
    assert torch.equal(c, a[index] @ b.T)
