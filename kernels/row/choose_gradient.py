"""Tiles for a norm's gradient, whose threads accumulate column sums."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cutex.arch import arch
from cutex.device.row.tile import RowTile, slot_bytes
from cutex.kernels.row.choose import (
    BULK_LEAST,
    BULK_SPARE,
    BULK_THREADS,
    CLUSTER,
    CTA,
    LARGE_ARCHS,
    LARGE_CLUSTER,
    WIDE,
    vectors_of,
    words_of,
)

# rows whose threads keep sums of their columns (docs/facts/rows.md#rows-gradient-tiles): threads
# and CTAs of those that are loaded by the element, by the least and most columns; the vectors of a
# thread of a cluster, from which on it has twice as many
SUMS_BY_ELEMENT = {
    (129, 208): (32, 1), (209, 256): (16, 1), (2049, 5120): (256, 1), (10_241, 24_576): (512, 2),
    (24_577, 53_248): (256, 8),
}  # fmt: skip
SUMS_MOST = 5
SUMS_FP32 = 145, 2048  # columns of fp32 of which half the threads have a row
# and short rows of four threads, by the elements of a vector (rows.md#rows-gradient-four)
SUMS_FOUR = {8: (129, 160), 4: (97, 144)}
# gradients of a norm's dense rows by bulk copies (docs/facts/rows.md#rows-gradient-bulk): the
# elements of a thread, by the threads of a CTA, from which on others share a row; registers of a
# thread for sums, and for weights beside them, by the bytes of one; slots at most, and as many as
# keep rows on their way
SUMS_THREADS = {32: 14, 64: 22, 128: 26, 256: 26, 512: 26}
SUMS_WORDS = {0: 80, 2: 70, 4: 80}
SUMS_SLOTS = (4, 3)
LEAST_SLOTS = 2
# which rows: from so many columns on, by the elements of a vector, of those that begin anywhere,
# (docs/facts/rows.md#rows-gradient-short-bulk), and of those that begin with vectors
SUMS_ANYWHERE = {8: 257, 4: 193}
SUMS_ALIGNED = {8: 98_305, 4: 65_537}
# and between two lengths, by the elements of a vector and the sums of columns
# (docs/facts/rows.md#rows-gradient-bulk-middle)
SUMS_MIDDLE = {
    (8, 1): (7169, 32_768), (8, 2): (4865, 32_768),
    (4, 1): (24_577, 32_767), (4, 2): (24_577, 32_767),
}  # fmt: skip
# threads and CTAs of a row, and whether its sums are relayed, by the elements of a vector and the
# sums of columns, and by the least and most columns: of rows that begin with vectors
# (docs/facts/rows.md#rows-gradient-vectors), and anywhere (rows.md#rows-gradient-large)
Spans = dict[tuple[int, int], tuple[int, int, bool]]
SUMS_VECTORS: dict[tuple[int, int], Spans] = {
    (8, 1): {(16_385, 24_576): (512, 2, False), (24_577, 65_536): (512, 4, False),
             (65_537, 98_304): (512, 8, False), (126_977, 196_608): (512, 16, True),
             (196_609, 262_144): (512, 16, False)},
    (8, 2): {(2049, 4096): (256, 1, False), (8192, 12_288): (512, 1, False),
             (12_289, 24_576): (512, 2, False), (24_577, 65_536): (512, 4, False),
             (65_537, 98_304): (512, 8, False), (122_881, 196_608): (512, 16, True),
             (196_609, 262_144): (512, 16, False)},
    (4, 1): {(1153, 1536): (128, 1, False), (2561, 3072): (256, 1, False),
             (163_841, 212_992): (512, 16, False)},
    (4, 2): {(2561, 3072): (256, 1, False), (90_113, 114_688): (512, 16, True),
             (114_689, 212_992): (512, 16, False)},
}  # fmt: skip
SUMS_LARGE: dict[tuple[int, int], Spans] = {
    (8, 1): {(180_225, 262_144): (512, 16, True)},
    (8, 2): {(122_881, 262_144): (512, 16, True)},
    (4, 1): {(163_841, 212_992): (512, 16, False)},
    (4, 2): {(90_113, 212_992): (512, 16, False)},
}


def with_sums(n: int, other: RowTile, centred: bool = True) -> RowTile:
    """The tile for rows of `n` elements whose threads accumulate column sums, as the gradient of a
    layer norm or RMS norm does: `other`, or one with other threads and CTAs."""
    threads, ctas = other.threads, other.ctas
    if other.width == 1:
        for (least, most), found in SUMS_BY_ELEMENT.items():
            if least <= n <= most and (ctas > 1 or n < CTA * WIDE):
                threads, ctas = found
    elif other.width == 8 and threads == CTA and ctas == CLUSTER and other.vectors > SUMS_MOST:
        threads = 2 * CTA
    elif other.width == 4 and ctas == 1 and SUMS_FP32[0] <= n <= SUMS_FP32[1]:
        threads //= 2
    first, last = SUMS_FOUR.get(other.width, (0, 0))
    if first <= n <= last and ctas == 1:
        threads = 4
    vectors, rows = -(-n // (threads * ctas * other.width)), other.rows
    # an RMS norm's rows of three vectors a thread, too (rows.md#rows-gradient-four)
    if threads != other.threads or (not centred and other.width == 8 and vectors == WIDE - 1):
        rows = max(1, CTA // threads)
    return replace(other, rows=rows, threads=threads, ctas=ctas, vectors=vectors)


class BulkGradient(NamedTuple):
    """How rows of a norm's gradient are bulk-copied: see BackwardBulkConfig."""

    tile: RowTile
    words: int
    slots: int
    resident: int
    held: str
    vector: int = 0
    open: int = 0
    relays: bool = False


def bulk_gradient(
    m: int, n: int, widest: int, sums: int, weight_bytes: int, arch_name: str,
    least: int = BULK_LEAST, *, aligned: bool = False, largest: int = LARGE_CLUSTER,
) -> BulkGradient | None:  # fmt: skip
    """How the bulk-copy gradient of a norm processes `m` dense rows of `n` elements.

    widest: the elements of 16 bytes; sums: column sums wanted, 0 to 2; weight_bytes: of one weight,
    0 if there are none; aligned: rows and weights start on 16 bytes; largest: the most CTAs in a
    cluster. None for rows that another kernel handles better, that no cluster holds, and on archs
    without bulk copies."""
    of = arch(arch_name)
    largest = min(largest, LARGE_CLUSTER if arch_name in LARGE_ARCHS else CLUSTER)
    if of.capability >= (9, 0) and m * n >= least:
        spans = (SUMS_VECTORS if aligned else SUMS_LARGE).get((widest, sums), {})
        for (first, last), (threads, ctas, relays) in spans.items():
            tile = RowTile(1, threads, ctas, 1, widest, False)
            if first <= n <= last and ctas <= largest:
                by = _by_tile(n, tile, relays, aligned, of.smem_per_cta - BULK_SPARE)
                if by is not None:
                    return by
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
        ((LEAST_SLOTS,), False, ("registers", "smem", "memory")),
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


def _by_tile(n: int, tile: RowTile, relays: bool, vectors: bool, room: int) -> BulkGradient | None:
    """The same for one tile, with weights in registers, by vectors or words; None if it does not
    fit."""
    words, vector, last = vectors_of(n, tile) if vectors else (words_of(n, tile), 0, 0)
    slot = slot_bytes(tile.threads * words * 4)
    least = LEAST_SLOTS + relays
    for resident in range(BULK_THREADS // tile.threads, 0, -1):
        slots = min(SUMS_SLOTS[0], (room // resident // slot + 1) // 2)
        if slots >= least:
            return BulkGradient(tile, words, slots, resident, "registers", vector, last, relays)
    return None


def _bulk_gradient(
    n: int, tile: RowTile, sums: int, weight_bytes: int, room: int, slots: tuple[int, ...],
    held: str,
) -> BulkGradient | None:  # fmt: skip
    """The same for one tile, with weights `held` in the given memory; None if it does not fit."""
    words, resident = words_of(n, tile), BULK_THREADS // tile.threads
    elements = words * tile.width // 4
    in_registers = elements * (sums + weight_bytes / 4)
    if elements * sums > SUMS_WORDS[0]:
        return None
    if held == "registers" and in_registers > SUMS_WORDS[weight_bytes]:
        return None
    slot = slot_bytes(tile.threads * words * 4)
    left = room // resident - (held == "smem") * tile.threads * elements * weight_bytes
    for count in slots:
        if (2 * count - 1) * slot <= left:
            return BulkGradient(tile, words, count, resident, held)
    return None
