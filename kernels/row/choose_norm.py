"""How a norm loads its rows: element by element, by vectors, or by bulk copies."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from cutex.arch import arch
from cutex.device.row.tile import LINE_BYTES, WARP, RowTile, slot_bytes
from cutex.kernels.row.choose import (
    BULK_LEAST,
    BULK_SPARE,
    BULK_THREADS,
    CLUSTER,
    CTA,
    LARGE_ARCHS,
    LARGE_CLUSTER,
    WIDE,
    power,
    vectors_of,
    words_of,
)

Clusters = dict[tuple[int, int], tuple[int, int]]
# a layer norm's rows by smem (docs/facts/rows.md#rows-layer-norm-tiles), by the elements of a
# vector: threads of the CTA of a row, and how many vectors each has at most; the least and most
# vectors of a row; threads and vectors of each of four CTAs for rows that one does not hold
STAGED = {8: {128: 4, 256: 5, 512: 5}, 4: {128: 5, 256: 6, 512: 8}}
STAGED_LEAST = {8: 257, 4: 513}
STAGED_MOST = {8: 1 << 31, 4: 7168}
STAGED_BY_FOUR = {4: (256, 7)}
# rows whose columns go round the threads (docs/facts/rows.md#rows-norm-by-element): the least and
# most columns of a layer norm's or an RMS norm's; those of a thread, by the elements of a vector;
# the rows of a thread, where a warp has a row
BY_ELEMENT = {True: (128, 20_480), False: (256, 12_288)}
ELEMENTS = {8: 20, 4: 12}
TURNS = 4
# rows that lie one after another (docs/facts/rows.md#rows-norm-dense), by the elements of a
# vector: the longest of a layer norm's or an RMS norm's; the columns of a thread at most; the
# elements from which on they fill a GPU
DENSE = {8: {True: 288, False: 1152}, 4: {True: 512, False: 512}}
DENSE_COLUMNS = 18
DENSE_LEAST = 1 << 21
# rows that come by bulk copies (docs/facts/rows.md#rows-norm-bulk): the columns of a thread at
# most, by the CTAs of a row; the fewest threads of a CTA; slots at most, by the threads of a row
BULK_COLUMNS = {1: 38, 2: 42, 4: 38, 8: 44}  # docs/facts/rows.md#rows-norm-bulk-tiles
BULK_LONGEST = 56  # of an RMS norm, whose threads have no bias
BULK_CTA = 128
BULK_STAGES = {32: 3, 64: 4, 512: 6}
LEAST_RELAYED = 4  # slots of a cluster's rows whose sums are relayed, at least
# and at most of clusters of 8 whose slots have so many bytes (docs/facts/rows.md#rows-norm-slots),
# of rows that begin anywhere
BULK_LARGE = 40 << 10
BULK_MOST = {128: 6, 256: 4, 512: 6}  # slots of rows that begin with vectors, of one CTA
# which rows: those that begin anywhere from so many columns on, of a layer norm's or an RMS norm's,
# by the elements of a vector; of a layer norm's of 16 bits that begin with vectors, those between
# two lengths that fill less of a tile in registers; and the columns of a thread of these at most
BULK_ANYWHERE = {8: {True: 289, False: 1153}, 4: {True: 321, False: 193}}  # rows.md#rows-fp32-bulk
BULK_SHORT, BULK_EACH = (33, 1152), 33  # rows.md#rows-short-bulk
BULK_FILLED = {104: 0.95, 1152: 0.83}  # by the most columns; rows.md#rows-shorter-bulk
# threads and CTAs of a row by the least and most columns, of a layer norm's or an RMS norm's rows,
# by the elements of a vector: of rows that begin with vectors (rows.md#rows-norm-vectors)
BULK_BY_VECTORS: dict[tuple[bool, int], Clusters] = {
    (True, 8): {
        (1153, 2560): (64, 1), (2561, 5120): (128, 1), (5121, 10_240): (256, 1),
        (10_241, 12_288): (256, 2), (12_289, 16_384): (512, 1), (16_385, 18_000): (256, 2),
        (18_001, 20_480): (512, 2), (20_481, 24_576): (256, 4), (24_577, 28_672): (512, 2),
        (32_769, 40_960): (512, 2), (40_961, 53_248): (256, 8), (53_249, 79_872): (512, 4),
        (79_873, 163_840): (512, 8), (163_841, 262_144): (512, 16),
    },
    (False, 8): {
        (6145, 14_336): (256, 1), (14_337, 20_480): (512, 1), (20_481, 28_672): (256, 2),
        (28_673, 40_960): (256, 4), (40_961, 49_152): (512, 2), (49_153, 81_920): (512, 4),
        (81_921, 229_376): (512, 8),
    },
    (True, 4): {
        (14_337, 16_384): (512, 2), (16_385, 32_768): (512, 4), (32_769, 98_304): (512, 8),
        (98_305, 262_144): (512, 16),
    },
    (False, 4): {
        (16_385, 32_768): (512, 4), (32_769, 98_304): (512, 8), (98_305, 262_144): (512, 16),
    },
}  # fmt: skip
# whether CTAs draw tickets for rows by bulk copies (docs/facts/rows.md#rows-tickets): the least
# bytes of a CTA's rows of one turn, of a CTA alone or of a cluster's; the most words of a thread of
# a layer norm's clusters, which spill beyond
TICKETS_LEAST = {False: 12 << 10, True: 30 << 10}
TICKETS_WORDS = 16
# a CTA alone whose turns have fewer bytes draws one ticket for several, up to so many bytes or
# turns (docs/facts/rows.md#rows-tickets-turns)
TICKETS_BYTES, TICKETS_MOST = 10 << 10, 4
# and anywhere (docs/facts/rows.md#rows-norm-relayed)
BULK_BY_WORDS: dict[tuple[bool, int], Clusters] = {
    (True, 8): {
        (19_457, 21_504): (512, 2), (36_865, 43_008): (512, 4), (43_009, 90_112): (256, 8),
        (90_113, 180_224): (512, 8), (180_225, 360_448): (512, 16),
    },
    (True, 4): {(98_305, 262_144): (512, 16)},
    (False, 4): {(98_305, 262_144): (512, 16)},
}  # fmt: skip
# elements of a launch of layer norms whose threads meet once (docs/facts/rows.md#rows-few-once)
FEW_ONCE = {False: 1 << 17, True: 1 << 18}  # whether clusters have rows
# few long rows of a layer norm (docs/facts/rows.md#rows-few-63): the most that have 16 CTAs each;
# threads of a CTA at most, and vectors of a thread by CTAs
FEW_LARGE, FEW_THREADS, FEW_VECTORS = 4, 512, 32
# aligned rows taken in turn (docs/facts/rows.md#rows-norm-resident): threads and CTAs of a row, and
# the most vectors of each, the first that holds it; of a layer norm's or an RMS norm's, by the
# elements of a vector; the columns of an RMS norm at least
RESIDENT_LAYER = (
    (4, 1), (8, 1), (16, 1), (32, 1), (64, 1), (128, 1), (256, 1), (256, 2), (256, 4), (256, 8),
    (512, 8),
)  # fmt: skip
RESIDENT = {
    (True, 8): tuple((*tile, 4) for tile in RESIDENT_LAYER),
    (True, 4): tuple((*tile, 6) for tile in RESIDENT_LAYER),
    (False, 8): ((256, 1, 5), (256, 2, 6), (256, 4, 5), (256, 8, 5), (512, 8, 5)),
}
RESIDENT_LEAST = {True: 33, False: 8193}
# of a layer norm's rows of 16 bits, from so many columns on: those that fill so much of the tile,
# and no longer ones, which do not lie one behind the other
RESIDENT_LONG, RESIDENT_FULL, RESIDENT_MOST = 20_481, 0.85, 65_536


class Bulk(NamedTuple):
    """How rows are bulk-copied: see BulkConfig."""

    tile: RowTile
    words: int
    stages: int
    resident: int
    vector: int
    open: int
    ahead: int
    halves: bool


def few_long(m: int, n: int, arch_name: str, largest: int = LARGE_CLUSTER) -> RowTile | None:
    """The tile of few long rows of a layer norm, of whole vectors of 16 bits: as many threads as
    have one or two each, so that weights are on their way beside them. None for others."""
    of = arch(arch_name)
    large = largest if arch_name in LARGE_ARCHS and m <= FEW_LARGE else CLUSTER
    if of.capability < (9, 0):
        return None
    vectors = -(-n // 8)
    threads = power(-(-vectors // large), CTA, FEW_THREADS)
    each = -(-vectors // (large * threads))
    return RowTile(1, threads, large, each, 8) if large * each <= FEW_VECTORS else None


def by_smem(n: int, other: RowTile) -> RowTile | None:
    """The tile for a layer norm that stages rows of `n` elements in smem by whole vectors: one CTA
    with few vectors per thread, since synchronising a cluster is slower; `other` for long rows.
    None where loading straight to registers, as `other` does, is faster."""
    width, vectors = other.width, -(-n // other.width)
    if not other.aligned or not STAGED_LEAST[width] <= vectors <= STAGED_MOST[width]:
        return None
    for threads, most in STAGED[width].items():
        if vectors <= threads * most:
            return RowTile(1, threads, 1, -(-vectors // threads), width)
    threads, most = STAGED_BY_FOUR.get(width, (0, 0))
    if other.ctas >= 4 and vectors <= 4 * threads * most:
        return RowTile(1, threads, 4, -(-vectors // (4 * threads)), width)
    return other


def by_element(n: int, other: RowTile, centred: bool) -> tuple[RowTile, int, int] | None:
    """For a norm of unaligned rows of `n` elements, whose columns are dealt to the threads element
    by element: the tile, the columns per thread and the rows per thread. None where `other` is
    faster."""
    least, most = BY_ELEMENT[centred]
    each = ELEMENTS.get(other.width)
    if other.aligned or each is None or not least <= n <= min(most, 1024 * each):
        return None
    threads = power(-(-n // each), WARP, 1024)
    vectors = -(-(n + other.lead) // (threads * other.width))
    of_warp = threads == WARP  # else of the CTA, whose barrier is the row's
    tile = RowTile(CTA // WARP if of_warp else 1, threads, 1, vectors, other.width, False)
    return tile, -(-n // threads), TURNS if of_warp else 1


def dense(
    m: int, n: int, other: RowTile, centred: bool, least: int = DENSE_LEAST
) -> tuple[RowTile, int, int] | None:
    """For a norm of `m` dense unaligned rows of `n` elements: the tile, the words per thread and
    the rows per thread. None where `other` is faster."""
    longest = DENSE.get(other.width)
    if other.aligned or longest is None or n > longest[centred] or m * n < least:
        return None
    per = other.width // 4  # elements of a word of 32 bits
    threads = power(-(-(n + per - 1) // DENSE_COLUMNS), 2, CTA)
    rows = max(2, CTA // threads)
    vectors = -(-(rows * TURNS * n + other.lead) // (rows * threads * other.width))
    tile = RowTile(rows, threads, 1, vectors, other.width, False)
    return tile, -(-(n + per - 1) // (threads * per)), TURNS


def bulk(
    m: int, n: int, other: RowTile, centred: bool, arch_name: str, least: int = BULK_LEAST, *,
    largest: int = LARGE_CLUSTER,
) -> Bulk | None:  # fmt: skip
    """How the bulk-copy norm processes `m` dense rows of `n` elements: by part of a warp, a CTA, or
    a cluster of at most `largest` CTAs. None where `other` is faster, and on archs without bulk
    copies."""
    of = arch(arch_name)
    if of.capability < (9, 0) or m * n < least:
        return None
    largest = min(largest, LARGE_CLUSTER if arch_name in LARGE_ARCHS else CLUSTER)
    known = _known(n, other, centred)
    if _is_short(n, other, centred):
        threads = power(-(-n // BULK_EACH), 4, CTA)
        return _bulk(n, threads, 1, other, centred, of.smem_per_cta)
    if known is not None and known[1] <= largest:
        made = partial(_bulk, n, *known, other, centred, of.smem_per_cta)
        # NOTE: of the longest rows vectors leave more of a slot open than there is room for
        ways = ({"vectors": True}, {}) if other.aligned else ({},)
        several = (made(**way, tight=tight) for tight in (False, True) for way in ways)
        return next((by for by in several if by is not None), None)
    if known is None and not _is_for_bulk(n, other, centred):
        return None
    for ctas, columns in (BULK_COLUMNS if centred else BULK_COLUMNS | {8: BULK_LONGEST}).items():
        threads = power(-(-n // (ctas * columns)), 4, 1024)
        found = _bulk(n, threads, ctas, other, centred, of.smem_per_cta)
        if found is not None and found.resident * found.tile.num_threads <= BULK_THREADS // 2:
            found = _bulk(
                n, BULK_THREADS, ctas, other, centred, of.smem_per_cta
            )  # smem has room for a CTA
        if found is not None:
            return found
    return None


def by_tickets(row_bytes: int, by: Bulk, centred: bool) -> int:
    """The turns of a ticket that CTAs draw which process rows of so many bytes `by` bulk copies; 0
    if they have equal shares."""
    tile, clusters = by.tile, by.tile.ctas > 1
    of_cluster = clusters and centred and tile.width == 8
    spills = of_cluster and by.words > TICKETS_WORDS
    # NOTE: clusters' odd rows of 16 bits have only been timed by equal shares
    if by.halves or spills or (of_cluster and not by.vector):
        return 0
    turn, least = row_bytes * tile.rows // tile.ctas, TICKETS_LEAST[clusters]
    if turn >= least:
        return 1
    return 0 if clusters else min(TICKETS_MOST, -(-TICKETS_BYTES // turn))


def _bulk(
    n: int, threads: int, ctas: int, other: RowTile, centred: bool, smem: int, *,
    vectors: bool = False, tight: bool = False,
) -> Bulk | None:  # fmt: skip
    """The same with this many threads and CTAs for a row, or by vectors; None if it does not
    fit. tight: with a slot less than a large cluster should have."""
    rows = max(1, BULK_CTA // threads) if ctas == 1 and not vectors else 1
    tile = RowTile(rows, threads, ctas, 1, other.width, False)
    words, vector, last = words_of(n, tile, other.aligned), 0, 0
    if vectors:
        words, vector, last = vectors_of(n, tile)
    slot = slot_bytes(tile.num_threads * words * 4)
    room = smem - BULK_SPARE
    relays = ctas > 1 and centred
    least, ahead = min(BULK_STAGES.values()), int(ctas > 1)
    if relays or ctas > CLUSTER:  # rows.md#rows-norm-relayed
        least = LEAST_RELAYED
        ahead += relays and ctas > CLUSTER
    if tight and ctas > CLUSTER:  # of the longest rows, which nothing else holds
        least, ahead = least - 1, 1
    resident = min(BULK_THREADS // tile.num_threads, room // (least * slot))
    if not resident:
        return None
    most = next(stages for t, stages in BULK_STAGES.items() if threads <= t)
    if vectors and ctas == 1:
        most = next(stages for t, stages in BULK_MOST.items() if threads <= t)
    few = ctas == CLUSTER and relays and not other.aligned and slot >= BULK_LARGE
    stages = min(LEAST_RELAYED if few else most, room // (resident * slot))
    halves = ctas > CLUSTER and n % (other.width // 4) > 0  # rows.md#rows-norm-halves
    return Bulk(tile, words, stages, resident, vector, last, ahead, halves)


def _known(n: int, other: RowTile, centred: bool) -> tuple[int, int] | None:
    """The threads and CTAs for a bulk-copied row that the measured table names; None if it has no
    entry."""
    tables = BULK_BY_VECTORS if other.aligned else BULK_BY_WORDS
    spans = tables.get((centred, other.width), {})
    return next((how for (first, last), how in spans.items() if first <= n <= last), None)


def _is_for_bulk(n: int, other: RowTile, centred: bool) -> bool:
    """Whether bulk copies beat `other` for a norm's rows of `n` elements."""
    least = BULK_ANYWHERE.get(other.width)
    if least is None:
        return False
    if not other.aligned:
        return n >= least[centred]
    return _is_short(n, other, centred)


def _is_short(n: int, other: RowTile, centred: bool) -> bool:
    """Whether a layer norm's short rows of vectors leave too much of a tile in registers open."""
    first, last = BULK_SHORT
    if not (centred and other.aligned and other.width == 8 and first <= n <= last):
        return False
    vectors, tiles = n // 8, RESIDENT[True, 8]
    held = next(
        threads * ctas * -(-vectors // (threads * ctas))
        for threads, ctas, most in tiles
        if vectors <= threads * ctas * most
    )
    return vectors < held * next(full for most, full in BULK_FILLED.items() if n <= most)


class Resident(NamedTuple):
    """How a persistent kernel processes aligned rows: see ResidentConfig."""

    tile: RowTile
    resident: int


def resident(
    m: int, n: int, other: RowTile, centred: bool, arch_name: str, least: int = BULK_LEAST,
    *, dense: bool = False,
) -> Resident | None:  # fmt: skip
    """How persistent CTAs process `m` rows of `n` elements of a norm, with 16-byte vectors; dense:
    rows are contiguous. None where `other` or bulk copies are faster."""
    known = dense and (_known(n, other, centred) or _is_for_bulk(n, other, centred))
    if known and bulk(m, n, other, centred, arch_name) is not None:
        return None
    few = m * n < least or n < RESIDENT_LEAST[centred]
    if not other.aligned or few or arch(arch_name).capability < (9, 0):
        return None
    for threads, ctas, most in RESIDENT.get((centred, other.width), ()):
        vectors = -(-n // (other.width * threads * ctas))
        held = vectors * other.width * threads * ctas
        if centred and other.width == 8 and n >= RESIDENT_LONG:
            most = most if n <= RESIDENT_MOST and n >= RESIDENT_FULL * held else 0
        if vectors <= most:
            # of an RMS norm with few vectors a thread, or of a large cluster, others are quicker
            wide = threads * ctas > 2048 and 2 * n % LINE_BYTES > 0
            if not centred and vectors < WIDE + wide:
                return None
            tile = RowTile(max(1, CTA // threads), threads, ctas, vectors, other.width)
            return Resident(tile, BULK_THREADS // tile.num_threads)
    return None
