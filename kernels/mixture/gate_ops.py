"""The gate between a mixture's two products in the store of the first, which keeps h, too."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Float32, Int32, cute

from cutex.compile import Argument, Operand
from cutex.device.epilogue.epilogue_ops import Fragment, Gate


@dataclass(frozen=True)
class KeptGate:
    """silu(h[:, 0::2]) * h[:, 1::2] of the rounded product h, which the backward pass needs and
    which is stored, too: a gate and the column that it gates are a word of it."""

    dtype: str
    halves = True  # as many columns are left

    def arguments(self) -> tuple[Argument, ...]:
        return (Operand("h", ("m", "pairs"), self.dtype),)

    def apply(self, x: Fragment, h: cute.Tensor) -> Fragment:
        x = apart(x)
        (rows, columns), kind = x.shape, h.element_type
        values = cute.make_rmem_tensor((2, columns // 2, rows), Float32)  # (V, C / 2, R)
        rounded = cute.make_rmem_tensor((2, columns // 2, rows), kind)
        for r in range(rows):
            for c in range(columns):
                values[c % 2, c // 2, r] = x.values[r, c]
        rounded.store(values.load().to(kind))
        values.store(rounded.load().to(Float32))
        words, mWords = cute.recast_tensor(rounded, Int32), cute.recast_tensor(h, Int32)
        for r in range(rows):
            for c in range(columns // 2):
                inside = (x.rows[r] < x.bounds[0]) & (x.columns[2 * c] < x.bounds[1])
                place = x.rows[r], x.columns[2 * c] // 2
                store_word(mWords, place, words[c + r * (columns // 2)], inside)
        layout = cute.make_layout((rows, columns), stride=(columns, 1))
        return Gate("silu").apply(x._replace(values=cute.make_tensor(values.iterator, layout)))


def apart(x: Fragment) -> Fragment:
    """x, of one gate for each of many rows (epilogue/sm90/paired_store.py), with coordinates of its
    own.

    NOTE: parts of a tile have the same rows, and ptxas would keep the addresses of all of them, in
    place of accumulators, if it could tell.
    """
    lane = cute.arch.lane_idx()
    first, column = (cute.arch.shuffle_sync(v, lane) for v in (x.rows[0], x.columns[0]))
    rows = tuple(first + i // 2 * 8 + i % 2 for i in range(len(x.rows)))
    return x._replace(rows=rows, columns=(column, column + 1))


@cute.jit
def store_word(mX: cute.Tensor, place: tuple[Int32, Int32], value: Int32, inside: Boolean) -> None:
    """Store `value` if it is `inside`."""
    if inside:
        mX[place] = value
