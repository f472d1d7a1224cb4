"""The arguments of an attention kernel, in the order of its launch, the same on every arch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cutlass import Int32, cute

from cutex.compile import Argument, Operand, Scalar
from cutex.device.attention.block_info import Band
from cutex.device.attention.seqlen_info import Seqlens
from cutex.kernels.attention.spec import AttentionSpec


def arguments(
    spec: AttentionSpec, dtype: str, counter: bool, parts: bool = False
) -> tuple[Argument, ...]:
    """The arguments q, k, v, o, and those that `spec` adds, in the order of KernelArgs' fields;
    with a `counter`, if one hands out the tiles, and `parts`, if some are cut."""
    c = spec
    q = ("tq", "h", "d") if c.varlen_q else ("b", "sq", "h", "d")
    k = ("tk", "hk", "d") if c.varlen_k else ("b", "sk", "hk", "d")
    k = ("pages", "page", "hk", "d") if c.page_size else k
    shapes = {"q": q, "k": k, "v": (*k[:-1], "dv"), "o": (*q[:-1], "dv")}
    found: list[Argument] = [Operand(name, sizes, dtype) for name, sizes in shapes.items()]

    def vector(there: bool, name: str, sizes: tuple[str, ...], kind: str) -> None:
        if there:
            found.append(Operand(name, sizes, kind, aligned=False, whole=False))

    def scalar(there: bool, name: str, kind: str) -> None:
        if there:
            found.append(Scalar(name, kind))

    vector(c.lse, "lse", ("h", "tq") if c.varlen_q else ("b", "h", "sq"), "fp32")
    vector(c.varlen_q, "cu_seqlens_q", ("b1",), "int32")
    vector(c.varlen_k, "cu_seqlens_k", ("b1",), "int32")
    vector(c.used_q, "seqused_q", ("b",), "int32")
    vector(c.used_k, "seqused_k", ("b",), "int32")
    vector(c.page_size > 0, "page_table", ("b", "max_pages"), "int32")
    vector(c.sink, "sink", ("h",), "fp32")
    if c.alibi:
        found.append(Operand("slopes", ("b", "h"), "fp32", None, aligned=False, whole=False))
    vector(counter, "counter", ("words",), "int32")
    if parts:
        found.append(Operand("parts", ("numbers",), "fp32"))
    scalar(True, "scale", "fp32")
    scalar(c.softcap, "softcap", "fp32")
    scalar(c.window[0], "lo", "int32")
    scalar(c.window[1], "hi", "int32")
    scalar(c.varlen_q, "max_seqlen_q", "int32")
    return tuple(found)


class KernelArgs(NamedTuple):
    """The arguments of a kernel after q, k, v and o; None for those that it does not have."""

    lse: Any = None  # (batch, heads, seqlen_q) or (heads, total_q)
    cu_seqlens_q: Any = None  # (batch + 1)
    cu_seqlens_k: Any = None
    seqused_q: Any = None  # (batch)
    seqused_k: Any = None
    page_table: Any = None  # (batch, max_pages)
    sink: Any = None  # (heads)
    slopes: Any = None  # (batch, heads) of ALiBi
    # (2): tiles handed out; then one for each warp of `parts`; 0 before and after a launch
    counter: Any = None
    parts: Any = None  # what CTAs have of tiles that others complete, any values before
    scale: Any = None
    softcap: Any = None
    lo: Any = None
    hi: Any = None
    max_seqlen_q: Any = None

    @staticmethod
    def of(given: Sequence[Argument], values: tuple[Any, ...]) -> KernelArgs:
        """The `values` of the arguments `given`, without q, k, v and o."""
        names = [a.name for a in given[4:]]
        return KernelArgs(**dict(zip(names, values, strict=True)))

    def band(self, causal: bool) -> Band:
        return Band(self.lo, 0 if causal else self.hi)


class Sizes(NamedTuple):
    """The extents of a problem."""

    batch: Int32
    heads: Int32  # query heads
    heads_kv: Int32
    rows_q: Int32  # size of mode seqlen; of a ragged side, the rows of all sequences
    rows_k: Int32
    longest_q: Int32  # no sequence has more queries

    @staticmethod
    def of(spec: AttentionSpec, mQ: cute.Tensor, mK: cute.Tensor, args: KernelArgs) -> Sizes:
        c = spec
        at_q, at_k = (0 if c.varlen_q else 1), (0 if c.varlen_k else 1)
        if c.varlen_q:
            batch = cute.size(args.cu_seqlens_q, mode=[0]) - 1
        else:
            batch = cute.size(mQ, mode=[0])
        rows_q, rows_k = cute.size(mQ, mode=[at_q]), cute.size(mK, mode=[at_k])
        if c.page_size:
            rows_k = c.page_size * cute.size(args.page_table, mode=[1])
        longest = args.max_seqlen_q if c.varlen_q else rows_q
        heads, heads_kv = cute.size(mQ, mode=[at_q + 1]), cute.size(mK, mode=[at_k + 1])
        return Sizes(*(Int32(x) for x in (batch, heads, heads_kv, rows_q, rows_k, longest)))

    def heads_per_kv(self, pack: int) -> Int32:
        """The number of heads, or of groups of `pack` packed heads, that read one head of K and
        V."""
        return self.heads // pack // self.heads_kv

    def seqlens(self, args: KernelArgs) -> tuple[Seqlens, Seqlens]:
        """The lengths of queries and of keys."""
        return (
            Seqlens(self.rows_q, args.cu_seqlens_q, args.seqused_q),
            Seqlens(self.rows_k, args.cu_seqlens_k, args.seqused_k),
        )
