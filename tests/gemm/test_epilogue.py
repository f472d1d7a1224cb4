from __future__ import annotations

import pytest

from cutex.device.epilogue.sm100.tma_store import stores_until_reuse

SHAPES = [(parts, slots) for parts in range(2, 9) for slots in (2, 3, 4) if parts % slots != 1]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("parts, slots", SHAPES)
def test_the_stores_between_two_uses_of_a_slot_are_counted(parts: int, slots: int) -> None:
    """Against a walk over three tiles; at least two, or a slot would be written while a store reads
    it."""
    uses: dict[int, int] = {}
    for i in range(3 * parts):
        part = i % parts
        slot = part % slots
        if i >= 2 * parts and slot in uses:
            found = stores_until_reuse(part, parts, slots)
            assert 2 <= found <= i - uses[slot]
        uses[slot] = i
