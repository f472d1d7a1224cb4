"""The tile of rows of a length: few threads for short rows, a cluster for long ones."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cutex.arch import arch
from cutex.device.row.tile import VECTOR_BYTES, WARP, RowTile
from cutex.errors import CutexError

WIDE = 4  # vectors of a thread, from which on more threads share a row
CTA = 128  # threads of a CTA, before a cluster shares a row
ROOMY = 5  # vectors of a thread, from which on rows that begin within a line take more threads
LONG_CTA = 512  # the same where a row begins in the middle of a line
CLUSTER = 8  # the largest that every GPU with clusters takes
SCANNERS = 512  # threads of a CTA that scans a part of a row
MOST = 8  # vectors of a thread of the longest rows that are taken whole
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
# most, by the CTAs of a row; threads of an SM, which have 128 registers each; the fewest threads of
# a CTA; slots at most, by the threads of a row; bytes of an SM that rows may not have; elements
# that fill a GPU
BULK_COLUMNS = {1: 38, 2: 42, 4: 38, 8: 44}  # docs/facts/rows.md#rows-norm-bulk-tiles
BULK_THREADS = 512
BULK_CTA = 128
BULK_STAGES = {32: 3, 64: 4, 512: 6}
BULK_SPARE = 8 << 10
BULK_LEAST = 1 << 21
# which rows: those that begin anywhere from so many columns on, of a layer norm's or an RMS norm's,
# by the elements of a vector; of a layer norm's that begin with vectors, those of so many vectors a
# thread between two lengths, and those between others
BULK_ANYWHERE = {8: {True: 289, False: 1153}, 4: {True: 513, False: 513}}
BULK_VECTORS, BULK_SHORT = 3, (160, 2048)
BULK_LONG = ((20_481, 90_112), (114_689, 1 << 20))

# rows whose threads keep sums of their columns (docs/facts/rows.md#rows-gradient-tiles): threads
# and CTAs of those that are loaded by the element, by the least and most columns; the vectors of a
# thread of a cluster, from which on it has twice as many
SUMS_BY_ELEMENT = {(2049, 5120): (256, 1), (10_241, 24_576): (512, 2), (24_577, 53_248): (256, 8)}
SUMS_MOST = 5


class TooLong(CutexError):
    """A row that no tile holds, by the vectors in which it can be loaded."""


class Bulk(NamedTuple):
    """How rows come by bulk copies: see BulkConfig."""

    tile: RowTile
    words: int
    stages: int
    resident: int
    ahead: bool


def tile(
    n: int,
    bits: int,
    arch_name: str,
    unit: int,
    shifted: bool = False,
    wide: int = WIDE,
    least: int = 8,
    lines: bool = True,
) -> RowTile:
    """The tile of rows of `n` elements of so many bits.

    unit: the elements of the widest vector that every row can be loaded by. shifted: rows begin
    anywhere, all operands alike. wide: the vectors of a thread, from which on CTAs share a row: of
    rows that are only read, more than WIDE. least: threads that share a row, at least. lines:
    whether all rows begin with a whole line of memory. Raises TooLong, in one sentence, for a row
    that no tile holds.
    """
    width = min(unit, VECTOR_BYTES * 8 // bits)
    vectors = -(-(n + (width - 1) * shifted) // width)
    most_ctas = CLUSTER if arch(arch_name).capability >= (9, 0) else 1
    # 4 vectors a thread; then more threads, then more CTAs (docs/facts/rows.md#tile, an H100)
    few = WIDE + shifted  # such a row lies across one vector more (rows.md#rows-odd-tiles)
    threads = _power(-(-vectors // few), least, CTA)
    ctas = _power(-(-vectors // (max(wide, few) * threads)), 1, most_ctas)
    threads = max(threads, _power(-(-vectors // (MOST * ctas)), least, 1024))
    if not lines and -(-vectors // (threads * ctas)) > ROOMY:
        # docs/facts/rows.md#rows-norm-lines
        threads = max(threads, LONG_CTA)
        ctas = _power(-(-vectors // (WIDE * threads)), 1, most_ctas)
        threads = max(threads, _power(-(-vectors // (MOST * ctas)), least, 1024))
    per_thread = -(-vectors // (threads * ctas))
    if per_thread > 2 * MOST:
        raise TooLong(
            f"a row of {n} elements of {bits} bits does not fit into the registers of "
            f"{ctas} CTA{'s' * (ctas > 1)} of {arch_name}"
        )
    rows = max(1, CTA // threads) * (2 if threads <= 8 and per_thread < WIDE else 1)
    return RowTile(rows, threads, ctas, per_thread, width, not shifted)


def with_sums(n: int, other: RowTile) -> RowTile:
    """The tile of rows of `n` elements whose threads keep sums of their columns, as a norm's
    gradient does: `other`, or one with other threads and CTAs."""
    threads, ctas = other.threads, other.ctas
    if other.width == 1:
        for (least, most), found in SUMS_BY_ELEMENT.items():
            if least <= n <= most and ctas > 1:
                threads, ctas = found
    elif other.width == 8 and threads == CTA and ctas == CLUSTER and other.vectors > SUMS_MOST:
        threads = 2 * CTA
    return replace(
        other, threads=threads, ctas=ctas, vectors=-(-n // (threads * ctas * other.width))
    )


def by_smem(n: int, other: RowTile) -> RowTile | None:
    """The tile of a layer norm's rows of `n` elements that come by smem, by whole vectors: one CTA
    with few vectors a thread, since threads that meet in a cluster take longer; `other` for long
    rows. None for rows that better come as `other` has them, to registers."""
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
    """The tile of a norm's rows of `n` elements that begin anywhere, as `other` has them, and
    whose columns go round the threads; the columns and the rows of a thread. None for rows that
    are better taken as `other` has them."""
    least, most = BY_ELEMENT[centred]
    each = ELEMENTS.get(other.width)
    if other.aligned or each is None or not least <= n <= min(most, 1024 * each):
        return None
    threads = _power(-(-n // each), WARP, 1024)
    vectors = -(-(n + other.lead) // (threads * other.width))
    of_warp = threads == WARP  # else of the CTA, whose barrier is the row's
    tile = RowTile(CTA // WARP if of_warp else 1, threads, 1, vectors, other.width, False)
    return tile, -(-n // threads), TURNS if of_warp else 1


def dense(
    m: int, n: int, other: RowTile, centred: bool, least: int = DENSE_LEAST
) -> tuple[RowTile, int, int] | None:
    """The tile of `m` rows of `n` elements, a norm's, that lie one after another and begin
    anywhere, as `other` has them; the words and the rows of a thread. None for rows that are better
    taken as `other` has them."""
    longest = DENSE.get(other.width)
    if other.aligned or longest is None or n > longest[centred] or m * n < least:
        return None
    per = other.width // 4  # elements of a word of 32 bits
    threads = _power(-(-(n + per - 1) // DENSE_COLUMNS), 2, CTA)
    rows = max(2, CTA // threads)
    vectors = -(-(rows * TURNS * n + other.lead) // (rows * threads * other.width))
    tile = RowTile(rows, threads, 1, vectors, other.width, False)
    return tile, -(-(n + per - 1) // (threads * per)), TURNS


def bulk(
    m: int, n: int, other: RowTile, centred: bool, arch_name: str, least: int = BULK_LEAST
) -> Bulk | None:
    """How `m` rows of `n` elements, a norm's, that lie one after another come by bulk copies, to
    a part of a warp, a CTA or a cluster. None for rows that are better taken as `other` has them,
    and where there are no bulk copies."""
    of = arch(arch_name)
    if of.capability < (9, 0) or m * n < least or not _is_for_bulk(n, other, centred):
        return None
    for ctas, columns in BULK_COLUMNS.items():
        threads = _power(-(-n // (ctas * columns)), 4, 1024)
        found = _bulk(n, threads, ctas, other, of.smem_per_cta)
        if found is not None and found.resident * found.tile.num_threads <= BULK_THREADS // 2:
            found = _bulk(n, BULK_THREADS, ctas, other, of.smem_per_cta)  # smem has room for a CTA
        if found is not None:
            return found
    return None


def _bulk(n: int, threads: int, ctas: int, other: RowTile, smem: int) -> Bulk | None:
    """The same with so many threads for a row in each of so many CTAs; None without room."""
    rows = max(1, BULK_CTA // threads) if ctas == 1 else 1
    tile = RowTile(rows, threads, ctas, 1, other.width, False)
    words = words_of(n, tile, other.aligned)
    slot = tile.num_threads * words * 4 + 2 * VECTOR_BYTES
    room, least_stages = smem - BULK_SPARE, min(BULK_STAGES.values())
    resident = min(BULK_THREADS // tile.num_threads, room // (least_stages * slot))
    if not resident:
        return None
    most = next(stages for t, stages in BULK_STAGES.items() if threads <= t)
    return Bulk(tile, words, min(most, room // (resident * slot)), resident, ctas > 1)


def _is_for_bulk(n: int, other: RowTile, centred: bool) -> bool:
    """Whether a norm's rows of `n` elements are better taken by bulk copies than as `other`."""
    least = BULK_ANYWHERE.get(other.width)
    if least is None:
        return False
    if not other.aligned:
        return n >= least[centred]
    short = BULK_SHORT[0] <= n <= BULK_SHORT[1] and other.vectors == BULK_VECTORS
    return centred and other.width == 8 and (short or any(a <= n <= b for a, b in BULK_LONG))


def words_of(n: int, tile: RowTile, whole: bool = False) -> int:
    """The words of 32 bits that a thread of a tile has of a row of `n` elements, or of its CTA's
    part of one. whole: each row begins with a word; else anywhere."""
    per = tile.width // 4  # elements of a word
    part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
    return -(-(part + (per - 1) * (not whole)) // (tile.threads * per))


def part(n: int, bits: int, unit: int, shifted: bool = False) -> RowTile:
    """The tile of a part of a row of `n` elements, for kernels that take each part for itself: the
    parts are as many as WIDE vectors a thread make, and alike."""
    width = min(unit, VECTOR_BYTES * 8 // bits)
    vectors = -(-(n + (width - 1) * shifted) // width)
    parts = -(-vectors // (WIDE * CTA))
    return RowTile(1, CTA, 1, -(-vectors // (CTA * parts)), width, not shifted)


def walk(bits: int, unit: int, shifted: bool = False) -> RowTile:
    """The tile of one CTA that goes along a long row, part by part."""
    return RowTile(1, 2 * CTA, 1, WIDE, min(unit, VECTOR_BYTES * 8 // bits), not shifted)


def scan(n: int, bits: int, unit: int, shifted: bool = False) -> RowTile:
    """The tile of rows that are scanned: of whole ones by one CTA, or of a large part, so that
    there are few parts to look back at."""
    width = min(unit, VECTOR_BYTES * 8 // bits)
    vectors = -(-(n + (width - 1) * shifted) // width)
    threads = _power(-(-vectors // WIDE), 32, SCANNERS)
    per_thread = min(MOST, -(-vectors // threads))
    return RowTile(max(1, CTA // threads), threads, 1, per_thread, width, not shifted)


def _power(x: int, least: int, most: int) -> int:
    """The smallest power of two that is at least x, within bounds."""
    return min(most, max(least, 1 << (x - 1).bit_length()))
