"""The arguments of the MLA decode kernel, in the order of its launch."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from cutex.compile import Argument, Operand, Scalar
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.decode.workspace import Numbers, bounds_of
from cutex.kernels.attention.mla.config import MlaConfig


def arguments(config: MlaConfig, dtype: str) -> tuple[Argument, ...]:
    """The arguments q, kv, o, and the following ones by the names of KernelArgs' fields. In q, the
    heads of all tokens are contiguous."""
    c = config
    kv = ("pages", "page", "hk", "d") if c.page_size else ("b", "sk", "hk", "d")
    found: list[Argument] = [
        Operand("q", ("b", "sq", "h", "d"), dtype),
        Operand("kv", kv, dtype),
        Operand("o", ("b", "sq", "h", "dv"), dtype),
    ]
    vectors = {
        "lse": (c.lse, ("b", "h", "sq"), "fp32"),
        "seqused_k": (c.lengths, ("b",), "int32"),
        "page_table": (c.page_size > 0, ("b", "max_pages"), "int32"),
    }
    for name, (there, sizes, kind) in vectors.items():
        if there:
            found.append(Operand(name, sizes, kind, aligned=False, whole=False))
    found += [Scalar("scale"), Scalar("num_splits", "int32")]
    sums, flags = (bounds_of(c, units_of, name) for name in ("sums", "flags"))
    found.append(Operand("sums", ("sums",), "fp32", whole=False, bounds_by=sums))
    if not c.combined:
        found.append(
            Operand("flags", ("flags",), "int32", aligned=False, whole=False, bounds_by=flags)
        )
    return tuple(found)


def units_of(config: MlaConfig, numbers: Numbers) -> int:
    """The units of a launch with these sizes."""
    return numbers["b"] * -(-numbers["sq"] * numbers["h"] // config.tile_m)


def args_of(config: MlaConfig, values: tuple[Any, ...]) -> KernelArgs:
    """The arguments behind q, kv and o."""
    names = [a.name for a in arguments(config, "bf16")[3:]]
    return KernelArgs(**dict(zip(names, values, strict=True)))


def rows_of_q(mQ: cute.Tensor) -> cute.Tensor:
    """mQ (batch, tokens, heads, D), with the heads of all tokens contiguous, as (rows, D,
    batch)."""
    batch, tokens, heads, d = mQ.shape
    shape, stride = (tokens * heads, d, batch), (mQ.stride[2], mQ.stride[3], mQ.stride[0])
    return cute.make_tensor(mQ.iterator, cute.make_layout(shape, stride=stride))


def sizes_of(config: MlaConfig, mQ: cute.Tensor, mKV: cute.Tensor, args: KernelArgs) -> Sizes:
    """The extents of a problem. Blocks of rows own units as heads do elsewhere: all see the same
    key blocks, some only masked, so that CTAs with neighbouring ones process the same keys."""
    sizes = Sizes.of(config, mQ, mKV, args)
    owners = sizes.heads * sizes.m_blocks
    return sizes._replace(heads=owners, m_blocks=Int32(1), team=Int32(config.team))


def blocks_of_rows(sizes: Sizes, tile_m: int) -> Int32:
    """The blocks of rows of a sequence and a head of keys."""
    return cute.ceil_div(sizes.rows_q * sizes.pack, tile_m)
