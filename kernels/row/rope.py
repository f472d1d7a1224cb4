"""Rotary position embedding: pairs of a head's elements rotated by position-dependent angles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Operand, Scalar
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
from cutex.kernels.row.kernel import ARCHS

THREADS = 256


@dataclass(frozen=True)
class RopeConfig:
    """Which elements are rotated, and how they are loaded."""

    interleaved: bool  # pairs are neighbours; else they are half of what turns apart
    table: str  # the dtype of cos and sin
    positions: str = ""  # the dtype of a position for each token; "": they count from `offset`
    in_place: bool = False
    width: int = 8  # elements of x that a thread loads at once, a power of two; of pairs at least 2
    align: int = 16  # bytes of which every such vector's place is a multiple
    table_align: int = 16  # the same of a vector's elements of cos and sin
    each: int = 1  # heads of a thread, a divisor of x's: elements of cos and sin are loaded once

    def why_not(self) -> str | None:
        if self.width < 1 + self.interleaved:
            return f"width={self.width}: a pair of neighbours is 2 elements"
        return None


class Rope:
    """y = x rotated: (a cos - s b sin, b cos + s a sin) for each pair (a, b), s = 1, or -1 for its
    gradient. Elements of a head past the rotated ones are copied.

    A thread rotates one vector of pairs, or copies one vector, of `each` heads of one token.
    """

    archs = ARCHS
    dtypes = ("bf16", "fp16", "fp32")
    name = "row_rope"

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        if reason := config.why_not():
            raise ValueError(reason)

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config

        def plain(name: str, sizes: tuple[str, ...], kind: str, last: int | None = -1) -> Operand:
            return Operand(name, sizes, kind, contiguous=last, aligned=False, whole=False)

        heads = "b", "t", "h", "d"
        made = [plain("x", heads, dtype)]
        if not c.in_place:
            made.append(plain("y", heads, dtype))
        made += [plain(name, ("s", "r"), c.table) for name in ("cos", "sin")]
        if c.positions:
            made.append(plain("positions", ("b", "t"), c.positions, None))
        return (*made, Scalar("offset", "int32"), Scalar("sign"))

    @cute.jit
    def __call__(self, mX, *rest) -> None:
        c = self.config
        *given, offset, sign, stream = rest
        mY, mCos, mSin, *positions = [mX, *given] if c.in_place else given
        vectors = self.turned(mCos)
        if cutlass.const_expr(not c.in_place):
            stays = cute.size(mX, mode=[3]) - 2 * cute.size(mCos, mode=[1])
            vectors += cute.ceil_div(stays, c.width)
        batch, tokens, heads = (cute.size(mX, mode=[i]) for i in range(3))
        sizes = vectors, heads // c.each, tokens, batch
        total = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        options = {"offset": offset, "sign": sign}
        if cutlass.const_expr(c.positions):
            options["positions"] = positions[0]
        self.kernel(mX, mY, mCos, mSin, options, sizes).launch(
            grid=(cute.ceil_div(total, THREADS), 1, 1),
            block=(THREADS, 1, 1),
            use_pdl=may_overlap(),
            stream=stream,
        )

    def turned(self, mCos: cute.Tensor) -> Int32:
        """The number of vectors of a head to rotate; where pairs are a head's two halves, those of
        the first half."""
        return cute.size(mCos, mode=[1]) * (1 + self.config.interleaved) // self.config.width

    @cute.kernel
    def kernel(self, mX, mY, mCos, mSin, options: dict[str, Any], sizes: tuple[Int32, ...]) -> None:
        c = self.config
        at = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        vectors, groups, tokens, batch = sizes
        vector, at = at % vectors, at // vectors
        group, at = at % groups, at // groups
        # NOTE: entries take turns, so that rows of cos and sin come from memory once
        # (docs/facts/rows.md#rows-rope-entries)
        entry, token = at % batch, at // batch
        wait_for_kernel_before()
        if token < tokens:
            heads = [group + i * groups for i in range(c.each)]
            gX, gY = ([m[entry, token, head, None] for head in heads] for m in (mX, mY))  # (D) each
            turned = self.turned(mCos)
            if vector < turned:
                position = Int32(token) + options["offset"]
                if cutlass.const_expr(c.positions):
                    position = Int32(options["positions"][entry, token])
                table = mCos[position, None], mSin[position, None]  # (R) each
                self.turn(gX, gY, table, vector, options["sign"])
            else:
                # after both halves
                at = (vector + turned * (1 - c.interleaved)) * c.width
                for x, y in zip(gX, gY, strict=True):
                    self.copy(x, y, at)

    @cute.jit
    def copy(self, gX: cute.Tensor, gY: cute.Tensor, at: Int32) -> None:
        """Copy the vector at `at`; the last vector of a head may extend past its end."""
        c = self.config
        if at + c.width <= cute.size(gX):
            rX = cute.make_rmem_tensor(c.width, gX.element_type)
            cute.autovec_copy(self.vector(gX, at, c.width, c.align), rX)
            cute.autovec_copy(rX, self.vector(gY, at, c.width, c.align))
        else:
            for i in cutlass.range_constexpr(c.width):
                if at + i < cute.size(gX):
                    gY[at + i] = gX[at + i]

    @cute.jit
    def turn(self, gX, gY, table, vector: Int32, sign: Float32) -> None:
        """Rotate the pairs of one vector of heads gX (D) by a row (R) of cos and of sin."""
        c = self.config
        pairs = cutlass.const_expr(c.width // 2 if c.interleaved else c.width)
        cos, sin = (self.loaded(t, vector * pairs, pairs, c.table_align) for t in table)  # (PAIR)
        sin = sign * sin
        places = [vector * c.width + cute.size(table[0]) * i for i in range(2 - c.interleaved)]
        # NOTE: all on their way before one is waited for
        vectors = [[self.raw(x, at, c.width, c.align) for at in places] for x in gX]
        for rX, y in zip(vectors, gY, strict=True):
            rotate(halves(rX, c.interleaved), cos, sin)
            for r, at in zip(rX, places, strict=True):
                cute.autovec_copy(r, self.vector(y, at, c.width, c.align))

    def loaded(self, gX: cute.Tensor, at: Int32, count: int, align: int) -> Any:
        """`count` elements of gX from `at` on, in fp32."""
        return self.raw(gX, at, count, align).load().to(Float32)

    def raw(self, gX: cute.Tensor, at: Int32, count: int, align: int) -> cute.Tensor:
        """The same in registers, as they are."""
        rX = cute.make_rmem_tensor(count, gX.element_type)
        cute.autovec_copy(self.vector(gX, at, count, align), rX)
        return rX

    def vector(self, gX: cute.Tensor, at: Int32, count: int, align: int) -> cute.Tensor:
        place = (gX.iterator + at).toint()
        p = cute.make_ptr(gX.element_type, place, cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(p, cute.make_layout(count))


def halves(rX: list[cute.Tensor], interleaved: bool) -> list[cute.Tensor]:
    """The first elements and the second ones of pairs in vectors of a head, (PAIR) each."""
    if not interleaved:
        return rX
    by_pairs = cute.make_tensor(rX[0].iterator, cute.make_layout((2, cute.size(rX[0]) // 2)))
    return [by_pairs[i, None] for i in range(2)]


def rotate(pairs: list[cute.Tensor], cos: Any, sin: Any) -> None:
    """Rotate pairs of elements, the first and the second ones (PAIR), in place."""
    a, b = (r.load().to(Float32) for r in pairs)
    for r, x in zip(pairs, (a * cos - b * sin, b * cos + a * sin), strict=True):
        r.store(x.to(r.element_type))
