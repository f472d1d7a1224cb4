"""How rows of logits are shared by threads that overwrite them with their gradients."""

from __future__ import annotations

from cutex.arch import arch
from cutex.device.row.tile import RowTile
from cutex.kernels.row.choose import (
    BULK_LEAST,
    BULK_SPARE,
    ROWS_TILES,
    BulkRows,
    bulk_rows_of,
    rows_by_tickets,
)

# rows of logits, of 16 bits, that come and go by bulk copies: from so many columns on
# (docs/facts/rows.md#rows-in-place-tickets)
IN_PLACE = 8193


def in_place(m: int, n: int, unit: int, arch_name: str) -> BulkRows | None:
    """How `m` dense rows of `n` logits, each of which begins with `unit` elements, are bulk-copied,
    and overwritten with their gradient; None where threads load them.

    NOTE: of rows that begin anywhere a copy brings elements of the rows beside, which others
    overwrite."""
    of = arch(arch_name)
    if of.capability < (9, 0) or m * n < BULK_LEAST or unit != 8 or n < IN_PLACE:
        return None
    tiles = [RowTile(1, threads, ctas, 1, unit, False) for threads, ctas in ROWS_TILES]
    ways = [bulk_rows_of(n, tile, of.smem_per_cta - BULK_SPARE) for tile in tiles]
    return next((by for by in ways if by is not None and rows_by_tickets(by)), None)
