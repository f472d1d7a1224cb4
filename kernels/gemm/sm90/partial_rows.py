"""What loads bring in vain: rows outside of an operand, and what lies beside a row that begins
within a line or a sector of L2.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from cutex.kernels.gemm.config import ELEMENT, ceil_div
from cutex.kernels.gemm.sm90.config import Sm90Config, box_rows, contiguous_box
from cutex.kernels.gemm.sm90.loading import LINE, Majors

if TYPE_CHECKING:
    from cutex.problem.gemm import GemmProblem

ROWS_OUTSIDE = 8  # rows of a box outside of the operand that cost nothing
BOX = 64  # rows of 16 bits that a box brings at most along which K is not contiguous
# bytes of an operand that L2 still has when CTAs at other steps of K ask for the lines that their
# tiles have parts of (docs/facts/gemm.md#streamed-lines)
LINES_KEPT = 20e6


def rows_outside(c: Sm90Config, m: int, n: int, rounds: float, majors: Majors) -> float:
    """The rows of the last boxes that are outside of both operands, beyond ROWS_OUTSIDE each; for
    CTAs with several tiles, the mean over the tiles of one that has a last one."""
    if c.spread:
        return 0
    of_m, of_n = reversed(majors) if c.swap_ab else majors
    sides = (
        (m, c.tile_m, c.cluster_m, c.cluster_n, of_m),
        (n, c.tile_n, c.cluster_n, c.cluster_m, of_n),
    )
    return sum(
        max(0, _last_outside(c, *side) - ROWS_OUTSIDE)
        * (1 if c.one_tile else max(1 / max(1, rounds), side[1] / side[0]))
        for side in sides
        if side[0] >= side[1] or c.one_tile
    )


def _last_outside(
    c: Sm90Config, size: int, tile: int, cluster: int, sharers: int, k_major: bool
) -> int:
    """The rows of the last tile of a side that TMA finds outside of an operand of `size` rows."""
    tiles = ceil_div(ceil_div(size, tile), cluster) * cluster
    outside = tile - max(0, size - (tiles - 1) * tile)
    if not c.box_rows:
        return outside
    if outside == tile:
        return 0
    if not k_major:
        return outside % contiguous_box(tile)
    part = tile // sharers if tile % (8 * sharers) == 0 else tile
    return outside % box_rows(part, c.box_rows)


def apart(c: Sm90Config, problem: GemmProblem, majors: Majors, unit: int) -> float:
    """The bytes of a K tile that a CTA requests in rows starting inside a unit of L2, as some rows
    of an operand do whose pitch is not a multiple of `unit` bytes. A row costs the same however
    short it is: rows of narrow boxes count as whole ones."""
    pitches = (problem.k if majors[0] else problem.m, problem.k if majors[1] else problem.n)
    tiles = (c.tile_n, c.tile_m) if c.swap_ab else (c.tile_m, c.tile_n)
    sharers = (c.cluster_m, c.cluster_n) if c.swap_ab else (c.cluster_n, c.cluster_m)
    return sum(
        tile
        / by
        * c.k_bytes
        * (1 - gcd(pitch * ELEMENT, unit) / unit)
        * (1 if k_major else BOX / contiguous_box(tile))
        for tile, by, pitch, k_major in zip(tiles, sharers, pitches, majors, strict=True)
    )


def lines_again(c: Sm90Config, problem: GemmProblem, batch: int, majors: Majors) -> float:
    """The bytes of lines that two streamed clusters have parts of, which come from memory twice:
    clusters side by side are at other steps of K. A row of an operand, along which K is not
    contiguous, begins anywhere within a line that its pitch allows."""
    of_m, of_n = c.tile_m * c.cluster_m, c.tile_n * c.cluster_n
    sides = (of_n, of_m) if c.swap_ab else (of_m, of_n)
    found = 0.0
    for side, size, k_major in zip(sides, (problem.m, problem.n), majors, strict=True):
        run, pitch = side * ELEMENT, size * ELEMENT
        if k_major or pitch <= run:
            continue
        operand = pitch * problem.k * batch
        found += max(0.0, operand - LINES_KEPT) * (LINE - gcd(pitch, run, LINE)) / run
    return found
