"""Which rows groups of CTAs without a cluster share, and how. Does not import the DSL."""

from __future__ import annotations

from typing import NamedTuple

from cutex.arch import arch
from cutex.device.row.tile import VECTOR_BYTES, RowTile, slot_bytes
from cutex.kernels.row.choose import BULK_LEAST, BULK_SPARE

THREADS, RESIDENT = 512, 1  # of a CTA, that have parts of rows; CTAs of an SM
MOST_STAGES = 12
AHEAD = 4  # turns from a row's sums to its end
BETTER = 1.01  # the share of SMs and turns that is not idle, for which a row has more sharers
LOADING = 2  # slots at least, beside those of rows begun and of one on its way out
# bytes of a CTA's part of a row: fewer are more instructions, of more too few rows are on their way
# (docs/facts/rows.md#rows-norm-groups)
PART = 12 << 10, 25 << 10
# which rows: layer norms, or RMS norms, by the elements of a vector and whether rows begin with
# one, from so many columns on
FROM = {
    (True, 8, False): 180_225, (True, 4, False): 163_841, (True, 4, True): 163_841,
    (False, 8, False): 229_377,
}  # fmt: skip


def by_groups(
    m: int, n: int, width: int, aligned: bool, centred: bool, sms: int, arch_name: str
) -> Groups | None:
    """How groups of CTAs on `sms` share `m` dense rows of `n` elements; other arguments as of
    `groups`. None where others are quicker, and on archs without bulk copies."""
    of, ctas = arch(arch_name), sms * RESIDENT
    few = m * n < BULK_LEAST or n < FROM.get((centred, width, aligned), n + 1)
    if few or of.capability < (9, 0):
        return None
    best, found = 0.0, None
    for sharers in range(2, ctas + 1):
        part, count = -(-n // (8 * sharers)) * 128 // width, count_of(m, n, width, ctas, sharers)
        if not (PART[0] <= part <= PART[1] and count):
            continue
        made = groups(n, width, aligned, sharers, of.smem_per_cta)
        busy = sharers * count / ctas * (m / count) / -(-m // count)
        if made is not None and busy > best * BETTER:
            best, found = busy, made
    return found


def count_of(m: int, n: int, width: int, ctas: int, sharers: int) -> int:
    """How many groups of `sharers` of `ctas` CTAs share `m` rows: an even number if rows begin in
    either half of a word, so that those of a group begin alike; 0 if there is none."""
    count = min(m, ctas // sharers)
    return count if n % (width // 4) == 0 or m == 1 else count // 2 * 2


class Groups(NamedTuple):
    """How rows are shared by groups of CTAs: see GroupsConfig."""

    tile: RowTile
    words: int
    stages: int
    resident: int
    vector: int
    open: int
    ahead: int
    sharers: int


def groups(
    n: int, width: int, aligned: bool, sharers: int, smem: int, *, ahead: int = AHEAD,
    stages: int = MOST_STAGES, threads: int = THREADS, resident: int = RESIDENT,
) -> Groups | None:  # fmt: skip
    """How groups of `sharers` CTAs share dense rows of `n` elements, of which a vector has `width`;
    aligned: rows begin with vectors. None if a part of a row does not fit."""
    tile = RowTile(1, threads, 1, 1, width, False)
    per, part = width // 4, -(-n // (8 * sharers)) * 8
    shortest = n - (sharers - 1) * part
    # of the last CTA's shorter part all but so many vectors, or words, are whole
    if aligned:
        vectors, vector = -(-part // (threads * width)), VECTOR_BYTES // 4
        words, last = 4 * vectors, vectors - shortest // (threads * width)
    else:
        words, vector = -(-(part + per - 1) // (threads * per)), 0
        last = words - shortest // (threads * per)
    slot = slot_bytes(threads * words * 4)
    held = min(stages, (smem // resident - BULK_SPARE) // slot)
    if shortest < 1 or held < ahead + 1 + LOADING:
        return None
    return Groups(tile, words, held, resident, vector, last, ahead, sharers)
