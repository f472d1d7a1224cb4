"""The tile for rows of a given length: few threads for short rows, a cluster for long ones."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cutex.arch import arch
from cutex.device.row.tile import VECTOR_BYTES, WARP, RowTile, slot_bytes
from cutex.errors import CutexError

WIDE = 4  # vectors of a thread, from which on more threads share a row
CTA = 128  # threads of a CTA, before a cluster shares a row
ROOMY = 5  # vectors of a thread, from which on rows that begin within a line take more threads
LONG_CTA = 512  # the same where a row begins in the middle of a line
CLUSTER = 8  # the largest that every GPU with clusters takes
LARGE_CLUSTER, LARGE_ARCHS = 16, ("sm_90a", "sm_100a")  # of those of these archs some do
SCANNERS = 512  # threads of a CTA that scans a part of a row
# rows that clusters of 16 CTAs scan or exponentiate, at most (docs/facts/rows.md#rows-few-65):
# threads of a CTA, and the vectors of a softmax at least
FEW_ROWS, FEW_SCANNERS, FEW_SOFTMAX = 4, 256, 4096
MOST = 8  # vectors of a thread of the longest rows that are taken whole
# rows that come by bulk copies: threads of an SM, which have 128 registers each; bytes of an SM
# that rows may not have; elements that fill a GPU
BULK_THREADS = 512
BULK_SPARE = 8 << 10
BULK_LEAST = 1 << 21
# rows of a softmax that begin anywhere, by bulk copies (docs/facts/rows.md#rows-softmax-bulk):
# threads of a CTA, the fewest first; elements of a thread and slots at most; from so many columns
# on, by the elements of a vector
ROWS_TILES = (256, 1), (256, 2), (256, 4), (256, 8), (256, 16), (512, 8)
ROWS_ELEMENTS = 64
ROWS_SLOTS = 6
ROWS_ANYWHERE = {8: 10_234}
# those between are better in registers (docs/facts/rows.md#rows-softmax-odd): threads and CTAs, by
# the least and most columns, of 16 bits
SOFTMAX_ODD = {(5114, 10_233): (256, 1), (14_330, 16_377): (256, 2)}
# and of its gradient two CTAs of 128 threads (docs/facts/rows.md#rows-softmax-gradient-odd)
GRADIENT_ODD = 4090, 14_336
# vectors of a thread, before CTAs share a row of a softmax, aligned or not, or of an RMS norm
# (docs/facts/rows.md#rows-softmax-wide)
SOFTMAX_WIDE = {True: 8, False: 6}
# aligned ones of so many bits that clusters of 16 CTAs share (rows.md#rows-softmax-large): from so
# many columns on
SOFTMAX_LARGE = {16: 196_609, 32: 131_073}
NORM_WIDE = 5
# threads that share a row at least, and vectors of a thread of a warp's row at most, of kernels
# whose rows are short (docs/facts/rows.md#rows-short)
LEAST_THREADS, IN_WARP = 4, 5
ODD_LOSSES = 9  # the same of losses of rows that begin anywhere, of 16 threads or fewer
# few elements (docs/facts/rows.md#rows-few): of a launch whose rows, if they begin anywhere, are
# loaded by the element, and the elements of a thread of these; threads of a CTA, the most of a
# short row's; of a launch that one cluster takes whole, and the threads of its CTAs
FEW = 1 << 19
FEW_EACH = 6
FEW_CTA, FEW_LONG = 256, 12_288
ONE_CLUSTER = 1 << 17
# of a histogram (docs/facts/rows.md#rows-few-63)
HISTOGRAM_CLUSTER = 1 << 18
# threads of each CTA of a cluster that has all rows of few losses, elements of each at most where
# it has more than WIDE vectors, and rows of a CTA at most (docs/facts/rows.md#rows-losses-cluster)
TOGETHER, IN_CTA, ROWS_OF_CTA = (256, 512), 32, 64
# rows of an SM at most of which CTAs of 512, 256 and 128 threads walk along one each
# (docs/facts/rows.md#rows-losses-walkers); those of which CTAs stay, the least and the most
# (rows.md#rows-losses-in-turns), of rows of so many bytes by 512 threads
WALKS_FEW, WALKS_SOME, WALKS_MANY = 2, 4, 8
IN_TURNS, IN_TURNS_BYTES = ((2, 3), (8, 1 << 31)), 56 << 10
# and of fp32 all (docs/facts/rows.md#rows-softmax-odd-large): by the most columns
SOFTMAX_ODD_LEAST = 32_769
SOFTMAX_ODD_FP32 = {65_536: (256, 8), 163_840: (256, 16), 262_144: (512, 16)}


# dense rows that begin anywhere, as many as a CTA takes of which come as one run of memory
# (docs/facts/rows.md#rows-dense): the elements that fill a GPU; the 32-bit words of a thread, and
# the columns at most by the elements of a vector, of losses and of softmax
DENSE_LEAST = 1 << 21
DENSE_LOSSES = 28, {8: 38_911, 4: 4_096}
DENSE_SOFTMAX = 20, {8: 4_096, 4: 2_000}
DENSE_ALIGNED = {8: 8193}  # and from so many columns on those that begin with vectors, too
DENSE_CTA = 512  # threads of a row at most
DENSE_MEET = 4  # lanes of a warp that read one bank at one time, at most
# rows of few columns (docs/facts/rows.md#rows-few-columns), of losses and softmax, aligned or not:
# the columns by the elements of a vector; bytes of a CTA's run, and turns of its threads, at most
DENSE_FEW_LOSSES = {8: 56, 4: 14}
DENSE_FEW_SOFTMAX = {8: 30, 4: 7}
DENSE_RUN, DENSE_TURNS = 20 << 10, 8


class TooLong(CutexError):
    """A row that no tile can hold with the vectors that its alignment allows."""


def tile(
    n: int,
    bits: int,
    arch_name: str,
    unit: int,
    shifted: bool = False,
    wide: int = WIDE,
    least: int = 8,
    lines: bool = True,
    in_warp: int = WIDE,
) -> RowTile:
    """The tile for rows of `n` elements of `bits` bits.

    unit: the elements of the widest vector that every row can be loaded by. shifted: rows start
    anywhere, equally in all operands. wide: from this many vectors per thread on, several CTAs
    share a row (rows that are only read take more than WIDE). least: the fewest threads that share
    a row. lines: whether all rows start on a 128-byte line. in_warp: from this many vectors per
    thread on, several warps share a row. Raises TooLong, in one sentence, for a row that no tile
    holds.
    """
    width = min(unit, VECTOR_BYTES * 8 // bits)
    vectors = -(-(n + (width - 1) * shifted) // width)
    most_ctas = CLUSTER if arch(arch_name).capability >= (9, 0) else 1
    # 4 vectors a thread; then more threads, then more CTAs (docs/facts/rows.md#tile, an H100)
    few = WIDE + shifted  # such a row lies across one vector more (rows.md#rows-odd-tiles)
    threads = power(-(-vectors // few), least, CTA)
    fewer = power(-(-vectors // max(few, in_warp)), least, CTA)
    threads = fewer if fewer <= WARP else threads
    # a cluster has CTAs of whole warps: of fewer threads one holds the row
    ctas = power(-(-vectors // (max(wide, few) * threads)), 1, most_ctas) if threads == CTA else 1
    threads = max(threads, power(-(-vectors // (MOST * ctas)), least, 1024))
    if not lines and -(-vectors // (threads * ctas)) > ROOMY:
        # docs/facts/rows.md#rows-norm-lines
        threads = max(threads, LONG_CTA)
        ctas = power(-(-vectors // (WIDE * threads)), 1, most_ctas)
        threads = max(threads, power(-(-vectors // (MOST * ctas)), least, 1024))
    per_thread = -(-vectors // (threads * ctas))
    if per_thread > 2 * MOST:
        raise TooLong(
            f"a row of {n} elements of {bits} bits does not fit into the registers of "
            f"{ctas} CTA{'s' * (ctas > 1)} of {arch_name}"
        )
    rows = max(1, CTA // threads) * (2 if threads <= 8 and per_thread < WIDE else 1)
    # NOTE: with more vectors their ends come by the element, and all loads in turn are quicker
    inner = shifted and threads * ctas > 1 and per_thread <= WIDE  # rows.md#rows-odd-ends
    return RowTile(rows, threads, ctas, per_thread, width, not shifted, inner)


class BulkRows(NamedTuple):
    """How rows are bulk-copied: see RowsBulkConfig."""

    tile: RowTile
    words: int
    slots: int
    resident: int


def bulk_rows(
    m: int, n: int, widest: int, arch_name: str, least: int = BULK_LEAST, *,
    largest: int = LARGE_CLUSTER,
) -> BulkRows | None:  # fmt: skip
    """How the bulk-copy softmax processes `m` dense rows of `n` elements, which start anywhere;
    each CTA holds one row, or one part of it, at a time.

    widest: the elements of 16 bytes. None for rows that another kernel handles better, that no
    cluster holds, and on archs without bulk copies."""
    of = arch(arch_name)
    wanted = ROWS_ANYWHERE.get(widest)
    if of.capability < (9, 0) or wanted is None or m * n < least or n < wanted:
        return None
    if widest == 8 and any(first <= n <= last for first, last in SOFTMAX_ODD):
        return None
    largest = min(largest, LARGE_CLUSTER if arch_name in LARGE_ARCHS else CLUSTER)
    for threads, ctas in ROWS_TILES:
        tile = RowTile(1, threads, ctas, 1, widest, False)
        found = bulk_rows_of(n, tile, of.smem_per_cta - BULK_SPARE)
        if found is not None and ctas <= largest:
            return found
    return None


def rows_by_tickets(by: BulkRows) -> bool:
    """Whether CTAs that process rows `by` bulk copies draw tickets for them."""
    return by.tile.ctas <= CLUSTER


def bulk_rows_of(n: int, tile: RowTile, room: int) -> BulkRows | None:
    """The same for one tile; None if shared memory is too small."""
    words, resident = words_of(n, tile), BULK_THREADS // tile.threads
    slot = slot_bytes(tile.threads * words * 4)
    slots = min(ROWS_SLOTS, room // resident // slot)
    if words * tile.width // 4 > ROWS_ELEMENTS or slots < 3:
        return None
    return BulkRows(tile, words, slots, resident)


def words_of(n: int, tile: RowTile, whole: bool = False) -> int:
    """The 32-bit words per thread for a row of `n` elements, or for its CTA's part of one. whole:
    each row starts on a word; otherwise anywhere."""
    per = tile.width // 4  # elements of a word
    part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
    return -(-(part + (per - 1) * (not whole)) // (tile.threads * per))


def vectors_of(n: int, tile: RowTile) -> tuple[int, int, int]:
    """The same in 16-byte vectors, for rows of whole vectors: the words of a thread, the words of a
    vector, and how many of a thread's vectors may be past the row's end."""
    per, vector = tile.width // 4, VECTOR_BYTES // 4
    part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
    one_each = tile.threads * per * vector
    vectors, shortest = -(-part // one_each), n - (tile.ctas - 1) * part
    return vectors * vector, vector, vectors - shortest // one_each


class DenseRows(NamedTuple):
    """How several dense rows are processed as one run of memory: see DenseLossesConfig."""

    tile: RowTile
    words: int
    turns: int = 1
    apart: bool = False


def dense_losses(m: int, n: int, widest: int, aligned: bool) -> DenseRows | None:
    """How losses of `m` dense rows of `n` elements take several as one run of memory; widest: the
    elements of 16 bytes, 0 where rows are not dense; aligned: rows start with vectors. None where
    other ways are quicker."""
    few = _are_few(n, widest, DENSE_FEW_LOSSES)
    if aligned and not few and n < DENSE_ALIGNED.get(widest, n + 1):
        return None
    return _dense_rows(m, n, widest, *DENSE_LOSSES, few)


def dense_softmax(m: int, n: int, widest: int, aligned: bool) -> DenseRows | None:
    """The same of softmax."""
    few = _are_few(n, widest, DENSE_FEW_SOFTMAX)
    return None if aligned and not few else _dense_rows(m, n, widest, *DENSE_SOFTMAX, few)


def _are_few(n: int, widest: int, most: dict[int, int]) -> bool:
    """Whether a thread should have rows of `n` columns alone: the lanes of a warp, each at a row,
    wait for each other where these begin in few banks of smem."""
    meet = _meeting(n, widest // 4, dense_rows(n, widest, 1)) if n <= most.get(widest, 0) else WARP
    return meet <= DENSE_MEET or (meet <= 2 * DENSE_MEET and n * 16 // widest <= WARP)


def _dense_rows(
    m: int, n: int, widest: int, each: int, most: dict[int, int], few: bool
) -> DenseRows | None:
    """The same with at most `each` words of a thread, for rows of at most so many columns; of `few`
    columns a thread has rows alone, in turn."""
    if m * n < DENSE_LEAST or not 1 < n <= most.get(widest, 0):
        return None
    if few:
        return dense_rows(n, widest, 1, turns=DENSE_TURNS)
    per = widest // 4  # elements of a word
    threads = power(-(-(n + per - 1) // (per * each)), 2, DENSE_CTA)
    while True:
        ways = [dense_rows(n, widest, threads, apart) for apart in (False, threads < WARP)]
        found = min(ways, key=lambda by: _meeting(n, per, by))  # the first, if they are alike
        if _meeting(n, per, found) <= DENSE_MEET:
            return found
        threads *= 2


def dense_rows(n: int, widest: int, threads: int, apart: bool = False, turns: int = 1) -> DenseRows:
    """How dense rows of `n` elements are shared by so many threads each, which have at most so many
    rows in turn."""
    rows = max(1, CTA // threads)
    turns = max(1, min(turns, DENSE_RUN // (rows * n * 16 // widest)))
    vectors = -(-(rows * turns * n + widest - 1) // (rows * threads * widest))
    tile = RowTile(rows, threads, 1, vectors, widest, False)
    return DenseRows(tile, words_of(n, tile), turns, apart)


def _meeting(n: int, per: int, by: DenseRows) -> int:
    """The lanes of a warp that read one bank of smem at one time, of rows of `n` elements one after
    another, `per` of a word."""
    banks, threads = [0] * WARP, by.tile.threads
    each = by.tile.num_threads // WARP * by.turns if by.apart else 1
    for lane in range(WARP):
        banks[(lane // threads * each * n // per + lane % threads) % WARP] += 1
    return max(banks)


def one_cta(other: RowTile) -> RowTile:
    """One CTA with twice the threads instead of two CTAs sharing a row, where sharing is slower
    for rows that are only read (docs/facts/rows.md#rows-cross-entropy-h200); any other tile
    unchanged."""
    if other.ctas != 2:
        return other
    return replace(other, threads=2 * other.threads, ctas=1)


def softmax(
    m: int, n: int, bits: int, arch_name: str, unit: int, shifted: bool = False,
    largest: int = LARGE_CLUSTER,
) -> RowTile:  # fmt: skip
    """The softmax tile for `m` rows of `n` elements, with clusters of at most `largest` CTAs; other
    arguments as of `tile`."""
    large = largest >= LARGE_CLUSTER and arch_name in LARGE_ARCHS
    whole = not shifted and unit * bits == 8 * VECTOR_BYTES
    if m * n < BULK_LEAST:
        vectors = -(-n // unit)
        threads = power(-(-vectors // LARGE_CLUSTER), CTA, 4 * CTA)
        each = -(-vectors // (LARGE_CLUSTER * threads))
        if large and whole and m <= FEW_ROWS and vectors > FEW_SOFTMAX and each <= WIDE:
            return RowTile(1, threads, LARGE_CLUSTER, each, unit)
        return tile(n, bits, arch_name, unit, shifted)
    if large and whole and n >= SOFTMAX_LARGE[bits]:
        threads, ctas = 2 * CTA, LARGE_CLUSTER
        vectors = -(-n // (threads * ctas * unit))
        if vectors <= 2 * MOST:
            return RowTile(1, threads, ctas, vectors, unit)
    if large and shifted and bits == 32 and unit == 4 and n >= SOFTMAX_ODD_LEAST:
        for most, (threads, ctas) in SOFTMAX_ODD_FP32.items():
            if n <= most:
                vectors = -(-(n + unit - 1) // (threads * ctas * unit))
                return RowTile(1, threads, ctas, vectors, unit, False, True)
    found = tile(n, bits, arch_name, unit, shifted, SOFTMAX_WIDE[not shifted])
    if not shifted:
        return two_ctas(found)
    for (first, last), (threads, ctas) in SOFTMAX_ODD.items():
        if found.width == 8 and first <= n <= last and found.ctas >= ctas:
            vectors = -(-(n + found.lead) // (threads * ctas * found.width))
            inner = vectors <= WIDE
            return replace(found, threads=threads, ctas=ctas, vectors=vectors, rows=1, inner=inner)
    return found


def softmax_gradient(n: int, bits: int, arch_name: str, unit: int, shifted: bool) -> RowTile:
    """The tile of a softmax's gradient for rows of `n` elements; other arguments as of `tile`."""
    found = tile(n, bits, arch_name, unit, shifted)
    first, last = GRADIENT_ODD
    if shifted and found.width == 8 and first <= n <= last and found.ctas <= CLUSTER // 2:
        vectors = -(-(n + found.lead) // (2 * CTA * found.width))
        if arch(arch_name).capability >= (9, 0):
            return replace(found, rows=1, threads=CTA, ctas=2, vectors=vectors, inner=True)
    return inner(found) if found.width == 8 else found


def cross_entropy(n: int, bits: int, arch_name: str, unit: int, shifted: bool) -> RowTile:
    """The cross-entropy tile for rows of `n` logits; other arguments as of `tile`. For unaligned
    rows few threads take many vectors each, since every row has ends to handle."""
    found = tile(n, bits, arch_name, unit, shifted, MOST, LEAST_THREADS, in_warp=IN_WARP)
    vectors = -(-(n + found.lead) // (found.threads // 2 * found.width))
    if shifted and 8 < found.threads <= WARP and vectors <= ODD_LOSSES:
        rows = 2 * found.rows
        found = replace(found, rows=rows, threads=found.threads // 2, vectors=vectors)
    return inner(one_cta(found))


def rms_norm(
    m: int, n: int, bits: int, arch_name: str, unit: int, shifted: bool, lines: bool
) -> RowTile:
    """The RMS norm tile for `m` rows of `n` elements in kernels that are not persistent; other
    arguments as of `tile`."""
    found = tile(n, bits, arch_name, unit, shifted, NORM_WIDE, LEAST_THREADS, lines, IN_WARP)
    return found if m * n < BULK_LEAST or found.vectors >= WIDE else one_cta(found)


def inner(other: RowTile) -> RowTile:
    """The tile for rows that are only read, whose inner vectors skip the bounds check however many
    a thread has (docs/facts/rows.md#rows-odd-ends)."""
    return replace(other, inner=not other.aligned and other.threads * other.ctas > 1)


def two_ctas(other: RowTile) -> RowTile:
    """Two CTAs of 256 threads instead of four of 128, which are slower
    (docs/facts/rows.md#rows-softmax-wide); any other tile unchanged."""
    if (other.threads, other.ctas) != (CTA, 4):
        return other
    return replace(other, threads=2 * CTA, ctas=2)


def part(n: int, bits: int, unit: int, shifted: bool = False) -> RowTile:
    """The tile for equal parts of a row of `n` elements, in kernels that process each part
    independently: as many parts as it takes to leave a thread at most WIDE vectors."""
    width = min(unit, VECTOR_BYTES * 8 // bits)
    vectors = -(-(n + (width - 1) * shifted) // width)
    parts = -(-vectors // (WIDE * CTA))
    return RowTile(1, CTA, 1, -(-vectors // (CTA * parts)), width, not shifted)


def walk(bits: int, unit: int, shifted: bool = False, rows_of_sm: float | None = None) -> RowTile:
    """The tile of one CTA that loops over a long row, part by part; its threads, by how many rows
    an SM has, such that few of the last rows run alone."""
    threads = 2 * CTA
    if rows_of_sm is not None and rows_of_sm <= WALKS_FEW:
        threads = 4 * CTA
    elif rows_of_sm is not None and WALKS_SOME < rows_of_sm <= WALKS_MANY:
        threads = CTA
    return RowTile(1, threads, 1, WIDE, min(unit, VECTOR_BYTES * 8 // bits), not shifted)


def walk_in_turns(n: int, bits: int, unit: int, shifted: bool, rows_of_sm: float) -> RowTile | None:
    """The tile of CTAs that stay and walk along one long row after the other; None where each CTA
    has one row: all run at one time then, or nearly."""
    if not any(least < rows_of_sm <= most for least, most in IN_TURNS):
        return None
    large = rows_of_sm > WALKS_MANY and n * bits // 8 >= IN_TURNS_BYTES
    return replace(walk(bits, unit, shifted), threads=4 * CTA if large else 2 * CTA)


def scan(n: int, bits: int, unit: int, shifted: bool = False) -> RowTile:
    """The tile for scans: one CTA for a whole row, or large parts, so that look-back spans few."""
    width = min(unit, VECTOR_BYTES * 8 // bits)
    vectors = -(-(n + (width - 1) * shifted) // width)
    threads = power(-(-vectors // WIDE), 32, SCANNERS)
    per_thread = min(MOST, -(-vectors // threads))
    return RowTile(max(1, CTA // threads), threads, 1, per_thread, width, not shifted)


def scan_in_cluster(
    m: int, n: int, bits: int, unit: int, shifted: bool, arch_name: str,
    largest: int = LARGE_CLUSTER,
) -> tuple[RowTile, int] | None:  # fmt: skip
    """The tile for a part of each of few long rows that clusters of at most `largest` CTAs scan,
    and the parts of a row; None for others."""
    width = min(unit, VECTOR_BYTES * 8 // bits)
    vectors = -(-(n + (width - 1) * shifted) // width)
    if arch(arch_name).capability < (9, 0) or m * n > FEW or vectors <= 2 * SCANNERS:
        return None
    threads, ctas = SCANNERS, power(-(-vectors // SCANNERS), 2, CLUSTER)
    if m <= FEW_ROWS and largest >= LARGE_CLUSTER and arch_name in LARGE_ARCHS:
        threads, ctas = FEW_SCANNERS, power(-(-vectors // FEW_SCANNERS), 2, LARGE_CLUSTER)
    each = -(-vectors // (ctas * threads))
    if each > WIDE:
        return None
    return RowTile(1, threads, 1, each, width, not shifted), ctas


def few(m: int, n: int, unit: int, bits: int, arch_name: str) -> RowTile | None:
    """The tile of `m` rows of `n` elements that are few in all, of which `unit` elements begin each
    row: those that begin anywhere are loaded by as many, which is less to do than ends are; of a
    few rows of whole vectors a thread has one. None for others."""
    widest = VECTOR_BYTES * 8 // bits
    vectors, clusters = -(-n // unit), arch(arch_name).capability >= (9, 0)
    if m * n > FEW or n < 1:
        return None
    if unit == widest:
        if WARP < vectors <= CTA and m <= CTA:
            return RowTile(1, CTA, 1, 1, unit)
        if clusters and 4 * CTA < vectors <= 8 * CTA and m <= WARP:
            return RowTile(1, CTA, 4, 2, unit)
        return None
    each = max(1, FEW_EACH // unit)
    most = (FEW_CTA if n <= FEW_LONG else 2 * FEW_CTA) if clusters else 1024
    threads = power(-(-vectors // each), LEAST_THREADS, most)
    ctas = power(-(-vectors // (each * threads)), 1, CLUSTER) if clusters else 1
    per_thread = -(-vectors // (threads * ctas))
    if per_thread * unit > MOST:
        return None
    return RowTile(max(1, CTA // threads), threads, ctas, per_thread, unit)


def one_cluster(
    elements: int, part: RowTile, threads: int, arch_name: str, largest: int = CLUSTER,
    most: int | None = None,
) -> RowTile | None:  # fmt: skip
    """The tile of the only cluster that takes few elements, which others would take by `part`: what
    its CTAs find is added up without a word of global memory. None for more elements or fewer, and
    where there are no clusters."""
    if arch(arch_name).capability < (9, 0) or elements > (most or ONE_CLUSTER):
        return None
    vectors = -(-(elements + part.lead) // part.width)
    largest = largest if arch_name in LARGE_ARCHS else CLUSTER
    ctas = power(-(-vectors // threads), 1, largest)
    if ctas == 1:
        return None
    return RowTile(1, threads, ctas, -(-vectors // (ctas * threads)), part.width, part.aligned)


def losses_in_cluster(
    m: int, n: int, unit: int, arch_name: str, largest: int = CLUSTER
) -> tuple[RowTile, int] | None:
    """The tile of few rows of losses, of which `unit` elements begin each, in each CTA of the only
    cluster, and its CTAs, `largest` at most. None for more, and where there are no clusters."""
    if arch(arch_name).capability < (9, 0) or not 2 <= m * n <= ONE_CLUSTER:
        return None
    ctas = power(m, 1, largest if arch_name in LARGE_ARCHS else CLUSTER)
    rows, vectors = power(-(-m // ctas), 1, ROWS_OF_CTA), -(-n // unit)
    if m > ctas * rows:
        return None
    for most in TOGETHER:
        threads = power(vectors, LEAST_THREADS, most // rows)
        each, rows_of_cta = -(-vectors // threads), max(rows, WARP // threads)
        if each <= WIDE or (most == TOGETHER[-1] and each * unit <= IN_CTA):
            return RowTile(rows_of_cta, threads, 1, each, unit), ctas
    return None


def power(x: int, least: int, most: int) -> int:
    """The smallest power of two that is at least x, clamped to the bounds."""
    return min(most, max(least, 1 << (x - 1).bit_length()))
