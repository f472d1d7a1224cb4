"""How a rotary embedding's heads are shared: by vectors of threads, or in chunks by bulk copies."""

from __future__ import annotations

from typing import NamedTuple

from cutex.arch import arch
from cutex.device.row.tile import VECTOR_BYTES, slot_bytes
from cutex.kernels.row.choose import BULK_SPARE

# heads of a thread at most, whose pairs are halves or neighbours, of so many elements in all
# (docs/facts/rows.md#rows-rope-heads)
HEADS, MANY = {False: 2, True: 4}, 2**24
# chunks by bulk copies (docs/facts/rows.md#rows-rope-tickets): elements that fill a GPU; bytes of x
# in a chunk, at most and at least; of a token at most, since of longer ones threads' vectors are
# quicker; what a chunk's room is a multiple of; threads and CTAs of an SM; slots
CHUNK_LEAST, CHUNK_ROOM = 1 << 22, 2 << 10
CHUNK_BYTES, CHUNK_SHORT, CHUNK_TOKEN = 16 << 10, 12 << 10, 6 << 10
CHUNK_THREADS, CHUNK_CTAS, CHUNK_SLOTS = 256, 2, (3, 6)


class Chunks(NamedTuple):
    """Tokens of a chunk; elements of x, and of cos and of sin, that a slot has room for; slots."""

    tokens: int
    elements: int
    angles: int
    slots: int


def heads_of_thread(elements: int, heads: int, interleaved: bool) -> int:
    """The heads that a thread takes of a tensor of so many elements: one where they are few."""
    if elements < MANY:
        return 1
    return next(n for n in range(HEADS[interleaved], 0, -1) if heads % n == 0)


def chunks(
    shape: tuple[int, ...], angles: int, size: int, table_size: int, arch_name: str
) -> Chunks | None:
    """The chunks of dense x of a `shape` (B, T, H, D), elements of `size` bytes, turned by so many
    angles of `table_size` bytes each; None where threads take vectors."""
    batch, tokens, heads, d = shape
    of = arch(arch_name)
    whole = all(n % VECTOR_BYTES == 0 for n in (d * size, angles * size, angles * table_size))
    if of.capability < (9, 0) or batch * tokens * heads * d < CHUNK_LEAST or not whole:
        return None
    each = max(1, min(tokens, CHUNK_BYTES // (heads * d * size)))
    each = -(-tokens // -(-tokens // each))  # of one size, but for an entry's last
    if each * heads * d * size < CHUNK_SHORT or heads * d * size > CHUNK_TOKEN:
        return None
    rooms = [_room(each * heads * d * size), _room(each * angles * table_size)]
    slot = slot_bytes(rooms[0]) + 2 * slot_bytes(rooms[1])
    least, most = CHUNK_SLOTS
    slots = min(most, (of.smem_per_cta // CHUNK_CTAS - BULK_SPARE // CHUNK_CTAS) // slot)
    if slots < least:
        return None
    return Chunks(each, rooms[0] // size, rooms[1] // table_size, slots)


def _room(num_bytes: int) -> int:
    """The bytes of a slot for so many, few of which there are."""
    return -(-num_bytes // CHUNK_ROOM) * CHUNK_ROOM
