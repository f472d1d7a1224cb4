"""How the candidates of Hopper's general GEMM kernel load their tiles: which of them are worth
predicting, and in which boxes of TMA.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import replace

from cutex.kernels.gemm.config import ELEMENT
from cutex.kernels.gemm.sm90.config import Sm90Config, contiguous_box
from cutex.problem.gemm import GemmProblem

Majors = tuple[bool, bool]  # whether K is contiguous in A, in B

BOX_ROWS = 32  # of a TMA load, where tiles reach outside of an operand
LONG = 512  # K, in units of 2 bytes, from which on that pays
FINE_ROWS = 512  # M above it is not looked at closely: tiles are loaded in boxes, in case
SMALL = 512  # columns of a C that is cut into few; eight CTAs share the K of SMALL x SMALL
NARROW = 32  # rows of an operand that TMA loads one box each of, where K is not contiguous
SECTOR, LINE = 32, 128  # bytes of a sector and of a line of L2


def of_slow_loads(config: Sm90Config, problem: GemmProblem) -> bool:
    """Whether a config is excluded where loads are not slow: eight CTAs sharing loads, or sharing
    the K of a C that is not small, of which little was timed."""
    c = config
    shared = c.one_tile and c.cluster_m * c.cluster_n == 8 and c.tile_m > 64
    return shared or (c.split_k == 8 and problem.m * problem.n > SMALL**2)


def straddles(problem: GemmProblem, majors: Majors) -> bool:
    """Whether rows of an operand are an odd number of 16 bytes apart: TMA then loads every second
    one, which starts in the middle of an L2 sector, at 16 bytes a cycle
    (docs/facts/gemm.md#pitch-odd-16-bytes)."""
    pitches = (problem.k if majors[0] else problem.m, problem.k if majors[1] else problem.n)
    return any(pitch * ELEMENT % SECTOR for pitch in pitches)


def in_boxes(config: Sm90Config, problem: GemmProblem, majors: Majors) -> tuple[Sm90Config, ...]:
    """`config`, loading boxes of BOX_ROWS where tiles may extend far outside: of N, or of an M
    known only by its class; with a short K nothing is gained (docs/facts/gemm.md#boxes-inside).
    Where K is contiguous in one operand or in none, with and without boxes: clusters that have time
    for the rows outside lose up to 4 % by boxes (docs/facts/gemm.md#boxes-of-gradients)."""
    c = config
    of_m, of_n = (c.tile_n, c.tile_m) if c.swap_ab else (c.tile_m, c.tile_n)
    rough = majors[0] and problem.m > FINE_ROWS
    far = _far_outside(problem.m, of_m, majors[0], rough)
    far = far or _far_outside(problem.n, of_n, majors[1], False)
    if c.spread or c.k_shares > 1 or problem.k < LONG or not far:
        return (c,)
    boxed = replace(c, box_rows=BOX_ROWS)
    return (boxed,) if majors == (True, True) else (c, boxed)


def _far_outside(size: int, tile: int, k_major: bool, rough: bool) -> bool:
    """Whether a side's last tile may extend past a whole box; `rough`: `size` is known only
    approximately."""
    if k_major:
        return tile > BOX_ROWS and (rough or -size % tile > 8)
    return -size % tile >= contiguous_box(tile)


def shares_well(config: Sm90Config, problem: GemmProblem, slow: bool) -> bool:
    """Whether pairs of CTAs do not share an operand half as large as the other, or smaller: it
    stays in L2 anyway, and a pair sharing it loses 10 to 20 %, unless loads are `slow` (straddles)
    or there are few columns. Clusters of four that walk over tiles share only such an operand."""
    c = config
    m, n = c.computed(problem)
    if slow:
        return True
    if not (c.one_tile or c.stream_k):
        if c.cluster_m == 4:
            return m >= 2 * n
        if n <= NARROW and not c.swap_ab and c.tile_n <= NARROW:
            return True
    return not ((m >= 2 * n and c.cluster_m == 2) or (n >= 2 * m and c.cluster_n == 2))


def loads_well(
    config: Sm90Config, problem: GemmProblem, majors: Majors, fitted: bool = False
) -> bool:
    """Whether TMA's boxes have at least NARROW rows where rows are contiguous (or, of 8 and 16, all
    there are), and start on lines there, as overlapping tiles do not
    (docs/facts/gemm.md#spread-along-rows); otherwise a config is `fitted` only."""
    c = config
    a, b = reversed(majors) if c.swap_ab else majors
    _, columns = c.computed(problem)
    return (a or (c.tile_m % NARROW == 0 and (fitted or not c.spread))) and (
        b or c.tile_n % NARROW == 0 or c.tile_n == columns <= 16
    )
