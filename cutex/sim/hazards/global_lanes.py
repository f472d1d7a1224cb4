"""Lanes of a warp beside each other in global memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.global_clashes import GlobalClashes
from cutex.sim.hazards.global_marks import ALONE, LANE, PLAIN, By, Records
from cutex.sim.hazards.global_reports import GlobalReports
from cutex.sim.machine.memory import Region
from cutex.sim.machine.runs import heads_of, lengths_of
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class GlobalLanes:
    """Checks what lanes do with what others of their warp have stored, and loads by the cache of
    constants."""

    def __init__(
        self, machine: Machine, clashes: GlobalClashes, records: Records, reports: GlobalReports
    ) -> None:
        self.m, self.clashes, self.records, self.reports = machine, clashes, records, reports

    def check(
        self,
        last: np.ndarray,
        places: np.ndarray,
        by: By,
        region: Region,
        ins: Instruction,
        write: bool = False,
    ) -> None:
        """Report lanes that read what other lanes of their warp have stored, or store something
        else there, with no sync between. If both are instructions of the whole warp, which executes
        them one after another, that is an advisory of a read, and nothing of a write.
        """
        if not last.any():
            return
        clocks = self.clashes.clocks
        rec, r = last >> LANE, self.records
        own, lanes = by.slots[:, None], by.lanes[:, None]
        late = (last != 0) & (r.slot[rec] == own) & (r.who[rec] == self.clashes.who(by)[:, None])
        late &= ((last & 31) != lanes) & (r.kind[rec] == PLAIN)
        late &= r.count[rec] > clocks.ordered[by.warps, by.slots][:, None]
        if clocks.met:
            shape = last.shape
            warps, of = (
                np.broadcast_to(x[:, None], shape).reshape(-1) for x in (by.warps, by.lanes)
            )
            before = (last & 31).reshape(-1), r.count[rec].reshape(-1)
            late &= ~clocks.lanes_have_met(warps, of, *before).reshape(shape)
        # the warp has synchronised since
        since = r.count[rec] < clocks.synchronised(by.warps)[:, None]
        late &= ~(since & (r.partial[rec] == ALONE))  # NOTE: so the lane itself has
        if not late.any():
            return
        part = (r.partial[rec] != 0) | (self.partial(by)[:, None] != 0)
        sure = late & part & ~since
        at = tuple(int(v[0]) for v in np.nonzero(sure if sure.any() else late))
        if write and not sure.any():
            return
        place, verb = region.element(int(places[at])), "overwrites" if write else "reads"
        self.reports.lanes(by, at[0], verb, place, int(last[at]), not sure.any(), ins)

    def check_constant(
        self, last: np.ndarray, places: np.ndarray, by: By, region: Region, ins: Instruction
    ) -> None:
        """Report a ``ld.global.nc`` of what the kernel itself has written, whoever did: its cache
        is not coherent with writes of the same kernel (PTX ISA 9.7.9.9).
        """
        if "nc" in ins.parts and last.any():
            at = tuple(int(v[0]) for v in np.nonzero(last))
            place = region.element(int(places[at]))
            self.reports.constant(by, at[0], place, int(last[at]) >> LANE, ins)

    def partial(self, by: By) -> np.ndarray:
        """Whether some lanes of each warp take no part; ALONE where one lane does."""
        heads = heads_of(by.warps)
        counts = lengths_of(heads, len(by.warps))
        partial = (counts < self.m.live[by.warps[heads]].sum(1)).astype(np.int32)
        partial[(counts == 1) & (partial != 0)] = ALONE
        return np.repeat(partial, counts)
