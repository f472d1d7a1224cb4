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

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.rechecks import Rechecks
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.operation import CHUNK, WORD, Engine, Kind, Operation, Span
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.strength import Strength, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_WHOLE = np.uint8(0b1111)  # all bytes of a word
_COPIED = np.uint8(0b10000)  # written by cp.async
_ALONE = np.uint8(0b100000)  # accessed by one lane of its warp
_PARTIAL = np.uint8(0b1000000)  # some lanes of the warp took no part
_PAGE = 64  # words
_BARRIER = "a barrier that both warps pass in between, as sync_threads()"


def _words(at: SharedBytes) -> tuple[Any, ...]:
    """The warps, lanes, CTAs and words of an access, (lanes * words,) each, and the bytes that it
    touches of each word.
    """
    warps, lanes, cta, offset, width = at
    word = (offset // WORD)[:, None] + np.arange(max(width // WORD, 1))
    warps, lanes, cta = (
        np.broadcast_to(x[:, None], word.shape).reshape(-1) for x in (warps, lanes, cta)
    )
    part = _WHOLE if width >= WORD else (((1 << width) - 1) << offset % WORD).astype(np.uint8)
    return warps, lanes, cta, word.reshape(-1), part


class _Last:
    """The last access of a kind to each word of each CTA."""

    def __init__(self, shape: tuple[int, int], did: str) -> None:
        self.slot = np.zeros(shape, np.int16)
        self.count = np.zeros(shape, np.int32)  # 0: none
        self.bytes = np.zeros(shape, np.uint8)  # a bit for each byte of the word that it touched
        self.did = did

    def set(
        self,
        at: tuple[np.ndarray, np.ndarray],
        slot: np.ndarray,
        count: np.ndarray,
        part: np.ndarray | np.uint8,
    ) -> None:
        """Set the last access; the bytes of one agent's accesses add up."""
        if part is _WHOLE:
            self.bytes[at] = part
        else:
            assert isinstance(part, np.ndarray)
            same = (self.slot[at] == slot) & (self.count[at] == count)
            self.bytes[at] = np.where(same, self.bytes[at], 0)
            self.slot[at], self.count[at] = slot, count
            last = self.slot[at] == slot  # of several agents in one batch
            np.bitwise_or.at(self.bytes, (at[0][last], at[1][last]), part[last])
        self.slot[at], self.count[at] = slot, count


class _Several:
    """Accesses to words by warps that are not ordered among each other: for each warp a count, and
    the bytes of the word that it touched then."""

    def __init__(self, shape: tuple[int, int], warps: int) -> None:
        self.warps = warps
        # by CTA and page, (word of the page, warp's slot) of counts, and of bits
        self.pages: dict[tuple[int, int], np.ndarray] = {}
        self.bytes: dict[tuple[int, int], np.ndarray] = {}
        self.some = np.zeros(shape, bool)  # words that have any

    def add(
        self,
        cta: np.ndarray,
        word: np.ndarray,
        slot: np.ndarray,
        count: np.ndarray | int,
        part: np.ndarray | np.uint8,
    ) -> None:
        """Add the accesses of warps to words, (n,) each; the bytes of those at one count add up."""
        self.some[cta, word] = True
        count, part = (np.broadcast_to(x, slot.shape) for x in (count, part))
        for key in set(zip(cta.tolist(), (word // _PAGE).tolist(), strict=True)):
            mine = (cta == key[0]) & (word // _PAGE == key[1])
            page = self.pages.setdefault(key, np.zeros((_PAGE, self.warps), np.int32))
            bits = self.bytes.setdefault(key, np.zeros((_PAGE, self.warps), np.uint8))
            at = word[mine] % _PAGE, slot[mine]
            bits[at] = np.where(page[at] == count[mine], bits[at], 0)
            np.bitwise_or.at(bits, at, part[mine])
            page[at] = count[mine]

    def of(self, cta: int, word: int) -> np.ndarray:
        """The counts of the warps, by slot."""
        return self.pages[cta, word // _PAGE][word % _PAGE]

    def touching(self, cta: int, word: int, part: np.uint8) -> np.ndarray:
        """The counts of those warps that touched any of these bytes of the word, else 0."""
        touched = self.bytes[cta, word // _PAGE][word % _PAGE] & part != 0
        return np.where(touched, self.of(cta, word), 0)

    def forget(self, cta: np.ndarray, word: np.ndarray) -> None:
        """Drop the accesses to words that are overwritten."""
        if not len(self.pages):
            return
        again = self.some[cta, word]
        if again.any():
            for c, w in zip(cta[again].tolist(), word[again].tolist(), strict=True):
                self.of(c, w)[:] = 0
            self.some[cta, word] = False


class SmemShadow(Observer):
    """The shadow of all resident CTAs' shared memory."""

    def __init__(self, machine: Machine, clocks: Clocks, rechecks: Rechecks) -> None:
        self.m, self.clocks, self.rechecks = machine, clocks, rechecks
        shape = (machine.grid.num_ctas, machine.smem_bytes // WORD)
        self.writes, self.reads = _Last(shape, "wrote"), _Last(shape, "read")
        self.line = np.zeros(shape, np.int32)  # 32 * the PTX line of the last write + its lane
        self.readers = _Several(shape, self.clocks.warps)  # besides the last one
        self.writers = _Several(shape, self.clocks.warps)  # of other bytes than the last one's
        self.changers = _Several(shape, self.clocks.warps)  # by atomics and other strong stores
        self.change: dict[tuple[int, int], Instruction] = {}  # the last of them
        # by warp: its count when it has waited for its copies
        self.copies_known = np.zeros(machine.grid.num_warps, np.int32)
        self.copies = any(ins.op.startswith("cp.async.c") for ins in machine.program.code)
        if rechecks.active:
            self.read_line = np.zeros(shape, np.int32)  # the PTX line of the last read
        # bounds of the words touched by ordinary accesses: most TMA and MMA spans are outside
        self.low = np.full(machine.grid.num_ctas, shape[1])
        self.high = np.full(machine.grid.num_ctas, -1)

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        """Check and record an access of lanes."""
        if not ordinary:
            self._strong(at, write, ins)
            return
        warps, lanes, cta, _, width = at
        heads = np.flatnonzero(np.diff(warps, prepend=-1))
        alone, partial = len(heads) == len(warps), None
        if len(warps) < 32 * len(heads) and ins.name in ("ld", "st"):
            counts = np.diff(heads, append=len(warps))
            few = np.repeat(counts < self.m.live[warps[heads]].sum(1), counts)
            partial = np.repeat(few, max(width // WORD, 1)) if few.any() else None
        warps, lanes, cta, word, part = _words(at)
        self._check(warps, lanes, cta, word, part, write, "", ins, partial)
        np.minimum.at(self.low, cta, word)
        np.maximum.at(self.high, cta, word)
        slot, where = self.clocks.slot[warps], (cta, word)
        count = self.clocks.known[warps, slot]
        if write:
            self._keep_writers(where, warps, part)
            self.writes.set(where, slot, count, part)
            self.changers.forget(cta, word)
            if part is not _WHOLE:
                several = self.writes.slot[where] != slot  # in one batch
                self._keep(self.writers, several, where, slot, count, part)
            if alone:
                self.writes.bytes[where] |= _ALONE
            if partial is not None:
                self.writes.bytes[where] |= partial * _PARTIAL
            self.line[where] = ins.line << 5 | lanes
            return
        if self.copies and ins.name in ("ld", "ldmatrix"):
            self._check_copied(warps, lanes, where, ins)
        before, when = self.reads.slot[where], self.reads.count[where]
        other = (when > self.clocks.known[warps, before]) & (before != slot)
        self._keep(self.readers, other, where, before, when, self.reads.bytes[where])
        if self.rechecks.active:
            self.read_line[where] = ins.line
        self.reads.set(where, slot, count, part)
        several = self.reads.slot[where] != slot  # in one batch
        self._keep(self.readers, several, where, slot, count, part)

    def waited(self, warps: Sequence[int], kind: Kind, numbers: Sequence[int]) -> None:
        if kind is Kind.COPY:
            for warp in warps:
                self.copies_known[warp] = self.clocks.now(warp)

    def _check_copied(
        self, warps: np.ndarray, lanes: np.ndarray, at: tuple[np.ndarray, np.ndarray],
        ins: Instruction,
    ) -> None:  # fmt: skip
        """Tell of lanes that read what another lane of their warp has copied, where the warp has
        waited for its copies and not synchronised since: a wait tells a thread of its own copies
        (9.7.9.25.3.3).
        """
        own = self.clocks.slot[warps]
        mine = self.writes.slot[at] == Kind.COPY * self.clocks.warps + own
        mine &= self.line[at] & 31 != lanes
        mine &= self.clocks.ordered[warps, own] < self.copies_known[warps]
        if mine.any():
            k = int(mine.argmax())
            line, name = int(self.line[at][k]), self.m.grid.name_warp(int(warps[k]))
            self.m.findings.add(
                "race",
                f"{name} lane {lanes[k]} reads shared memory 0x{int(at[1][k]) * WORD:x}, which the "
                f"cp.async of its lane {line & 31} at PTX line {line >> 5} wrote: by the letter, a "
                "wait tells a thread of its own copies only, and a bar.warp.sync is missing",
                ins,
                advisory=True,
            )

    def _strong(self, at: SharedBytes, write: bool, ins: Instruction) -> None:
        """Check an atomic or another strong access against ordinary ones, and record what it
        changes."""
        how = strength(ins.op)
        if how.atomic and write:
            return  # NOTE: it was recorded when it loaded, as both
        if how.atomic:
            self._check_written(at, ins)
        changes = how.atomic or write
        warps, _, cta, word, part = _words(at)
        own = self.clocks.slot[warps]
        for last in (self.writes, self.reads) if changes else (self.writes,):
            other, count = last.slot[cta, word], last.count[cta, word]
            late = (count > self.clocks.known[warps, other]) & (other != own)
            late &= (last.bytes[cta, word] & part) != 0
            if late.any():
                k = int(late.argmax())
                place = int(cta[k]), int(word[k])
                self._beside(int(warps[k]), int(other[k]), place, how, last.did, ins)
        if changes and at.width >= WORD:
            self.changers.add(cta, word, own, self.clocks.known[warps, own], _WHOLE)
            self.change.update(dict.fromkeys(zip(cta.tolist(), word.tolist(), strict=True), ins))
            np.minimum.at(self.low, cta, word)
            np.maximum.at(self.high, cta, word)

    def _check_written(self, at: SharedBytes, ins: Instruction) -> None:
        """Report an atomic on shared memory that nothing has written."""
        unwritten = np.flatnonzero(self.m.box_swizzle[at.cta, at.offset >> 4] < 0)
        if not len(unwritten):
            return
        k = int(unwritten[0])
        self.m.findings.add(
            "uninitialised",
            f"{self.m.grid.name_warp(int(at.warps[k]))} lane {at.lanes[k]} changes shared memory "
            f"0x{int(at.offset[k]):x} by an atomic, and nothing has written it",
            ins,
            remedy="a store of the first value, and a barrier behind it",
        )

    def _beside(
        self,
        warp: int,
        other: int,
        place: tuple[int, int],
        how: Strength,
        did: str,
        ins: Instruction,
    ) -> None:
        """Report a strong access that no barrier orders after an ordinary one."""
        line = int(self.line[place] >> 5 if did == "wrote" else self.read_line[place])
        name, peer = self.m.grid.name_warp, self.clocks.peer(warp, other)
        verb = "changes" if how.atomic else "reads" if ins.name == "ld" else "overwrites"
        message = (
            f"{name(warp)} {verb} shared memory 0x{place[1] * WORD:x}"
            f"{' by an atomic' if how.atomic else ''}, which {name(peer)} {did} by an ordinary "
            f"{'store' if did == 'wrote' else 'load'} at PTX line {line}: no barrier orders the two"
        )
        tell = partial(self.m.findings.add, "race", message, ins, remedy=_BARRIER)
        if did == "read" and how.atomic:
            self.rechecks.race(line, tell)
        else:
            tell(not how.atomic)

    def _check_changed(
        self,
        warps: np.ndarray,
        cta: np.ndarray,
        word: np.ndarray,
        write: bool,
        what: str,
        ins: Instruction,
    ) -> None:
        """Check ordinary accesses, and those of ``what``, against atomics and other strong
        stores.
        """
        some = self.changers.some[cta, word]
        for k in np.nonzero(some)[0].tolist():
            place, warp = (int(cta[k]), int(word[k])), int(warps[k])
            unknown = self.changers.of(*place) > self.clocks.known[warp, : self.clocks.warps]
            unknown[self.clocks.slot[warp]] = False
            if not unknown.any():
                continue
            name, change = self.m.grid.name_warp, self.change[place]
            peer = name(self.clocks.peer(warp, int(unknown.argmax())))
            atomic = strength(change.op).atomic
            who = f"{what} of {name(warp)}" if what else name(warp)
            message = (
                f"{who} {'overwrites' if write else 'reads'} shared memory "
                f"0x{place[1] * WORD:x}, which {peer} "
                f"{'changes by an atomic' if atomic else 'wrote'} at PTX line {change.line}: no "
                "barrier orders the two"
            )
            tell = partial(self.m.findings.add, "race", message, ins, remedy=_BARRIER)
            if write or what:
                tell(not atomic)
            else:
                self.rechecks.race(ins.line, tell)
            return

    def _keep(
        self,
        several: _Several,
        which: np.ndarray,
        at: tuple[np.ndarray, np.ndarray],
        slot: np.ndarray,
        count: np.ndarray,
        part: np.ndarray | np.uint8,
    ) -> None:
        """Keep accesses that the last one is not ordered after."""
        if which.any():
            part = np.broadcast_to(part, slot.shape)[which] & _WHOLE
            several.add(at[0][which], at[1][which], slot[which], count[which], part)

    def _keep_writers(
        self, at: tuple[np.ndarray, np.ndarray], warps: np.ndarray, part: np.ndarray | np.uint8
    ) -> None:
        """Keep the last stores to words of which these warps, which are not ordered after them,
        store to other bytes."""
        if part is _WHOLE:
            self.writers.forget(*at)
            return
        before, when = self.writes.slot[at], self.writes.count[at]
        other = (when > self.clocks.known[warps, before]) & (before != self.clocks.slot[warps])
        other &= before < self.clocks.warps
        self._keep(self.writers, other, at, before, when, self.writes.bytes[at])

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
        self._check(warps, lanes, cta, word, _WHOLE, write, op.what, op.instruction)
        self._check_proxy(warp, (cta, word), self.writes, write, op)
        if write:
            self._check_proxy(warp, (cta, word), self.reads, write, op)
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
        self._check(warps, lanes, cta, word, _WHOLE, True, "the cp.async", ins)
        self.reads.count[cta, word] = 0
        for several in (self.readers, self.writers, self.changers):
            several.forget(cta, word)
        slot = np.full(len(word), self.clocks.agent(Kind.COPY, warp))
        self.writes.set((cta, word), slot, np.full(len(word), number), _WHOLE)
        self.writes.bytes[cta, word] |= _COPIED
        self.line[cta, word] = ins.line << 5 | lanes
        self.low[cta[0]] = min(self.low[cta[0]], int(word.min()))
        self.high[cta[0]] = max(self.high[cta[0]], int(word.max()))

    # -- checks ------------------------------------------------------------------------------------

    def _check(
        self,
        warps: np.ndarray,
        lanes: np.ndarray | None,
        cta: np.ndarray,
        word: np.ndarray,
        part: np.ndarray | np.uint8,
        write: bool,
        what: str,
        ins: Instruction,
        partial: np.ndarray | None = None,
    ) -> None:
        own = self.clocks.slot[warps]
        for last in (self.writes, self.reads) if write else (self.writes,):
            other, count = last.slot[cta, word], last.count[cta, word]
            late = count > self.clocks.ordered[warps, other]  # by the letter
            if late.any():
                late &= (last.bytes[cta, word] & part) != 0
            if not late.any():
                continue
            unknown = late & (count > self.clocks.known[warps, other]) & (other != own)
            if unknown.any():
                k = int(unknown.argmax())
                place = int(cta[k]), int(word[k])
                self._race(int(warps[k]), int(other[k]), place, write, last.did, what, ins)
            elif last is self.writes:
                self._check_lanes(late, warps, lanes, (cta, word), write, what, ins, partial)
        if len(self.changers.pages):
            self._check_changed(warps, cta, word, write, what, ins)
        for several, did in ((self.writers, "has written"), (self.readers, "read")):
            if not len(several.pages) or (several is self.readers and not write):
                continue
            parts = np.broadcast_to(part, word.shape)
            for k in np.nonzero(several.some[cta, word])[0].tolist():
                place, warp = (int(cta[k]), int(word[k])), int(warps[k])
                counts = several.touching(*place, parts[k])
                unknown = counts > self.clocks.known[warp, : self.clocks.warps]
                unknown[own[k]] = False
                if unknown.any():
                    self._race(warp, int(unknown.argmax()), place, write, did, what, ins)
                    return

    def _check_lanes(
        self,
        late: np.ndarray,
        warps: np.ndarray,
        lanes: np.ndarray | None,
        at: tuple[np.ndarray, np.ndarray],
        write: bool,
        what: str,
        ins: Instruction,
        partial: np.ndarray | None,
    ) -> None:
        """Report ``late`` accesses whose warps are ordered after a store, but not after the lane of
        the warp that made it: as an advisory, but where a lane loads what another of its warp has
        stored, nothing that synchronises comes between, and one of the two instructions is not of
        the whole warp (``partial``: whether this one is not).
        """
        other, line, how = self.writes.slot[at], self.line[at], self.writes.bytes[at]
        mine = other == self.clocks.slot[warps]
        late = late & (other < self.clocks.warps)
        if lanes is not None:
            late &= ~mine | (line & 31 != lanes)
            if self.clocks.met:
                met = self.clocks.lanes_have_met(warps, lanes, line & 31, self.writes.count[at])
                late &= ~(mine & met)
        sure = (
            late
            & mine
            & (how & _PARTIAL != 0 if partial is None else partial | (how & _PARTIAL != 0))
        )
        sure &= self.writes.count[at] >= self.clocks.synchronised(warps)
        sure &= not (write or what or lanes is None)
        late &= (how & _ALONE) == 0
        if not (late.any() or sure.any()):
            return
        k = int(np.argmax(sure if sure.any() else late))
        warp, name = int(warps[k]), self.m.grid.name_warp
        peer = self.clocks.peer(warp, int(other[k]))
        same = self.m.grid.warp_cta[peer] == self.m.grid.warp_cta[warp]
        why = "by the letter, a bar.warp.sync is missing between these lanes"
        if not mine[k]:
            why = "by the letter, one lane's arrival does not tell of the others' stores: a "
            why += "bar.warp.sync is missing before it"
        if sure[k]:
            why = "no bar.warp.sync orders the two lanes"
        if not same:
            why = "by the letter, an arrival at another CTA's mbarrier has to be .release.cluster"
        self.m.findings.add(
            "race",
            f"{f'{what} of ' if what else ''}{name(warp)} {'overwrites' if write else 'reads'} "
            f"shared memory 0x{int(at[1][k]) * WORD:x}, which {name(peer)} lane {line[k] & 31} "
            f"wrote at PTX line {line[k] >> 5}: {why}",
            ins,
            advisory=not sure[k],
            remedy="sync_warp() in between" if sure[k] else "",
        )

    def _race(
        self,
        warp: int,
        other: int,
        place: tuple[int, int],
        write: bool,
        did: str,
        what: str,
        ins: Instruction,
    ) -> None:
        name = self.m.grid.name_warp
        who = f"{what} of {name(warp)}" if what else name(warp)
        peer, why = name(self.clocks.peer(warp, other)), "no barrier orders the two"
        line = f" at PTX line {self.line[place] >> 5}" if did == "wrote" else ""
        remedy = _BARRIER
        if other >= self.clocks.warps:
            peer = f"a cp.async of {peer}"
            why = "nothing that this warp has waited for says that it is complete"
            remedy = "cp.async.wait_group by the thread that copies, then a barrier of both warps"
        self.m.findings.add(
            "race",
            f"{who} {'overwrites' if write else 'reads'} shared memory 0x{place[1] * WORD:x}, "
            f"which {peer} {did}{line}: {why}",
            ins,
            remedy=remedy,
        )

    def _check_proxy(
        self,
        warp: int,
        at: tuple[np.ndarray, np.ndarray],
        last: _Last,
        write: bool,
        op: Operation,
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
        copied = bool(last.bytes[place] & _COPIED)
        before = f"{'a cp.async' if copied else 'ordinary stores'} wrote at PTX line "
        before += str(self.line[place] >> 5)
        if last is self.reads:
            before = "ordinary loads have read"
        elif self.changers.some[place]:
            copied, before = False, f"was changed at PTX line {self.change[place].line}"
        self.m.findings.add(
            "proxy",
            f"{op.what} of {self.m.grid.name_warp(warp)} {'overwrites' if write else 'reads'} "
            f"shared memory 0x{place[1] * WORD:x}, which {before}, with no fence.proxy.async "
            "in between",
            op.instruction,
            advisory=copied or (write and op.engine is not Engine.LAUNCH_CONTROL),
        )
