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
Clusters = dict[tuple[int, int], tuple[int, int]]
CLUSTER = 8  # the largest that every GPU with clusters takes
LARGE_CLUSTER, LARGE_ARCHS = 16, ("sm_90a", "sm_100a")  # of those of these archs some do
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
BULK_LONGEST = 56  # of an RMS norm, whose threads have no bias
BULK_THREADS = 512
BULK_CTA = 128
BULK_STAGES = {32: 3, 64: 4, 512: 6}
BULK_SPARE = 8 << 10
LEAST_RELAYED = 4  # slots of a cluster's rows whose sums are relayed, at least
BULK_LEAST = 1 << 21
# which rows: those that begin anywhere from so many columns on, of a layer norm's or an RMS norm's,
# by the elements of a vector; of a layer norm's that begin with vectors, those of so many vectors a
# thread between two lengths, and those between others
BULK_ANYWHERE = {8: {True: 289, False: 1153}, 4: {True: 513, False: 513}}
BULK_VECTORS, BULK_SHORT = 3, (160, 2048)
BULK_LONG = ((20_481, 90_112), (98_305, 1 << 20))
# and of an RMS norm's, from so many columns on those that begin within a line of memory
BULK_LINES, LINE_BYTES = 20_481, 128
# threads and CTAs of long rows of 16 bits by the least and most columns of a layer norm's or an RMS
# norm's (docs/facts/rows.md#rows-norm-relayed): of rows that begin with vectors, and anywhere
BULK_VECTORS_LONG: dict[bool, Clusters] = {
    True: {(20_481, 36_863): (512, 2), (36_864, 65_536): (512, 4), (65_537, 131_072): (512, 8),
           (131_073, 262_144): (512, 16)},
    False: {},
}  # fmt: skip
BULK_ANYWHERE_LONG: dict[bool, Clusters] = {
    True: {(36_865, 43_008): (256, 4), (43_009, 90_112): (256, 8),
           (90_113, 180_224): (512, 8), (180_225, 360_448): (512, 16)},
    False: {},
}  # fmt: skip

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
# and no longer ones
RESIDENT_LONG, RESIDENT_FULL, RESIDENT_MOST = 20_481, 0.85, 65_536

# rows whose threads keep sums of their columns (docs/facts/rows.md#rows-gradient-tiles): threads
# and CTAs of those that are loaded by the element, by the least and most columns; the vectors of a
# thread of a cluster, from which on it has twice as many
SUMS_BY_ELEMENT = {
    (129, 256): (16, 1), (2049, 5120): (256, 1), (10_241, 24_576): (512, 2),
    (24_577, 53_248): (256, 8),
}  # fmt: skip
SUMS_MOST = 5
SUMS_FP32 = 193, 2048  # columns of fp32 of which half the threads have a row

# gradients of a norm's dense rows by bulk copies (docs/facts/rows.md#rows-gradient-bulk): the
# elements of a thread, by the threads of a CTA, from which on others share a row; registers of a
# thread for sums, and for weights beside them, by the bytes of one; slots at most, and as many as
# keep rows on their way
SUMS_THREADS = {32: 14, 64: 22, 128: 26, 256: 26, 512: 26}
SUMS_WORDS = {0: 80, 2: 70, 4: 80}
SUMS_SLOTS = (4, 3)
# which rows: from so many columns on, by the elements of a vector, of those that begin anywhere,
# and of those that begin with vectors
SUMS_ANYWHERE = {8: 289, 4: 1025}
SUMS_ALIGNED = {8: 98_305, 4: 65_537}
# and between two lengths, by the elements of a vector and the sums of columns
# (docs/facts/rows.md#rows-gradient-bulk-middle)
SUMS_MIDDLE = {
    (8, 1): (7169, 32_768), (8, 2): (4865, 32_768),
    (4, 1): (24_577, 32_767), (4, 2): (24_577, 32_767),
}  # fmt: skip

# rows of a softmax that begin anywhere, by bulk copies (docs/facts/rows.md#rows-softmax-bulk):
# threads of a CTA, the fewest first; elements of a thread and slots at most; from so many columns
# on, by the elements of a vector
ROWS_THREADS = (128, 256, 512)
ROWS_ELEMENTS = 64
ROWS_SLOTS = 6
ROWS_ANYWHERE = {8: 10_234, 4: 32_769}
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


class TooLong(CutexError):
    """A row that no tile holds, by the vectors in which it can be loaded."""


class Bulk(NamedTuple):
    """How rows come by bulk copies: see BulkConfig."""

    tile: RowTile
    words: int
    stages: int
    resident: int
    vector: int
    open: int
    ahead: int


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
    """The tile of rows of `n` elements of so many bits.

    unit: the elements of the widest vector that every row can be loaded by. shifted: rows begin
    anywhere, all operands alike. wide: the vectors of a thread, from which on CTAs share a row: of
    rows that are only read, more than WIDE. least: threads that share a row, at least. lines:
    whether all rows begin with a whole line of memory. in_warp: the vectors of a thread, from which
    on more than one warp share a row. Raises TooLong, in one sentence, for a row that no tile
    holds.
    """
    width = min(unit, VECTOR_BYTES * 8 // bits)
    vectors = -(-(n + (width - 1) * shifted) // width)
    most_ctas = CLUSTER if arch(arch_name).capability >= (9, 0) else 1
    # 4 vectors a thread; then more threads, then more CTAs (docs/facts/rows.md#tile, an H100)
    few = WIDE + shifted  # such a row lies across one vector more (rows.md#rows-odd-tiles)
    threads = _power(-(-vectors // few), least, CTA)
    fewer = _power(-(-vectors // max(few, in_warp)), least, CTA)
    threads = fewer if fewer <= WARP else threads
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
    # NOTE: with more vectors their ends come by the element, and all loads in turn are quicker
    inner = shifted and threads * ctas > 1 and per_thread <= WIDE  # rows.md#rows-odd-ends
    return RowTile(rows, threads, ctas, per_thread, width, not shifted, inner)


def with_sums(n: int, other: RowTile) -> RowTile:
    """The tile of rows of `n` elements whose threads keep sums of their columns, as a norm's
    gradient does: `other`, or one with other threads and CTAs."""
    threads, ctas = other.threads, other.ctas
    if other.width == 1:
        for (least, most), found in SUMS_BY_ELEMENT.items():
            if least <= n <= most and (ctas > 1 or n < CTA * WIDE):
                threads, ctas = found
    elif other.width == 8 and threads == CTA and ctas == CLUSTER and other.vectors > SUMS_MOST:
        threads = 2 * CTA
    elif other.width == 4 and ctas == 1 and SUMS_FP32[0] <= n <= SUMS_FP32[1]:
        threads //= 2
    vectors, rows = -(-n // (threads * ctas * other.width)), other.rows
    if threads != other.threads:
        rows = max(1, CTA // threads)
    return replace(other, rows=rows, threads=threads, ctas=ctas, vectors=vectors)


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
    m: int, n: int, other: RowTile, centred: bool, arch_name: str, least: int = BULK_LEAST, *,
    largest: int = LARGE_CLUSTER,
) -> Bulk | None:  # fmt: skip
    """How `m` rows of `n` elements, a norm's, that lie one after another come by bulk copies, to
    a part of a warp, a CTA or a cluster of `largest` CTAs at most. None for rows that are better
    taken as `other` has them, and where there are no bulk copies."""
    of = arch(arch_name)
    if of.capability < (9, 0) or m * n < least:
        return None
    largest = min(largest, LARGE_CLUSTER if arch_name in LARGE_ARCHS else CLUSTER)
    tables = BULK_VECTORS_LONG if other.aligned else BULK_ANYWHERE_LONG
    for (first, last), (threads, ctas) in tables[centred].items() if other.width == 8 else ():
        if first <= n <= last and ctas <= largest:
            return _bulk(n, threads, ctas, other, centred, of.smem_per_cta)
    if not _is_for_bulk(n, other, centred):
        return None
    for ctas, columns in (BULK_COLUMNS if centred else BULK_COLUMNS | {8: BULK_LONGEST}).items():
        threads = _power(-(-n // (ctas * columns)), 4, 1024)
        found = _bulk(n, threads, ctas, other, centred, of.smem_per_cta)
        if found is not None and found.resident * found.tile.num_threads <= BULK_THREADS // 2:
            found = _bulk(
                n, BULK_THREADS, ctas, other, centred, of.smem_per_cta
            )  # smem has room for a CTA
        if found is not None:
            return found
    return None


def _bulk(n: int, threads: int, ctas: int, other: RowTile, centred: bool, smem: int) -> Bulk | None:
    """The same with so many threads for a row in each of so many CTAs; None without room."""
    rows = max(1, BULK_CTA // threads) if ctas == 1 else 1
    tile = RowTile(rows, threads, ctas, 1, other.width, False)
    words, vector, last = words_of(n, tile, other.aligned), 0, 0
    if other.aligned and rows == 1:
        words, vector, last = vectors_of(n, tile)
    slot = tile.num_threads * words * 4 + 2 * VECTOR_BYTES
    room = smem - BULK_SPARE
    relays = ctas > 1 and centred
    least = LEAST_RELAYED if relays else min(BULK_STAGES.values())
    resident = min(BULK_THREADS // tile.num_threads, room // (least * slot))
    if not resident:
        return None
    most = next(stages for t, stages in BULK_STAGES.items() if threads <= t)
    stages = min(most, room // (resident * slot))
    ahead = (1 + (relays and ctas > CLUSTER)) * (ctas > 1)  # rows.md#rows-norm-relayed
    return Bulk(tile, words, stages, resident, vector, last, ahead)


def _is_for_bulk(n: int, other: RowTile, centred: bool) -> bool:
    """Whether a norm's rows of `n` elements are better taken by bulk copies than as `other`."""
    least = BULK_ANYWHERE.get(other.width)
    if least is None:
        return False
    if not other.aligned:
        return n >= least[centred]
    if not centred:
        return other.width == 8 and n >= BULK_LINES and 2 * n % LINE_BYTES > 0
    short = BULK_SHORT[0] <= n <= BULK_SHORT[1] and other.vectors == BULK_VECTORS
    return other.width == 8 and (short or any(a <= n <= b for a, b in BULK_LONG))


class Resident(NamedTuple):
    """How aligned rows are taken in turn: see ResidentConfig."""

    tile: RowTile
    resident: int


def resident(
    m: int, n: int, other: RowTile, centred: bool, arch_name: str, least: int = BULK_LEAST
) -> Resident | None:
    """How `m` rows of `n` elements, a norm's, whose vectors are of 16 bytes, are taken in turn by
    CTAs that stay. None for rows that are better taken as `other` has them."""
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


class BulkGradient(NamedTuple):
    """How rows of a norm's gradient come by bulk copies: see BackwardBulkConfig."""

    tile: RowTile
    words: int
    slots: int
    resident: int
    held: str


def bulk_gradient(
    m: int, n: int, widest: int, sums: int, weight_bytes: int, arch_name: str,
    least: int = BULK_LEAST,
) -> BulkGradient | None:  # fmt: skip
    """How `m` rows of `n` elements of a norm's gradient that lie one after another come by bulk
    copies: widest: the elements of 16 bytes; sums: of columns, 0 to 2; weight_bytes: of an element
    of the weights, 0 if there are none. None for rows that are better taken otherwise, that no
    cluster holds, and where there are no bulk copies."""
    of = arch(arch_name)
    wanted = (SUMS_ALIGNED if n % widest == 0 else SUMS_ANYWHERE).get(widest)
    if of.capability < (9, 0) or wanted is None or m * n < least:
        return None
    first, last = SUMS_MIDDLE.get((widest, sums), (wanted, 0))
    if n < wanted and not (first <= n <= last and n % widest == 0):
        return None
    room = of.smem_per_cta - BULK_SPARE
    # few elements a thread; as many as it holds; of rows that leave no room for a third slot
    for slots, few, places in (
        (SUMS_SLOTS, True, ("registers", "smem")),
        (SUMS_SLOTS, False, ("registers", "smem", "memory")),
        ((2,), False, ("registers", "smem", "memory")),
    ):
        for ctas in (1, 2, 4, CLUSTER):
            for threads, most in SUMS_THREADS.items():
                tile = RowTile(1, threads, ctas, 1, widest, False)
                if few and words_of(n, tile) * widest // 4 > most:
                    continue
                for held in places if weight_bytes else places[:1]:
                    found = _bulk_gradient(n, tile, sums, weight_bytes, room, slots, held)
                    if found is not None:
                        return found
    return None


def _bulk_gradient(
    n: int, tile: RowTile, sums: int, weight_bytes: int, room: int, slots: tuple[int, ...],
    held: str,
) -> BulkGradient | None:  # fmt: skip
    """The same by a tile, with weights `held` somewhere; None without room."""
    words, resident = words_of(n, tile), BULK_THREADS // tile.threads
    elements = words * tile.width // 4
    in_registers = elements * (sums + weight_bytes / 4)
    if elements * sums > SUMS_WORDS[0]:
        return None
    if held == "registers" and in_registers > SUMS_WORDS[weight_bytes]:
        return None
    slot = tile.threads * words * 4 + 2 * VECTOR_BYTES
    left = room // resident - (held == "smem") * tile.threads * elements * weight_bytes
    for count in slots:
        if (2 * count - 1) * slot <= left:
            return BulkGradient(tile, words, count, resident, held)
    return None


class BulkRows(NamedTuple):
    """How rows come by bulk copies: see RowsBulkConfig."""

    tile: RowTile
    words: int
    slots: int
    resident: int


def bulk_rows(
    m: int, n: int, widest: int, arch_name: str, least: int = BULK_LEAST
) -> BulkRows | None:
    """How `m` rows of `n` elements of a softmax that lie one after another and begin anywhere come
    by bulk copies to CTAs that have one, or a part of one, at a time. widest: the elements of 16
    bytes. None for rows that are better taken otherwise, that no cluster holds, and where there
    are no bulk copies."""
    of = arch(arch_name)
    wanted = ROWS_ANYWHERE.get(widest)
    if of.capability < (9, 0) or wanted is None or m * n < least or n < wanted:
        return None
    if widest == 8 and any(first <= n <= last for first, last in SOFTMAX_ODD):
        return None
    for ctas in (1, 2, 4, CLUSTER):
        for threads in ROWS_THREADS:
            tile = RowTile(1, threads, ctas, 1, widest, False)
            found = _bulk_rows(n, tile, of.smem_per_cta - BULK_SPARE)
            if found is not None:
                return found
    return None


def _bulk_rows(n: int, tile: RowTile, room: int) -> BulkRows | None:
    """The same by a tile; None without room."""
    words, resident = words_of(n, tile), BULK_THREADS // tile.threads
    slot = tile.threads * words * 4 + 2 * VECTOR_BYTES
    slots = min(ROWS_SLOTS, room // resident // slot)
    if words * tile.width // 4 > ROWS_ELEMENTS or slots < 3:
        return None
    return BulkRows(tile, words, slots, resident)


def words_of(n: int, tile: RowTile, whole: bool = False) -> int:
    """The words of 32 bits that a thread of a tile has of a row of `n` elements, or of its CTA's
    part of one. whole: each row begins with a word; else anywhere."""
    per = tile.width // 4  # elements of a word
    part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
    return -(-(part + (per - 1) * (not whole)) // (tile.threads * per))


def vectors_of(n: int, tile: RowTile) -> tuple[int, int, int]:
    """The same in vectors of words, of rows of whole units of 16 bytes: as few words as any have,
    the widest vector that makes no more, and how many of a thread's may lie behind the row."""
    per = tile.width // 4
    part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
    words, vector = min(
        (-(-part // (tile.threads * per * v)) * v, -v) for v in (1, 2, VECTOR_BYTES // 4)
    )
    shortest, all_full = n - (tile.ctas - 1) * part, words * tile.threads * per
    row_of_vectors = tile.threads * per * -vector
    return words, -vector, -(-(all_full - shortest) // row_of_vectors)


def one_cta(other: RowTile) -> RowTile:
    """One CTA of twice the threads instead of two that share a row, of which rows that are only
    read take longer (docs/facts/rows.md#rows-cross-entropy-h200); other tiles as they are."""
    if other.ctas != 2:
        return other
    return replace(other, threads=2 * other.threads, ctas=1)


def softmax(
    m: int, n: int, bits: int, arch_name: str, unit: int, shifted: bool = False,
    largest: int = LARGE_CLUSTER,
) -> RowTile:  # fmt: skip
    """The tile of a softmax of `m` rows of `n` elements, to a cluster of `largest` CTAs at most,
    the others as of `tile`."""
    if m * n < BULK_LEAST:
        return tile(n, bits, arch_name, unit, shifted)
    large = largest >= LARGE_CLUSTER and arch_name in LARGE_ARCHS
    if large and not shifted and unit * bits == 8 * VECTOR_BYTES and n >= SOFTMAX_LARGE[bits]:
        threads, ctas = 2 * CTA, LARGE_CLUSTER
        return RowTile(1, threads, ctas, -(-n // (threads * ctas * unit)), unit)
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
    """The tile of the gradient of a softmax of rows of `n` elements, the others as of `tile`."""
    found = tile(n, bits, arch_name, unit, shifted)
    first, last = GRADIENT_ODD
    if shifted and found.width == 8 and first <= n <= last and found.ctas <= CLUSTER // 2:
        vectors = -(-(n + found.lead) // (2 * CTA * found.width))
        if arch(arch_name).capability >= (9, 0):
            return replace(found, rows=1, threads=CTA, ctas=2, vectors=vectors, inner=True)
    return inner(found) if found.width == 8 else found


def cross_entropy(n: int, bits: int, arch_name: str, unit: int, shifted: bool) -> RowTile:
    """The tile of the losses of rows of `n` logits, the others as of `tile`: of rows that begin
    anywhere, each of which has ends, few threads have many vectors."""
    found = tile(n, bits, arch_name, unit, shifted, MOST, LEAST_THREADS, in_warp=IN_WARP)
    vectors = -(-(n + found.lead) // (found.threads // 2 * found.width))
    if shifted and 8 < found.threads <= WARP and vectors <= ODD_LOSSES:
        rows = 2 * found.rows
        found = replace(found, rows=rows, threads=found.threads // 2, vectors=vectors)
    return inner(one_cta(found))


def rms_norm(
    m: int, n: int, bits: int, arch_name: str, unit: int, shifted: bool, lines: bool
) -> RowTile:
    """The tile of an RMS norm of `m` rows of `n` elements that are not taken in turn, the others as
    of `tile`."""
    found = tile(n, bits, arch_name, unit, shifted, NORM_WIDE, LEAST_THREADS, lines, IN_WARP)
    return found if m * n < BULK_LEAST or found.vectors >= WIDE else one_cta(found)


def inner(other: RowTile) -> RowTile:
    """The tile of rows that are only read, which ask for no end in most vectors, however many a
    thread has (docs/facts/rows.md#rows-odd-ends)."""
    return replace(other, inner=not other.aligned and other.threads * other.ctas > 1)


def two_ctas(other: RowTile) -> RowTile:
    """Two CTAs of 256 threads instead of four of 128, of which rows take longer
    (docs/facts/rows.md#rows-softmax-wide); other tiles as they are."""
    if (other.threads, other.ctas) != (CTA, 4):
        return other
    return replace(other, threads=2 * CTA, ctas=2)


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
