"""C = A @ B^T in Triton, in four steps: tiles, tuned tiles, their order, TMA and persistence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

Launch = Callable[..., Any]
BAND = 8  # tiles along M of a band

TILES = [
    triton.Config({"BM": m, "BN": n, "BK": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (128, 128, 32, 4, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 256, 64, 4, 3),
        (64, 64, 64, 4, 5),
    )
]  # fmt: skip


@triton.jit
def tile_of(index, m, n, BM: tl.constexpr, BN: tl.constexpr, BAND: tl.constexpr):
    """The place of a tile: along N first, or in bands of BAND tiles along M."""
    along_m, along_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    if BAND == 0:
        return index // along_n, index % along_n
    band = index // (BAND * along_n)
    width = min(BAND, along_m - band * BAND)
    place = index % (BAND * along_n)
    return band * BAND + place % width, place // width


@triton.jit
def product_of_tile(
    a, b, c, m, n, k, lda, ldb, ldc,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One program computes one tile, its operands loaded by pointers."""
    tile_m, tile_n = tile_of(tl.program_id(0), m, n, BM, BN, BAND)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    # rows behind the last are loaded from the last: their products are not stored
    a_at = a + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * lda + ks[None, :]
    b_at = b + tl.minimum(columns, n - 1).to(tl.int64)[:, None] * ldb + ks[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        inside = (start + ks < k)[None, :]
        x = tl.load(a_at + start, mask=inside, other=0.0)
        y = tl.load(b_at + start, mask=inside, other=0.0)
        total = tl.dot(x, y.T, total)
    c_at = c + rows.to(tl.int64)[:, None] * ldc + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(c_at, total.to(c.dtype.element_ty), mask=inside)


def _boxes(given: dict[str, Any]) -> None:
    for name, rows, columns in (("a", "BM", "BK"), ("b", "BN", "BK"), ("c", "BM", "BN")):
        given[name].block_shape = [given[rows], given[columns]]


@triton.autotune(
    [
        triton.Config({"BM": m, "BN": n, "BK": 64}, num_warps=8, num_stages=stages, pre_hook=_boxes)
        for m, n, stages in ((128, 256, 3), (128, 256, 4), (256, 128, 3), (128, 128, 4))
    ],
    key=["m", "n", "k"],
)
@triton.jit
def products_by_tma(
    a, b, c, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """As many programs as SMs walk over the tiles, in bands, their operands loaded by TMA."""
    tiles = tl.cdiv(m, BM) * tl.cdiv(n, BN)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_of(index, m, n, BM, BN, BAND)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(0, k, BK):
            x, y = a.load([tile_m * BM, start]), b.load([tile_n * BN, start])
            total = tl.dot(x, y.T, total)
        c.store([tile_m * BM, tile_n * BN], total.to(c.dtype))


tuned_products = triton.autotune(TILES, key=["m", "n", "k", "BAND"])(product_of_tile)


def tiles(problem: Any) -> Launch:
    """Tiles of 128x128, 32 of K at a time, one after the other along N."""
    fixed = {"BM": 128, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 3}
    return _by_pointers(product_of_tile, 0, fixed)


def tuned(problem: Any) -> Launch:
    """The fastest of nine tiles."""
    return _by_pointers(tuned_products, 0, {})


def order(problem: Any) -> Launch:
    """The same, in bands, so that programs of one time share more of A and B in L2."""
    return _by_pointers(tuned_products, BAND, {})


def tma(problem: Any) -> Launch:
    """The same, by TMA, in a persistent grid."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        raise ValueError("tensor descriptors are compared on GPUs that have TMA, from Hopper on")
    sms: list[int] = []

    def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        if not sms:
            where = a.is_cuda and torch.cuda.get_device_properties(a.device)
            sms.append(where.multi_processor_count if where else 3)
        m, n, k = a.shape[0], b.shape[0], a.shape[1]
        boxes = (TensorDescriptor.from_tensor(x, [1, 1]) for x in (a, b, c))
        products_by_tma[lambda c: (min(sms[0], _count(m, n, c)),)](*boxes, m, n, k, BAND=BAND)

    return launch


def _by_pointers(kernel: Any, band: int, fixed: dict[str, int]) -> Launch:
    def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        m, n, k = a.shape[0], b.shape[0], a.shape[1]
        strides = a.stride(0), b.stride(0), c.stride(0)
        kernel[lambda c: (_count(m, n, c),)](a, b, c, m, n, k, *strides, BAND=band, **fixed)

    return launch


def _count(m: int, n: int, config: dict[str, int]) -> int:
    return triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"])
