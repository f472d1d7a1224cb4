"""Who knows of whose shared memory accesses: vector clocks, and the proxy fence on the way.

Each warp counts its synchronisations; ``known[w, v]`` is how far warp w knows what warp v did,
through barriers, and ``visible[w, v]`` how far the async proxy sees it too, because a
``fence.proxy.async`` stood on the way. ``follows[w, v]`` is how far w only runs after v: a
``barrier.cluster.arrive.relaxed`` orders execution, but of memory it releases just what a fence
released before it. Shadow memory remembers, for each 4 bytes, the last warp
that wrote them with ordinary stores and the last that read them, with their counts. An access is
ordered after another iff its warp knows the other's count; this does not depend on the order in
which the simulator happened to run them. The method is that of happens-before race detectors
(FastTrack, with one reader per place); the rules are PTX ISA chapter 8 and 9.7.13.5.

Asynchronous operations meet each other, and later ordinary accesses, while they are in flight: see
flight. Atomics, volatile, acquire and release accesses synchronise by themselves, and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.machine.operation import WORD
from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.mbarrier import Made
    from cutex.sim.machine.operation import Span

_WHOLE = np.uint8(0b1111)  # all bytes of a word
_COPIED = np.uint8(0b10000)  # by cp.async: see there why the async proxy may read it


class Clocks:
    """Vector clocks of the resident warps; a warp's slot is its number within its cluster."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        width = machine.grid.warps_per_cta * machine.grid.cluster_size
        warps = np.arange(machine.grid.num_warps)
        rank = machine.grid.cta_rank[machine.grid.warp_cta]
        self.slot = rank * machine.grid.warps_per_cta + machine.grid.warp_in_cta
        self.rows = np.zeros((3, machine.grid.num_warps, width), np.int32)
        self.known, self.visible, self.follows = self.rows
        self.fenced = np.zeros_like(self.rows)  # what a fence of the warp released
        self.known[warps, self.slot] = self.follows[warps, self.slot] = 1
        shape = (machine.grid.num_ctas, machine.smem_bytes // WORD)
        self.writer, self.reader = np.zeros(shape, np.int16), np.zeros(shape, np.int16)  # slots
        self.written, self.read = np.zeros(shape, np.int32), np.zeros(shape, np.int32)  # 0: none
        self.written_line = np.zeros(shape, np.int32)  # in the PTX
        # a bit for each byte of the word that the last writer, or reader, touched
        self.written_bytes, self.read_bytes = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        # words that ordinary accesses have touched: most spans of TMA and MMA lie elsewhere
        self.low = np.full(machine.grid.num_ctas, shape[1])
        self.high = np.full(machine.grid.num_ctas, -1)

    # -- synchronisation ---------------------------------------------------------------------------

    def give(self, warp: int, relaxed: bool = False) -> np.ndarray:
        """What ``warp`` releases, (3, slots); what it does from now on counts as later."""
        given = (self.fenced if relaxed else self.rows)[:, warp].copy()
        given[2] = self.follows[warp]
        self._count(warp)
        return given

    def take(self, warp: int, given: np.ndarray | None) -> None:
        """``warp`` acquires what others gave."""
        if given is not None:
            np.maximum(self.rows[:, warp], given, out=self.rows[:, warp])

    def _count(self, warps: int | np.ndarray) -> None:
        self.known[warps, self.slot[warps]] += 1
        self.follows[warps, self.slot[warps]] += 1

    @staticmethod
    def join(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
        return b if a is None else np.maximum(a, b)

    def fence_proxy(self, warps: np.ndarray) -> None:
        """fence.proxy.async: all that these warps know becomes visible to the async proxy."""
        self.visible[warps] = np.maximum(self.visible[warps], self.known[warps])
        self._count(warps)

    def fence_release(self, warps: np.ndarray) -> None:
        """A fence that releases to the cluster: relaxed arrivals after it carry what is known."""
        self.fenced[:, warps] = self.rows[:, warps]
        self._count(warps)

    # -- mbarriers ---------------------------------------------------------------------------------

    def now(self, warp: int) -> int:
        """The warp's own count."""
        return int(self.known[warp, self.slot[warp]])

    def peer(self, warp: int, slot: int) -> int:
        """The warp that has this slot in the cluster of ``warp``."""
        m = self.m
        rank, inside = divmod(slot, m.grid.warps_per_cta)
        own = int(m.grid.warp_cta[warp])
        return inside * m.grid.num_ctas + own - int(m.grid.cta_rank[own]) + rank

    def knows(self, warp: int, made: Made) -> bool:
        """Whether the initialisation of an mbarrier comes before what ``warp`` does now."""
        slot = self.slot[made.warp]
        if made.warp == warp or self.known[warp, slot] >= made.count:
            return True
        return made.fenced is not None and self.follows[warp, slot] >= made.fenced

    # -- accesses ----------------------------------------------------------------------------------

    def generic(
        self,
        warps: np.ndarray,
        cta: np.ndarray,
        offset: np.ndarray,
        width: int,
        write: bool,
        ins: Instruction,
    ) -> None:
        """Ordinary loads or stores of ``width`` bytes each, by flat arrays of warp, CTA, offset."""
        words = max(width // WORD, 1)
        word = (offset // WORD)[:, None] + np.arange(words)
        warps, cta = (np.broadcast_to(x[:, None], word.shape).reshape(-1) for x in (warps, cta))
        word = word.reshape(-1)
        part = _WHOLE if width >= WORD else (((1 << width) - 1) << offset % WORD).astype(np.uint8)
        self._check(warps, cta, word, part, write, "", ins)
        np.minimum.at(self.low, cta, word)
        np.maximum.at(self.high, cta, word)
        slot = self.slot[warps]
        count = self.known[warps, slot]
        if write:
            self._touch(self.writer, self.written, self.written_bytes, cta, word, slot, count, part)
            self.written_line[cta, word] = ins.line
        else:
            self._touch(self.reader, self.read, self.read_bytes, cta, word, slot, count, part)

    @staticmethod
    def _touch(
        who: np.ndarray,
        when: np.ndarray,
        parts: np.ndarray,
        cta: np.ndarray,
        word: np.ndarray,
        slot: np.ndarray,
        count: np.ndarray,
        part: np.ndarray | np.uint8,
    ) -> None:
        """Remembers the last to touch each word; bytes add up while it is the same warp."""
        if part is _WHOLE:
            parts[cta, word] = part
        else:
            same = (who[cta, word] == slot) & (when[cta, word] == count)
            parts[cta, word] = np.where(same, parts[cta, word], 0)
            np.bitwise_or.at(parts, (cta, word), part)
        who[cta, word], when[cta, word] = slot, count

    def asynchronous(self, warp: int, span: Span, write: bool, what: str, ins: Instruction) -> None:
        """An operation of the async proxy by ``warp``; ``write``: it overwrites the span."""
        if span.high <= self.low[span.cta] * WORD or span.low > self.high[span.cta] * WORD:
            return
        if span.words is not None:
            word = span.words
        elif span.chunks is None:
            word = np.arange(span.low // WORD, -(-span.high // WORD))
        else:
            word = (span.chunks.reshape(-1, 1) * (16 // WORD) + np.arange(16 // WORD)).reshape(-1)
        warps, cta = np.full(len(word), warp), np.full(len(word), span.cta)
        self._check(warps, cta, word, _WHOLE, write, what, ins)
        if write:
            self.written[span.cta, word] = self.read[span.cta, word] = 0
        else:
            self._check_proxy(warp, span.cta, word, what, ins)

    def copied(self, warp: int, span: Span, ins: Instruction) -> None:
        """A cp.async of ``warp`` completes: written now, by whom the others must know."""
        assert span.words is not None
        cta, word = span.cta, span.words
        self.writer[cta, word], self.written[cta, word] = self.slot[warp], self.now(warp)
        self.written_bytes[cta, word] = _WHOLE | _COPIED
        self.written_line[cta, word] = ins.line
        self.low[cta] = min(self.low[cta], int(word.min()))
        self.high[cta] = max(self.high[cta], int(word.max()))

    def _check(
        self,
        warps: np.ndarray,
        cta: np.ndarray,
        word: np.ndarray,
        part: np.ndarray | np.uint8,
        write: bool,
        what: str,
        ins: Instruction,
    ) -> None:
        own = self.slot[warps]
        others = [(self.writer, self.written, self.written_bytes, "wrote")]
        if write:
            others.append((self.reader, self.read, self.read_bytes, "read"))
        for who, when, parts, did in others:
            other, count = who[cta, word], when[cta, word]
            unknown = (count > self.known[warps, other]) & (other != own)
            if unknown.any():
                unknown &= (parts[cta, word] & part) != 0
            if unknown.any():
                k = int(unknown.argmax())
                place = int(cta[k]), int(word[k])
                self._race(int(warps[k]), int(other[k]), place, write, did, what, ins)

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
        m = self.m
        who = f"{what} of {m.grid.name_warp(warp)}" if what else m.grid.name_warp(warp)
        peer = self.peer(warp, other)
        line = f" at PTX line {self.written_line[place]}" if did == "wrote" else ""
        m.findings.add(
            "race",
            f"{who} {'overwrites' if write else 'reads'} shared memory 0x{place[1] * WORD:x}, "
            f"which {m.grid.name_warp(peer)} {did}{line}: no barrier orders the two",
            ins,
        )

    def _check_proxy(
        self, warp: int, cta: int, word: np.ndarray, what: str, ins: Instruction
    ) -> None:
        writer, count = self.writer[cta, word], self.written[cta, word]
        unseen = (count > self.visible[warp, writer]) & (count <= self.known[warp, writer])
        unseen &= self.written_bytes[cta, word] < _COPIED
        if unseen.any():
            k = int(unseen.argmax())
            self.m.findings.add(
                "proxy",
                f"{what} of {self.m.grid.name_warp(warp)} reads shared memory "
                f"0x{int(word[k]) * WORD:x}, which ordinary stores wrote at PTX line "
                f"{self.written_line[cta, word[k]]}, with no fence.proxy.async in between",
                ins,
            )
