"""Lanes of one store that write different values to one place.

If a store of a warp writes to one place for several of its threads, one of them is the last, and
which is not defined (CUDA C++ Programming Guide, SIMT Architecture). Where all write the same value
that is no matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer
from cutex.sim.machine.memory import Part
from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class OneStore(Observer):
    """The stores of all warps."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        if ins.name != "st":
            return  # NOTE: atomics come one after another
        pair = self._clash(where.warps, where.addresses.astype(np.int64), values)
        if pair is not None:
            address = int(where.addresses[pair[0]])
            region = self.m.memory.find(address)
            place = f"0x{address:x}" if region is None else region.element(address - region.base)
            self._report(where.warps, where.lanes, pair, place, ins)

    def shared_stores(
        self, where: Lanes, places: np.ndarray, values: np.ndarray, ins: Instruction
    ) -> None:
        if ins.name not in ("st", "stmatrix"):
            return
        pair = self._clash(where.warps, places, values)
        if pair is not None:
            name = f"shared memory 0x{int(places[pair[0]]) % self.m.smem_bytes:x}"
            self._report(where.warps, where.lanes, pair, name, ins)

    def _clash(
        self, warps: np.ndarray, places: np.ndarray, values: np.ndarray
    ) -> tuple[int, int] | None:
        """Two lanes of one warp that write different ``values`` (n, bytes) to one of ``places``
        (n,).
        """
        if len(places) < 2:
            return None
        step = places[1:] - places[:-1]
        if ((step > 0) | (warps[1:] != warps[:-1])).all():
            return None  # NOTE: lanes come in order, so most stores end here
        order = np.lexsort((places, warps))
        first, second = order[:-1], order[1:]
        same = (places[first] == places[second]) & (warps[first] == warps[second])
        if not same.any():
            return None
        differs = same & (values[first] != values[second]).any(1)
        if not differs.any():
            return None
        k = int(differs.argmax())
        return int(first[k]), int(second[k])

    def _report(
        self,
        warps: np.ndarray,
        lanes: np.ndarray,
        pair: tuple[int, int],
        place: str,
        ins: Instruction,
    ) -> None:
        one, other = sorted(int(lanes[k]) for k in pair)
        self.m.findings.add(
            "race",
            f"lanes {one} and {other} of {self.m.grid.name_warp(int(warps[pair[0]]))} store "
            f"different values to {place} in one instruction: which of them stays is not defined",
            ins,
        )
