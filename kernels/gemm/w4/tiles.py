"""What a slot of the ring takes of a packed weight and of x, the same on both archs.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from cutex.problem.w4.layout import STRIP, W4Format


class WeightTiles:
    """Bytes of a config whose first operand, the rows of the product, is a packed weight."""

    format: W4Format
    tile_m: int
    tile_n: int
    k_bytes: int

    @property
    def strips(self) -> int:
        """The strips of weight in a tile."""
        return self.tile_m // STRIP

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weight in one slot."""
        return self.strips * self.format.words * 4

    @property
    def x_bytes(self) -> int:
        """Bytes of x in one slot: those that TMA brings."""
        return self.tile_n * self.k_bytes
