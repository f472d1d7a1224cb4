"""The parts that every attention stage shares: operands, tensor maps, grid, and a CTA's own
tile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.compile import Operand, Scalar
from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.tma import TileLoads
from cutex.device.attention.block_info import Band, BlockInfo, Blocks
from cutex.device.attention.rows import tma_view
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.ladder import LadderConfig


class Out(NamedTuple):
    """The tensors that the kernel writes."""

    mO: cute.Tensor  # (batch, seqlen_q, heads, D)
    mLSE: cute.Tensor  # (batch, heads, seqlen_q) fp32


class Slots(NamedTuple):
    """The smem slots that TMA loads Q, K and V into."""

    sQ: cute.Tensor  # (64, D, WG * SLOT), or on Blackwell (128, D, TILE)
    sK: cute.Tensor  # (bN, D, SLOT)
    sV: cute.Tensor  # (bN, D, SLOT)


class Loads(NamedTuple):
    """The loads of one tile: Q by blocks of 64 rows, K and V by blocks of keys."""

    q: TileLoads
    k: TileLoads
    v: TileLoads


class Operands(NamedTuple):
    """The TMA operands Q, K and V, (seqlen, D, heads, batch) each."""

    q: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        return self.q.atom.value_type

    @property
    def seqlen_q(self) -> Int32:
        return Int32(cute.size(self.q.tma_tensor, mode=[0]))

    @property
    def seqlen_k(self) -> Int32:
        return Int32(cute.size(self.k.tma_tensor, mode=[0]))

    @property
    def heads_per_kv(self) -> Int32:
        """The number of query heads that share a head of K and V."""
        return cute.size(self.q.tma_tensor, mode=[2]) // cute.size(self.k.tma_tensor, mode=[2])

    @cute.jit
    def allocate(self, smem: SmemAllocator) -> Slots:
        return Slots(*(allocate_slots(smem, self.dtype, x.smem_layout) for x in self))

    @cute.jit
    def loads(self, slots: Slots, tile: WorkTile) -> Loads:
        head_kv = tile.head // self.heads_per_kv
        return Loads(
            row_blocks(self.q, slots.sQ, tile.head, tile.batch),
            row_blocks(self.k, slots.sK, head_kv, tile.batch),
            row_blocks(self.v, slots.sV, head_kv, tile.batch),
        )


@cute.jit
def partition(
    operand: cpasync.TmaInfo, sX: cute.Tensor, head: Int32, batch: Int32
) -> tuple[cute.Tensor, cute.Tensor]:
    """The slots of `sX` (bRows, D, SLOT) and the blocks of bRows rows of one head, as TMA moves
    them: (TMA, SLOT) and (TMA, RestRows)."""
    mX = operand.tma_tensor[None, None, head, batch]  # (seqlen, D)
    rows_d = (cute.size(sX, mode=[0]), cute.size(sX, mode=[1]))
    gX = cute.local_tile(mX, rows_d, (None, 0))  # (bRows, D, RestRows)
    whole = cute.make_layout(1)
    return cpasync.tma_partition(
        operand.atom, 0, whole, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )


@cute.jit
def row_blocks(operand: cpasync.TmaInfo, sX: cute.Tensor, head: Int32, batch: Int32) -> TileLoads:
    tXsX, tXgX = partition(operand, sX, head, batch)  # (TMA, SLOT), (TMA, RestRows)
    return TileLoads(operand.atom, tXgX, tXsX)


class Attention(ABC):
    """O = softmax(scale * Q K^T) V and its LSE. A stage defines `kernel`, `num_threads` and what it
    changes."""

    arch: ClassVar[str]
    number: ClassVar[int]
    q_rows: ClassVar[int]  # rows of a slot of Q
    min_stages: ClassVar[int] = 1  # slots that the rings need
    kernel: Any  # the device function: (operands, out, scale)

    def __init__(self, config: LadderConfig) -> None:
        if reason := config.why_not(None, arch_named(self.arch)):
            raise ValueError(reason)
        if config.num_stages < self.min_stages:
            raise ValueError(
                f"num_stages={config.num_stages}: {self.name} needs at least {self.min_stages}"
            )
        self.config = config

    @property
    def name(self) -> str:
        return f"{self.arch.rstrip('a').replace('_', '')}_attention_stage{self.number}"

    @property
    @abstractmethod
    def num_threads(self) -> int:
        """The number of threads in a CTA."""

    def operands(self, dtype: str) -> tuple[Operand | Scalar, ...]:
        """The arguments: q (batch, seqlen_q, heads, D), k and v (batch, seqlen_k, heads_kv, D), o
        as q, lse (batch, heads, seqlen_q) fp32, and scale."""
        q, k = ("b", "sq", "h", "d"), ("b", "sk", "hk", "d")
        shapes = (("q", q), ("k", k), ("v", k), ("o", q))
        lse = Operand("lse", ("b", "h", "sq"), "fp32", aligned=False, whole=False)
        return (*(Operand(name, sizes, dtype) for name, sizes in shapes), lse, Scalar("scale"))

    def slots(self, dtype: type[cutlass.Numeric], rows: int, num_slots: int) -> cute.ComposedLayout:
        """The smem layout (rows, D, SLOT), swizzled by 128 bytes."""
        return slots_layout(dtype, rows, self.config.head_dim, num_slots, swizzle=128)

    @cute.jit
    def load_operands(self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor) -> Operands:
        c = self.config
        q_slots = self.slots(mQ.element_type, self.q_rows, c.tile_m // self.q_rows * c.q_stages)
        kv_slots = self.slots(mK.element_type, c.tile_n, c.num_stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        return Operands(
            self.tma(load, mQ, q_slots), self.tma(load, mK, kv_slots), self.tma(load, mV, kv_slots)
        )

    @staticmethod
    def tma(op: Any, mX: cute.Tensor, layout: cute.ComposedLayout) -> cpasync.TmaInfo:
        rows_d = (cute.size(layout, mode=[0]), cute.size(layout, mode=[1]))
        view = tma_view(mX, pack=1, ragged=False)
        return cpasync.make_tiled_tma_atom(op, view, layout, rows_d)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scale: Float32,
        stream,
    ) -> None:
        operands = self.load_operands(mQ, mK, mV)
        batch, seqlen_q, heads, _ = mO.shape
        grid = (cute.ceil_div(seqlen_q, self.config.tile_m), heads, batch)
        self.kernel(operands, Out(mO, mLSE), scale).launch(
            grid=grid, block=(self.num_threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    # ---- on the device

    @property
    def band(self) -> Band:
        return Band(None, 0 if self.config.causal else None)

    @staticmethod
    def own_tile() -> WorkTile:
        """The tile of this CTA, in a grid of one tile per CTA."""
        m, head, batch = cute.arch.block_idx()
        return WorkTile(m, head=head, batch=batch)

    @cute.jit
    def n_blocks(self, operands: Operands, tile: WorkTile) -> Blocks:
        """The blocks of keys that `tile` touches."""
        c = self.config
        info = BlockInfo(c.tile_m, c.tile_n, self.band)
        return info.n_blocks(tile.m, operands.seqlen_q, operands.seqlen_k)
