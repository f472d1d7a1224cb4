"""The arguments of the decode kernel, in the order of its launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from cutex.compile import Argument, Operand, Scalar
from cutex.device.attention.block_info import Band, BlockInfo
from cutex.device.attention.seqlen_info import SeqlenInfo, Seqlens
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.splits import Splits
from cutex.kernels.attention.decode.workspace import Numbers, bounds_of
from cutex.schedulers.order import select

ALL_ROWS = 2**30  # of a block as what keys are walked over: all rows of a sequence
FEW_BLOCKS = 4  # of rows of a sequence and a head, of which each owns units


def arguments(config: DecodeConfig, dtype: str) -> tuple[Argument, ...]:
    """The arguments q, k, v, o, and those that `config` adds, in the order of KernelArgs'
    fields."""
    c = config
    q = ("tq", "h", "d") if c.varlen_q else ("b", "sq", "h", "d")
    k = ("pages", "page", "hk", "d") if c.page_size else ("bc", "sk", "hk", "d")
    shapes = {"q": q, "k": k, "v": (*k[:-1], "dv"), "o": (*q[:-1], "dv")}
    cache = "e4m3" if c.fp8 else dtype
    kinds = {"q": dtype, "k": cache, "v": cache, "o": dtype}
    found: list[Argument] = [Operand(name, shapes[name], kind) for name, kind in kinds.items()]
    vectors = {
        "lse": (c.lse, ("h", "tq") if c.varlen_q else ("b", "h", "sq"), "fp32"),
        "cu_seqlens_q": (c.varlen_q, ("b1",), "int32"),
        "seqused_k": (c.used_k, ("b",), "int32"),
        "page_table": (c.page_size > 0, ("b", "max_pages"), "int32"),
        "batch_idx": (c.batch_idx, ("b",), "int32"),
        "leftpad": (c.leftpad, ("b",), "int32"),
        "cu_seqlens_k_new": (c.varlen_new, ("b1",), "int32"),
        "sink": (c.sink, ("h",), "fp32"),
        "k_descale": (c.fp8, ("b", "hk"), "fp32"),
        "v_descale": (c.fp8, ("b", "hk"), "fp32"),
    }
    for name, (there, sizes, kind) in vectors.items():
        if there:
            found.append(Operand(name, sizes, kind, aligned=False, whole=False))
    if c.appended:
        new = ("tn", "hk") if c.varlen_new else ("b", "sn", "hk")
        found += [Operand("k_new", (*new, "d"), cache), Operand("v_new", (*new, "dv"), cache)]
    numbers = {
        "scale": (True, "fp32"),
        "softcap": (c.softcap, "fp32"),
        "lo": (c.window[0], "int32"),
        "hi": (c.window[1], "int32"),
        "max_seqlen_q": (c.varlen_q, "int32"),
        "num_splits": (True, "int32"),
    }
    found += [Scalar(name, kind) for name, (there, kind) in numbers.items() if there]
    sums, flags = (bounds_of(c, units_of, name) for name in ("sums", "flags"))
    found.append(Operand("sums", ("sums",), "fp32", whole=False, bounds_by=sums))
    found.append(Operand("flags", ("flags",), "int32", aligned=False, whole=False, bounds_by=flags))
    return tuple(found)


def units_of(config: DecodeConfig, numbers: Numbers) -> int:
    """The units of a launch with these sizes and counts."""
    c, heads = config, numbers["h"]
    batch = numbers["b1"] - 1 if c.varlen_q else numbers["b"]
    longest = numbers["max_seqlen_q"] if c.varlen_q else numbers["sq"]
    pack = heads // numbers["hk"] if c.packed else 1
    return batch * (heads // pack) * -(-longest * pack // c.tile_m)


class KernelArgs(NamedTuple):
    """The arguments of a kernel after q, k, v and o; None for those that its config does not
    have."""

    lse: Any = None  # (batch, heads, seqlen_q) or (heads, total_q)
    cu_seqlens_q: Any = None  # (batch + 1)
    seqused_k: Any = None  # (batch) keys of each sequence before the new ones
    page_table: Any = None  # (batch, max_pages)
    batch_idx: Any = None  # (batch) the cache's entry of each sequence
    leftpad: Any = None  # (batch) rows of a cache before a sequence's first key
    cu_seqlens_k_new: Any = None  # (batch + 1)
    sink: Any = None  # (heads)
    k_descale: Any = None  # (batch, heads_kv) what an e4m3 of 1 stands for
    v_descale: Any = None
    k_new: Any = None  # (batch, new keys, heads_kv, D), or packed: appended to the caches first
    v_new: Any = None
    k_cache: Any = None  # the caches, where the kernel appends to them or copies single rows
    v_cache: Any = None
    scale: Any = None
    softcap: Any = None
    lo: Any = None
    hi: Any = None
    max_seqlen_q: Any = None  # no sequence has more queries
    num_splits: Any = None  # parts of a unit; 0: as the number of CTAs wants them
    sums: Any = None  # fp32: O, then LSE, of each part of a unit (out.py)
    flags: Any = None  # one for each unit: parts that are written; 0 before and after a launch

    @staticmethod
    def of(config: DecodeConfig, values: tuple[Any, ...]) -> KernelArgs:
        names = [a.name for a in arguments(config, "bf16")[4:]]
        return KernelArgs(**dict(zip(names, values, strict=True)))

    def band(self, causal: bool) -> Band:
        return Band(self.lo, 0 if causal else self.hi)


class Sizes(NamedTuple):
    """The extents of a problem."""

    batch: Int32
    heads: Int32  # that own units: those of K and V or, not packed, of Q; each block of rows of
    # which, where there are few
    heads_per_kv: Int32  # owners of units that read one head of K and V
    team: Int32  # CTAs that take neighbouring heads at the same time (splits.py)
    pack: Int32  # query heads whose rows share a tile
    rows_q: Int32  # size of mode seqlen; packed, the rows of all sequences
    rows_k: Int32  # keys that a sequence has room for
    m_blocks: Int32  # blocks of packed rows of the longest sequence, if they own no units
    row_blocks: Int32  # blocks of packed rows that own units
    new_keys: Int32  # of each sequence after those that seqused_k counts; packed, of all

    @staticmethod
    def of(config: Any, mQ: cute.Tensor, mK: cute.Tensor, args: KernelArgs) -> Sizes:
        c = config
        at_q = 0 if c.varlen_q else 1
        rows_q, rows_k = cute.size(mQ, mode=[at_q]), cute.size(mK, mode=[1])
        heads, heads_kv = cute.size(mQ, mode=[at_q + 1]), cute.size(mK, mode=[2])
        batch = cute.size(mQ, mode=[0])
        if c.varlen_q:
            batch = cute.size(args.cu_seqlens_q, mode=[0]) - 1
        if c.page_size:
            rows_k = c.page_size * cute.size(args.page_table, mode=[1])
        longest = args.max_seqlen_q if c.varlen_q else rows_q
        pack = heads // heads_kv if c.packed else 1
        owners = heads // pack
        m_blocks = cute.ceil_div(longest * pack, c.tile_m)
        new = 0
        if c.appended:
            new = cute.size(args.k_new, mode=[0 if args.cu_seqlens_k_new is not None else 1])
        per_kv = owners // heads_kv
        row_blocks = Int32(1)
        if not c.varlen_q:  # NOTE: blocks of one head then read the same keys at the same time
            row_blocks = select(m_blocks <= FEW_BLOCKS, Int32(m_blocks), row_blocks)
        owners, m_blocks = owners * row_blocks, m_blocks // row_blocks
        team = Splits.team_of(Int32(owners), c.team)
        found = (batch, owners, per_kv, team, pack, rows_q, rows_k, m_blocks, row_blocks, new)
        return Sizes(*(Int32(x) for x in found))

    def known(self, config: Any) -> Sizes:
        """The same sizes for a kernel with a single block of rows, which makes the numbers of
        blocks constants: divisions by them disappear."""
        return self._replace(m_blocks=1, row_blocks=1) if config.one_block else self

    def block_info(self, config: Any, band: Band) -> BlockInfo:
        """The relation between the rows of an entry, which sees every key that any of them sees,
        and key blocks."""
        if config.one_block:
            return BlockInfo(ALL_ROWS, config.tile_n, band)
        return BlockInfo(config.tile_m * self.row_blocks, config.tile_n, band, self.pack)

    @property
    def entries(self) -> Int32:
        """The pairs of a sequence and a block of packed rows."""
        return self.batch * self.m_blocks

    @property
    def units(self) -> Int32:
        return self.entries * self.heads

    def owner(self, m_block: Int32, number: Int32) -> tuple[Int32, Int32]:
        """The block of rows and the head of owner `number` of units, of an entry of block
        `m_block`."""
        head = number // self.row_blocks
        return m_block * self.row_blocks + number - head * self.row_blocks, head

    def queries(self, args: KernelArgs, batch: Int32) -> SeqlenInfo:
        return Seqlens(self.rows_q, args.cu_seqlens_q).of(batch)

    def keys(self, args: KernelArgs, batch: Int32) -> Int32:
        """The number of keys of a sequence, limited to the room in its cache."""
        keys = self.rows_k
        if args.seqused_k is not None:
            keys = Int32(args.seqused_k[batch])
            if args.k_new is not None:
                keys += self.new_keys_of(args, batch)
            keys = cutlass.min(keys, self.rows_k)
        if args.leftpad is None:
            return keys
        return cutlass.max(keys - Int32(args.leftpad[batch]), 0)

    def new_keys_of(self, args: KernelArgs, batch: Int32) -> Int32:
        ends = args.cu_seqlens_k_new
        return self.new_keys if ends is None else Int32(ends[batch + 1]) - Int32(ends[batch])
