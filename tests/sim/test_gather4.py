"""Copies of four rows (PTX ISA 9.7.9.27, .tile::gather4 and .tile::scatter4) against their
definition, element by element: a box of one row at each of four places of a matrix, one after the
other in shared memory, where the swizzle applies to all four rows together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from copies import BYTES, DONE, DUMP, LOAD, WAIT, Copy, Tensor, run
from ptx_kernel import simulate_ptx

from cutex.sim.errors import BadOperand, Hazards, UnknownInstruction

ROWS = [(5, 1, 8, 3), (0, 1, 2, 3), (7, 7, 2, 7), (4, -1, 9, 0), (-3, 9, 100, -1)]
GATHER = LOAD.replace(".tile.", ".tile::gather4.")
SCATTER = "global.shared::cta.tile::scatter4.bulk_group"


@dataclass
class FourRows(Copy):
    """A copy of four rows; ``at``: a column and four rows."""

    def elements(self) -> list[tuple[np.ndarray, int | None]]:
        out = []
        size = len(Copy.elements(Copy(self.tensor, self.box, self.at[:2]))) * 2
        for i, row in enumerate(self.at[1:]):
            at, offset = (self.at[0], row), self.offset + i * size
            one = Copy(self.tensor, self.box, at, swizzle=self.swizzle, offset=offset)
            out += one.elements()
        return out


def gather(copy: Copy) -> str:
    return f"""
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {copy.bytes};
        @%p0 cp.async.bulk.tensor.2d.{GATHER}
            [%r0+{copy.offset}], [%map, {copy.coordinates}], [%r1];
    """


def scatter(copy: Copy) -> str:
    return f"""
        @%p0 cp.async.bulk.tensor.2d.{SCATTER} [%map, {copy.coordinates}], [%r0+{copy.offset}];
        {DONE}
    """


@pytest.mark.sweep(2)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("columns", "swizzle", "offset"), [(16, 0, 128), (64, 128, 2048)])
def test_four_rows_come_to_lie_one_behind_the_other(rows, columns, swizzle, offset) -> None:
    tensor = Tensor("f16", (96, 9), pad=16)
    copy = FourRows(tensor, (columns, 1), (48, *rows), swizzle=swizzle, offset=offset)
    got = run(simulate_ptx, copy, gather(copy) + WAIT + DUMP, arch="sm_100a")[0]
    np.testing.assert_array_equal(got, copy.loaded())


@pytest.mark.parametrize("rows", [(5, 1, 8, 3), (3, 9, 0, 20)])
@pytest.mark.parametrize("swizzle", [0, 128])
def test_four_rows_are_stored_where_they_belong(rows, swizzle) -> None:
    copy = FourRows(Tensor("bf16", (96, 9)), (64, 1), (48, *rows), swizzle=swizzle, offset=1024)
    smem = np.random.default_rng(5).integers(0, 256, (1, BYTES), np.uint8)
    want = copy.stored(smem[0])
    run(simulate_ptx, copy, scatter(copy), smem, arch="sm_100a")
    np.testing.assert_array_equal(copy.tensor.data, want)


def test_rows_in_flight_are_held_to_the_wait() -> None:
    copy = FourRows(Tensor("f16", (64, 9)), (64, 1), (0, 1, 2, 3, 4))
    with pytest.raises(Hazards, match="while it is still being written by the TMA load"):
        run(simulate_ptx, copy, gather(copy) + DUMP + WAIT, arch="sm_100a")


@pytest.mark.parametrize(
    ("box", "at", "why"),
    [
        ((64, 2), (0, 1, 2, 3, 4), "whose box is one row"),
        ((64, 1), (0, 1, 2, 3), "4 coordinates"),
        ((16, 1), (4, 1, 2, 3, 4), "inner coordinate 4 .* is not a multiple of 16 bytes"),
    ],
)
def test_what_four_rows_do_not_take_is_refused(box, at, why) -> None:
    copy = FourRows(Tensor("f16", (64, 9)), box, at)
    with pytest.raises(BadOperand, match=why):
        run(simulate_ptx, copy, gather(copy) + WAIT + DUMP, arch="sm_100a")


def test_hopper_has_no_such_copy() -> None:
    copy = FourRows(Tensor("f16", (64, 9)), (64, 1), (0, 1, 2, 3, 4))
    with pytest.raises(UnknownInstruction, match="four rows of other than 2d, or on sm_90a"):
        run(simulate_ptx, copy, gather(copy) + WAIT + DUMP)
