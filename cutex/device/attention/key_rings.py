"""Products and KeyRings: what a BlockLoop multiplies, and the rings that its operands come from."""

from __future__ import annotations

from typing import NamedTuple

from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.pipeline import PipelineState, Ring

State = tuple[PipelineState, PipelineState]  # states in the rings of K and of V


class Products(NamedTuple):
    """The products of a tile of 64 rows."""

    qk: WgmmaProduct  # into an accumulator of each step's own
    pv: WgmmaProduct  # of P in registers, into O
    half_qk: WgmmaProduct | None = None  # of the first half of a block's keys


class KeyRings(NamedTuple):
    """The rings of K and of V."""

    k: Ring
    v: Ring

    def consumer(self) -> State:
        return self.k.consumer(), self.v.consumer()
