"""Shadow of shared memory: the last ordinary writer and the readers of each 4 bytes.

For each word it keeps the last agent that wrote it (a warp, or its non-bulk cp.async), and the
warps that have read it since: the last one, and separately those whose reads are not ordered before
the last one's. Counts are those of the vector clocks (see clocks); so an access races with another
in every order of events, or in none. Operations of the async proxy are compared with this state
when they are issued; their own accesses are recorded by async_accesses. Atomics and other strong
accesses (volatile, relaxed, acquire, release) do not race with each other (8.7.1), but an atomic
does with an ordinary access, as where a counter is set to zero, counted up and read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.rechecks import Rechecks
from cutex.sim.hazards.smem_marks import (
    ALONE,
    COPIED,
    PARTIAL,
    WHOLE,
    LastAccess,
    PartLanes,
    Several,
    Touches,
    Words,
)
from cutex.sim.hazards.smem_reports import LastStore, SmemAccess, SmemReports
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.operation import CHUNK, WORD, Engine, Kind, Operation, Span
from cutex.sim.machine.runs import heads_of, lengths_of
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.strength import Strength, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class SmemShadow(Observer):
    """The shadow of all resident CTAs' shared memory."""

    def __init__(self, machine: Machine, clocks: Clocks, rechecks: Rechecks) -> None:
        self.m, self.clocks = machine, clocks
        self.reports = SmemReports(machine, clocks, rechecks)
        shape = (machine.grid.num_ctas, machine.smem_bytes // WORD)
        self.writes, self.reads = LastAccess(shape, "wrote"), LastAccess(shape, "read")
        self.line = np.zeros(shape, np.int32)  # 32 * the PTX line of the last write + its lane
        self.part_lanes = PartLanes(shape)
        self.readers = Several(shape, self.clocks.warps)  # besides the last one
        self.writers = Several(shape, self.clocks.warps)  # of other bytes than the last one's
        self.changers = Several(shape, self.clocks.warps)  # by atomics and other strong stores
        # by CTA, word and slot of the warp: the last of them
        self.change: dict[tuple[int, int, int], Instruction] = {}
        # by warp: its count when it has waited for its copies
        self.copies_known = np.zeros(machine.grid.num_warps, np.int32)
        self.copies = any(ins.op.startswith("cp.async.c") for ins in machine.program.code)
        self.read_line = np.zeros(shape, np.int32)  # the PTX line of the last read
        # bounds of the words touched by ordinary accesses: most TMA and MMA spans are outside
        self.low = np.full(machine.grid.num_ctas, shape[1])
        self.high = np.full(machine.grid.num_ctas, -1)

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        """Check and record an access of lanes."""
        if not ordinary:
            self._strong(at, write, ins)
            return
        warps, width = at.warps, at.width
        heads = heads_of(warps)
        alone, partial = len(heads) == len(warps), None
        if len(warps) < 32 * len(heads) and ins.name in ("ld", "st"):
            counts = lengths_of(heads, len(warps))
            few = np.repeat(counts < self.m.live[warps[heads]].sum(1), counts)
            partial = np.repeat(few, max(width // WORD, 1)) if few.any() else None
        touches = Touches.of(at)
        warps, lanes, cta, word, part = touches
        self._check(touches, SmemAccess(write, ins), partial)
        np.minimum.at(self.low, cta, word)
        np.maximum.at(self.high, cta, word)
        slot, where = self.clocks.slot[warps], (cta, word)
        count = self.clocks.known[warps, slot]
        if write:
            self._keep_writers(where, warps, part)
            self.writes.set(where, slot, count, part)
            self.changers.forget(cta, word)
            if part is not WHOLE or len(heads) > 1:
                several = self.writes.slot[where] != slot  # in one batch
                self.writers.add_some(several, where, slot, count, part)
            if alone:
                self.writes.bytes[where] |= ALONE
            if partial is not None:
                self.writes.bytes[where] |= partial * PARTIAL
            self.line[where] = ins.line << 5 | lanes
            self.part_lanes.store(touches)
            return
        if self.copies and ins.name in ("ld", "ldmatrix"):
            self._check_copied(touches, ins)
        before, when = self.reads.slot[where], self.reads.count[where]
        other = (when > self.clocks.known[warps, before]) & (before != slot)
        self.readers.add_some(other, where, before, when, self.reads.bytes[where])
        self.read_line[where] = ins.line
        self.reads.set(where, slot, count, part)
        if alone:
            self.reads.bytes[where] |= ALONE
        several = self.reads.slot[where] != slot  # in one batch
        self.readers.add_some(several, where, slot, count, part)

    def waited(self, warps: Sequence[int], kind: Kind, numbers: Sequence[int]) -> None:
        if kind is Kind.COPY:
            for warp in warps:
                self.copies_known[warp] = self.clocks.now(warp)

    def _check_copied(self, touches: Touches, ins: Instruction) -> None:
        """Tell of lanes that read what another lane of their warp has copied, where the warp has
        waited for its copies and not synchronised since: a wait tells a thread of its own copies
        (9.7.9.25.3.3).
        """
        warps, lanes, at = touches.warps, touches.lanes, touches.at
        own = self.clocks.slot[warps]
        mine = self.writes.slot[at] == Kind.COPY * self.clocks.warps + own
        if ins.name != "ldmatrix":  # which gives each lane some of the rows that others name
            mine &= self.line[at] & 31 != lanes
        mine &= self.clocks.ordered[warps, own] < self.copies_known[warps]
        if mine.any() and lanes is not None:
            k = int(mine.argmax())
            store = self._store(int(at[0][k]), int(at[1][k]))
            self.reports.copied(int(warps[k]), int(lanes[k]), int(at[1][k]), store, ins)

    def _strong(self, at: SharedBytes, write: bool, ins: Instruction) -> None:
        """Check an atomic or another strong access against ordinary ones, and record what it
        changes."""
        how = strength(ins.op)
        if how.atomic and write:
            return  # NOTE: it was recorded when it loaded, as both
        if how.atomic:
            self._check_written(at, ins)
        changes = how.atomic or write
        touches = Touches.of(at)
        warps, _, cta, word, part = touches
        own = self.clocks.slot[warps]
        for last in (self.writes, self.reads) if changes else (self.writes,):
            other, count = last.slot[cta, word], last.count[cta, word]
            late = (count > self.clocks.known[warps, other]) & (other != own)
            late &= (last.bytes[cta, word] & part) != 0
            if late.any():
                k = int(late.argmax())
                place = int(cta[k]), int(word[k])
                wrote = last is self.writes
                line = int(self.line[place] >> 5 if wrote else self.read_line[place])
                self.reports.strong(ins, int(warps[k]), place[1], int(other[k]), last.did, line)
        for did, k, earlier in self._before_last(touches, changes):
            by = int(self.read_line[cta[k], word[k]]) if did == "read" else None
            self.reports.strong(ins, int(warps[k]), int(word[k]), earlier, did, by)
            break
        if changes:
            self._check_scopes(touches, how, ins)
            self.changers.add(touches.at, own, self.clocks.known[warps, own], part)
            keys = zip(cta.tolist(), word.tolist(), own.tolist(), strict=True)
            self.change.update(dict.fromkeys(keys, ins))
            np.minimum.at(self.low, cta, word)
            np.maximum.at(self.high, cta, word)

    def _check_scopes(self, touches: Touches, how: Strength, ins: Instruction) -> None:
        """Check against strong accesses of other CTAs, where one of two has the scope of its own:
        they race as ordinary ones do (8.7.1).
        """
        warps, _, cta, word, part = touches
        parts = np.broadcast_to(part, word.shape)
        for k in np.nonzero(self.changers.some[cta, word])[0].tolist():
            place, warp = (int(cta[k]), int(word[k])), int(warps[k])
            counts = self.changers.touching(*place, parts[k])
            unknown = counts > self.clocks.known[warp, : self.clocks.warps]
            unknown[self.clocks.of_cta(warp)] = False
            for peer in np.flatnonzero(unknown).tolist():
                change = self.change[(*place, peer)]
                if how.own or strength(change.op).own:
                    self.reports.scopes(ins, warp, place[1], peer, change)
                    return

    def _check_written(self, at: SharedBytes, ins: Instruction) -> None:
        """Report an atomic on shared memory that nothing has written."""
        unwritten = np.flatnonzero(self.m.box_swizzle[at.cta, at.offset >> 4] < 0)
        if not len(unwritten):
            return
        k = int(unwritten[0])
        self.reports.unwritten(int(at.warps[k]), int(at.lanes[k]), int(at.offset[k]), ins)

    def _check_changed(self, touches: Touches, access: SmemAccess) -> None:
        """Check ordinary accesses against atomics and other strong stores."""
        warps, _, cta, word, part = touches
        parts = np.broadcast_to(part, word.shape)
        some = self.changers.some[cta, word]
        for k in np.nonzero(some)[0].tolist():
            place, warp = (int(cta[k]), int(word[k])), int(warps[k])
            counts = self.changers.touching(*place, parts[k])
            unknown = counts > self.clocks.known[warp, : self.clocks.warps]
            unknown[self.clocks.slot[warp]] = False
            if unknown.any():
                other = int(unknown.argmax())
                change = self.change[(*place, other)]
                self.reports.changed(access, warp, place[1], other, change)
                return

    def _keep_writers(self, at: Words, warps: np.ndarray, part: np.ndarray | np.uint8) -> None:
        """Keep the last stores to words of which these warps, which are not ordered after them,
        store to other bytes."""
        if part is WHOLE:
            self.writers.forget(*at)
            return
        before, when = self.writes.slot[at], self.writes.count[at]
        other = (when > self.clocks.known[warps, before]) & (before != self.clocks.slot[warps])
        other &= before < self.clocks.warps
        self.writers.add_some(other, at, before, when, self.writes.bytes[at])

    def touched(self, span: Span) -> bool:
        """Whether ordinary accesses may have touched the span."""
        low, high = self.low.item(span.cta), self.high.item(span.cta)
        return span.high > low * WORD and span.low <= high * WORD

    def touched_any(self, span: Span, ctas: np.ndarray) -> bool:
        """Whether ordinary accesses may have touched the span in any of these CTAs."""
        low, high = self.low[ctas], self.high[ctas]
        return bool(((span.high > low * WORD) & (span.low <= high * WORD)).any())

    def asynchronous(self, warp: int, span: Span, write: bool, op: Operation) -> None:
        """Check ``op`` of the async proxy, issued by ``warp``; ``write``: whether it overwrites the
        span.
        """
        if span.chunks is None:
            word = np.arange(span.low // WORD, -(-span.high // WORD))
        else:
            per = CHUNK // WORD
            word = (span.chunks.reshape(-1, 1) * per + np.arange(per)).reshape(-1)
        warps, cta = np.full(len(word), warp), np.full(len(word), span.cta)
        lanes = None
        if op.engine is Engine.WGMMA:  # every lane issues it, after its own stores
            lanes = self.line[cta, word] & 31
        touches, access = (
            Touches(warps, lanes, cta, word),
            SmemAccess(write, op.instruction, op.what),
        )
        self._check(touches, access)
        if not op.generic:
            self._check_proxy(warp, (cta, word), self.writes, write, op)
            if write:
                self._check_proxy(warp, (cta, word), self.reads, write, op)
        if write:
            self.writes.count[cta, word] = self.reads.count[cta, word] = 0
            for several in (self.readers, self.writers, self.changers):
                several.forget(cta, word)

    def copying(self, at: SharedBytes, op: Operation, ins: Instruction) -> None:
        """A cp.async of a warp writes there."""
        warp, lanes, number = int(at.warps[0]), at.lanes, op.number
        word = at.offset[:, None] // WORD + np.arange(at.width // WORD)
        lanes = np.broadcast_to(lanes[:, None], word.shape).reshape(-1)
        word = word.reshape(-1)
        cta = np.full(len(word), self.m.grid.warp_cta[warp])
        warps = np.full(len(word), warp)
        self._check(Touches(warps, lanes, cta, word), SmemAccess(True, ins, "the cp.async"))
        self.reads.count[cta, word] = 0
        for several in (self.readers, self.writers, self.changers):
            several.forget(cta, word)
        slot = np.full(len(word), self.clocks.agent(Kind.COPY, warp))
        self.writes.set((cta, word), slot, np.full(len(word), number), WHOLE)
        self.writes.bytes[cta, word] |= COPIED | (ALONE if len(at.lanes) == 1 else 0)
        self.line[cta, word] = ins.line << 5 | lanes
        self.low[cta[0]] = min(self.low[cta[0]], int(word.min()))
        self.high[cta[0]] = max(self.high[cta[0]], int(word.max()))

    # -- checks ------------------------------------------------------------------------------------

    def _check(
        self, touches: Touches, access: SmemAccess, partial: np.ndarray | None = None
    ) -> None:
        """Check an access; ``partial``: of which words some lanes of its warp took no part."""
        (warps, _, cta, word, part), write = touches, access.write
        own = self.clocks.slot[warps]
        for last in (self.writes, self.reads) if write else (self.writes,):
            other, count = last.slot[cta, word], last.count[cta, word]
            ordered = self.clocks.ordered[warps, other]  # by the letter
            if self.clocks.relaxes:  # whose barrier passes this on, and no memory
                ordered = np.minimum(ordered, self.clocks.known[warps, other])
            late = count > ordered
            if late.any():
                late &= (last.bytes[cta, word] & part) != 0
            if not late.any():
                continue
            unknown = late & (count > self.clocks.known[warps, other]) & (other != own)
            if unknown.any():
                k = int(unknown.argmax())
                place = int(cta[k]), int(word[k])
                line = int(self.read_line[place] if last is self.reads else self.line[place] >> 5)
                self.reports.race(access, int(warps[k]), place[1], int(other[k]), last.did, line)
            elif last is self.writes:
                self._check_lanes(late, touches, access, partial)
            else:
                self._check_readers(late, touches, access)
        if len(self.changers.pages):
            self._check_changed(touches, access)
        for did, k, earlier in self._before_last(touches, write):
            self.reports.race(access, int(warps[k]), int(word[k]), earlier, did, None)
            return

    def _before_last(self, touches: Touches, write: bool) -> Iterator[tuple[str, int, int]]:
        """The accesses besides the last that this one is not ordered after: what they did, the
        place among the touches, and the warp's slot."""
        warps, _, cta, word, part = touches
        for several, did in ((self.writers, "has written"), (self.readers, "read")):
            if not len(several.pages) or (several is self.readers and not write):
                continue
            parts = np.broadcast_to(part, word.shape)
            for k in np.nonzero(several.some[cta, word])[0].tolist():
                place, warp = (int(cta[k]), int(word[k])), int(warps[k])
                counts = several.touching(*place, parts[k])
                unknown = counts > self.clocks.known[warp, : self.clocks.warps]
                unknown[self.clocks.slot[warp]] = False
                if unknown.any():
                    yield did, k, int(unknown.argmax())

    def _check_lanes(
        self, late: np.ndarray, touches: Touches, access: SmemAccess, partial: np.ndarray | None
    ) -> None:
        """Report ``late`` accesses whose warps are ordered after a store, but not after the lane of
        the warp that made it: as an advisory, but where a lane loads what another of its warp has
        stored, nothing that synchronises comes between, and one of the two instructions is not of
        the whole warp (``partial``: whether this one is not).
        """
        warps, lanes, at = touches.warps, touches.lanes, touches.at
        other, line, how = self.writes.slot[at], self.line[at], self.writes.bytes[at]
        mine = other == self.clocks.slot[warps]
        if self.copies:
            self._check_copies(late, touches, access)
        late = late & (other < self.clocks.warps)
        foreign: np.ndarray | bool = True  # whether another lane has stored it
        if lanes is not None:
            foreign = self.part_lanes.of(touches, line & 31) != lanes
            if access.instruction.name != "ldmatrix":
                late &= ~mine | foreign
            if self.clocks.met:
                met = self.clocks.lanes_have_met(warps, lanes, line & 31, self.writes.count[at])
                late &= ~(mine & met)
        sure = (
            late
            & mine
            & foreign
            & (how & PARTIAL != 0 if partial is None else partial | (how & PARTIAL != 0))
        )
        sure &= self.writes.count[at] >= self.clocks.synchronised(warps)
        sure &= not (access.write or access.what or lanes is None)
        late &= (how & ALONE) == 0
        if not (late.any() or sure.any()):
            return
        k = int(np.argmax(sure if sure.any() else late))
        place = int(at[0][k]), int(at[1][k])
        self.reports.lanes(access, int(warps[k]), place[1], self._store(*place), bool(sure[k]))

    def _check_copies(self, late: np.ndarray, touches: Touches, access: SmemAccess) -> None:
        """Report ``late`` accesses to what several lanes of a warp have copied, where only one of
        those told of it, or issued the operation that reads it: an advisory.
        """
        other, at = self.writes.slot[touches.at], touches.at
        late = late & (other >= self.clocks.warps) & (self.writes.bytes[at] & ALONE == 0)
        if not access.what or touches.lanes is not None:  # NOTE: see _check_copied
            late &= other % self.clocks.warps != self.clocks.slot[touches.warps]
        for k in np.nonzero(late)[0][:1].tolist():
            place = int(at[0][k]), int(at[1][k])
            self.reports.copies(access, int(touches.warps[k]), place[1], self._store(*place))

    def _check_readers(self, late: np.ndarray, touches: Touches, access: SmemAccess) -> None:
        """Report ``late`` accesses that overwrite what several lanes of a warp of the CTA have
        read, where only one of those told of it, or issued the copy that does: an advisory.
        """
        other, at = self.reads.slot[touches.at], touches.at
        late = late & (other < self.clocks.warps)
        if not access.what or touches.lanes is not None:
            # NOTE: each lane may have read what it overwrites; which has is not known
            late &= other != self.clocks.slot[touches.warps]
        late &= (self.reads.bytes[at] & ALONE) == 0
        for k in np.nonzero(late)[0][:1].tolist():
            place = int(at[0][k]), int(at[1][k])
            warp, line = int(touches.warps[k]), int(self.read_line[place])
            self.reports.readers(access, warp, place[1], int(other[k]), line)

    def _store(self, cta: int, word: int) -> LastStore:
        """The last store to a word."""
        line = int(self.line[cta, word])
        return LastStore(int(self.writes.slot[cta, word]), line & 31, line >> 5)

    def _check_proxy(
        self, warp: int, at: Words, last: LastAccess, write: bool, op: Operation
    ) -> None:
        """Report an ordinary access and one of the async proxy without a fence in between
        (9.7.9.25.1).

        NOTE: kernels of NVIDIA overwrite by TMA memory that ldmatrix has read, with only an
        mbarrier in between, but fence the reply ring of cluster launch control. Nor do kernels that
        multiply data copied by non-bulk cp.async, which is of the generic proxy, have a fence.
        """
        visible, known = self.clocks.visible[warp], self.clocks.known[warp]
        slot, count = last.slot[at], last.count[at]
        unseen = (count > visible[slot]) & (count <= known[slot])
        several, few = self.readers if last is self.reads else self.changers, self.clocks.warps
        if len(several.pages):
            for k in np.nonzero(several.some[at])[0].tolist():
                page = several.of(int(at[0][k]), int(at[1][k]))
                unseen[k] |= ((page > visible[:few]) & (page <= known[:few])).any()
        if not unseen.any():
            return
        k = int(unseen.argmax())
        place = int(at[0][k]), int(at[1][k])
        copied = bool(last.bytes[place] & COPIED)
        before = f"{'a cp.async' if copied else 'ordinary stores'} wrote at PTX line "
        before += str(self.line[place] >> 5)
        if last is self.reads:
            before = f"ordinary loads have read at PTX line {self.read_line[place]}"
        elif self.changers.some[place]:
            page = self.changers.of(*place)
            late = (page > visible[:few]) & (page <= known[:few])
            change = self.change[(*place, int((late if late.any() else page > 0).argmax()))]
            copied, before = False, f"was changed at PTX line {change.line}"
        self.reports.proxy(op, warp, place[1], before, write, copied)
