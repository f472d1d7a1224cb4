"""The arguments of the backward kernels, and the location of dQ's tiles in the workspace."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32

from cutex.compile import Argument, Operand, Scalar
from cutex.device.attention.block_info import Band, ceil_div
from cutex.device.attention.seqlen_info import SeqlenInfo, Seqlens
from cutex.kernels.attention.backward.spec import BackwardSpec


def tensor(config: BackwardSpec, name: str, dtype: str) -> Operand:
    """The tensor argument `name`."""
    c = config
    q = ("tq", "h") if c.varlen_q else ("b", "sq", "h")
    k = ("tk", "hk") if c.varlen_k else ("b", "sk", "hk")
    vectors = {
        "delta": (("h", "tq") if c.varlen_q else ("b", "h", "sq"), "fp32"),
        "lse": (("h", "tq") if c.varlen_q else ("b", "h", "sq"), "fp32"),
        "dlse": (("h", "tq") if c.varlen_q else ("b", "h", "sq"), "fp32"),
        "cu_seqlens_q": (("b1",), "int32"),
        "cu_seqlens_k": (("b1",), "int32"),
        "seqused_q": (("b",), "int32"),
        "seqused_k": (("b",), "int32"),
    }
    if name == "dlse":  # a gradient that is expanded has any strides
        return Operand(name, *vectors[name], contiguous=None, aligned=False, whole=False)
    if name == "turns":
        return Operand(name, ("tiles", "warps"), "int32", aligned=False, whole=False)
    if name == "ranks":
        return Operand(name, ("b1", "three"), "int32", aligned=False, whole=False)
    if name == "partials":
        return Operand(name, ("shares", "numbers"), "fp32")
    if name == "zeroed":
        return Operand(name, ("units",), "int32", aligned=False, whole=False)
    if name == "counter":
        return Operand(name, ("words",), "int32", aligned=False, whole=False)
    if name in vectors:
        return Operand(name, *vectors[name], aligned=False, whole=False)
    if name in ("stats", "dq_sums"):
        return Operand(name, ("tiles", name), "fp32")
    rows = q if name in ("q", "o", "do", "dq") else k
    width = "dv" if name in ("v", "o", "do", "dv") else "d"
    return Operand(name, (*rows, width), dtype)


def arguments(config: BackwardSpec, dtype: str) -> tuple[Argument, ...]:
    """The arguments for the fields of Tensors, and for those fields of KernelArgs that `config`
    has."""
    c = config
    found: list[Argument] = [tensor(c, name, dtype) for name in Tensors._fields]
    present = {
        "turns": c.deterministic,
        "counter": c.counted or c.head_parts or c.last_parts,
        "zeroed": c.late_zeros,
        "partials": c.spread or c.head_parts or c.last_parts,
        "ranks": c.ranked,
        "dlse": c.dlse,
        "delta": c.sink,
        "cu_seqlens_q": c.varlen_q,
        "cu_seqlens_k": c.varlen_k,
        "seqused_q": c.used_q,
        "seqused_k": c.used_k,
    }
    found += [tensor(c, name, dtype) for name, there in present.items() if there]
    numbers = {
        "scale": (True, "fp32"),
        "softcap": (c.softcap, "fp32"),
        "lo": (c.window[0], "int32"),
        "hi": (c.window[1], "int32"),
        "max_seqlen_q": (c.varlen_q, "int32"),
        "max_seqlen_k": (c.varlen_k, "int32"),
        "head_parts": (c.head_parts, "int32"),
        "query_parts": (c.head_parts or c.last_parts, "int32"),
        "whole": (c.last_parts, "int32"),
    }
    found += [Scalar(name, kind) for name, (there, kind) in numbers.items() if there]
    return tuple(found)


class Tensors(NamedTuple):
    """The first arguments: the inputs, the gradients, and what the kernels pass to each other."""

    q: Any  # (batch, seqlen_q, heads, D) or (total_q, heads, D)
    k: Any
    v: Any
    o: Any
    do: Any
    lse: Any  # (batch, heads, seqlen_q) or (heads, total_q)
    dq: Any
    dk: Any
    dv: Any
    stats: Any  # (tiles, 2 * bM) LSE in powers of two, then delta, of the rows of a tile
    dq_sums: Any  # (tiles, bM * D)


class KernelArgs(NamedTuple):
    """The arguments after Tensors; None for those that the config does not have."""

    turns: Any = None  # (tiles, parts) how many key blocks have added to a warp's part of dQ's tile
    # (2), of which the first is 0 before and after; then one for each warp of `partials`, as well
    counter: Any = None
    zeroed: Any = None  # (batch * heads_kv) how many shares of a unit's sums of dQ are zeroed
    # (shares, bN * (D + DV)) dK and dV of a front part of a tile of keys, or of one of HeadParts
    partials: Any = None
    # (batch + 1, 3) by rank, the longest first: a sequence, and the blocks of keys of those before;
    # by sequence: its rank
    ranks: Any = None
    dlse: Any = None  # (batch, heads, seqlen_q) or (heads, total_q)
    delta: Any = None  # the same
    cu_seqlens_q: Any = None  # (batch + 1)
    cu_seqlens_k: Any = None
    seqused_q: Any = None  # (batch)
    seqused_k: Any = None
    scale: Any = None
    softcap: Any = None
    lo: Any = None
    hi: Any = None
    max_seqlen_q: Any = None  # no sequence is longer
    max_seqlen_k: Any = None
    head_parts: Any = None  # that the work of each head of K and V is divided into
    query_parts: Any = None  # of these, those that have the same query heads
    whole: Any = None  # tiles of keys, those of a cluster counting as one, before those divided

    @staticmethod
    def of(config: BackwardSpec, values: tuple[Any, ...]) -> KernelArgs:
        rest = [a.name for a in arguments(config, "bf16")[len(Tensors._fields) :]]
        return KernelArgs(**dict(zip(rest, values, strict=True)))

    def band(self, causal: bool) -> Band:
        return Band(self.lo, 0 if causal else self.hi)


class RowTiles(NamedTuple):
    """The location of each sequence's and head's tiles of tile_m queries in LSE, delta and the sums
    of dQ. Rows past a sequence's end are padding, so that a tile belongs to one sequence.

    For packed sequences, sequence b, with `offset` rows before it, has the tiles from offset //
    tile_m + b on, which leaves it enough of them.
    """

    heads: Int32
    per_head: Int32  # tiles of one head: of one batch entry or, packed, of all sequences

    @staticmethod
    def of(config: BackwardSpec, heads: Int32, rows: Int32, batch: Int32) -> RowTiles:
        """The tiles of `rows` queries of a batch entry, or of a whole packed batch."""
        tile_m = config.tile_m
        per_head = rows // tile_m + batch if config.varlen_q else ceil_div(rows, tile_m)
        return RowTiles(heads, per_head)

    def tile(self, config: BackwardSpec, head: Int32, batch: Int32, seqlen: SeqlenInfo) -> Int32:
        """The first tile of one head of one sequence."""
        if config.varlen_q:
            return head * self.per_head + seqlen.offset // config.tile_m + batch
        return (batch * self.heads + head) * self.per_head


def queries(args: KernelArgs, rows: Int32) -> Seqlens:
    return Seqlens(rows, args.cu_seqlens_q, args.seqused_q)


def keys(args: KernelArgs, rows: Int32) -> Seqlens:
    return Seqlens(rows, args.cu_seqlens_k, args.seqused_k)
