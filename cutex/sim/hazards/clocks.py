"""Who knows of whose shared memory accesses: vector clocks, and the proxy fence on the way.

Each warp counts its synchronisations; ``known[w, v]`` is how far warp w knows what warp v did,
through barriers, and ``visible[w, v]`` how far the async proxy sees it too, because a
``fence.proxy.async`` stood on the way. ``follows[w, v]`` is how far w only runs after v: a
``barrier.cluster.arrive.relaxed`` orders execution, but of memory it releases just what a fence
released before it. Shadow memory remembers, for each 4 bytes, the last agent that wrote them with
ordinary stores or a non-bulk cp.async, and the last warps that read them, with their counts. An
access is ordered after another iff its warp knows the other's count; this does not depend on the
order in which the simulator happened to run them. The method is that of happens-before race
detectors (FastTrack); the rules are PTX ISA chapter 8 and 9.7.13.5.

What a warp issues asynchronously is done by agents with slots of their own: its tensor-core
operations, its bulk stores and its non-bulk copies, whose counts it learns when it waits for a
group, and releases by a commit. What completes on an mbarrier counts in that barrier's slot: the
number of its phases, learned by those whose wait passes. See async_accesses for the memory that
these operations access. Atomics, volatile, acquire and release accesses synchronise by themselves,
and are left out.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.machine.operation import CHUNK, WORD
from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.mbarrier import Made
    from cutex.sim.machine.operation import Span

_WHOLE = np.uint8(0b1111)  # all bytes of a word
_COPIED = np.uint8(0b10000)  # by cp.async: see there why the async proxy may read it
NEVER = np.iinfo(np.int32).max  # the count of what is not complete
_BARRIERS = 32  # slots to begin with


class Kind(IntEnum):
    """Who acts for a warp."""

    ITSELF = 0
    TENSOR = 1  # wgmma, tcgen05
    BULK = 2  # bulk stores
    COPY = 3  # non-bulk cp.async


class Clocks:
    """Vector clocks of the resident warps; a warp's slot is its number within its cluster, those
    of its other agents follow by kind, those of mbarriers behind them.
    """

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.warps = machine.grid.warps_per_cta * machine.grid.cluster_size
        self.barriers: dict[tuple[int, int, int], int] = {}  # rank, offset, which: slot
        width = self.warps * len(Kind) + _BARRIERS
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
            mine = self.rows[:, warp, : given.shape[1]]
            np.maximum(mine, given, out=mine)

    def learn(self, warp: int, slot: int, count: int) -> None:
        """``warp`` has waited for the agent's first ``count`` operations (or phases)."""
        self.known[warp, slot] = max(self.known[warp, slot], count)

    def _count(self, warps: int | np.ndarray) -> None:
        self.known[warps, self.slot[warps]] += 1
        self.follows[warps, self.slot[warps]] += 1

    @staticmethod
    def join(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
        if a is None:
            return b
        if a.shape != b.shape:  # slots were added in between
            a, b = sorted((a, b), key=lambda given: given.shape[1])
            b = b.copy()
            np.maximum(a, b[:, : a.shape[1]], out=b[:, : a.shape[1]])
            return b
        return np.maximum(a, b)

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

    def agent(self, kind: Kind, warp: int) -> int:
        """The slot of what acts for the warp."""
        return int(kind) * self.warps + int(self.slot[warp])

    def barrier_slot(self, cta: int, offset: int, again: bool) -> int:
        """A slot for the mbarrier that is initialised there, perhaps anew."""
        rank, which = int(self.m.grid.cta_rank[cta]), 0
        if again:
            which = 1 + sum(key[:2] == (rank, offset) for key in self.barriers)
        key = rank, offset, which
        if key not in self.barriers:
            slot = self.barriers[key] = self.warps * len(Kind) + len(self.barriers)
            if slot == self.rows.shape[2]:
                self._widen()
        return self.barriers[key]

    def _widen(self) -> None:
        """Twice as many slots."""
        self.rows, self.fenced = (np.concatenate([a, 0 * a], 2) for a in (self.rows, self.fenced))
        self.known, self.visible, self.follows = self.rows

    def peer(self, warp: int, slot: int) -> int:
        """The warp for which this slot's agent acts, in the cluster of ``warp``."""
        m = self.m
        rank, inside = divmod(slot % self.warps, m.grid.warps_per_cta)
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
        if span.chunks is None:
            word = np.arange(span.low // WORD, -(-span.high // WORD))
        else:
            per = CHUNK // WORD
            word = (span.chunks.reshape(-1, 1) * per + np.arange(per)).reshape(-1)
        warps, cta = np.full(len(word), warp), np.full(len(word), span.cta)
        self._check(warps, cta, word, _WHOLE, write, what, ins)
        if write:
            self.written[span.cta, word] = self.read[span.cta, word] = 0
        else:
            self._check_proxy(warp, span.cta, word, what, ins)

    def copy(self, warp: int, word: np.ndarray, number: int, ins: Instruction) -> None:
        """The ``number``-th cp.async of ``warp`` writes words of its CTA."""
        word = word.reshape(-1)
        cta = np.full(len(word), self.m.grid.warp_cta[warp])
        self._check(np.full(len(word), warp), cta, word, _WHOLE, True, "the cp.async", ins)
        self.read[cta, word] = 0
        self.writer[cta, word], self.written[cta, word] = self.agent(Kind.COPY, warp), number
        self.written_bytes[cta, word] = _WHOLE | _COPIED
        self.written_line[cta, word] = ins.line
        self.low[cta[0]] = min(self.low[cta[0]], int(word.min()))
        self.high[cta[0]] = max(self.high[cta[0]], int(word.max()))

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
        peer, why = m.grid.name_warp(self.peer(warp, other)), "no barrier orders the two"
        line = f" at PTX line {self.written_line[place]}" if did == "wrote" else ""
        if other >= self.warps:
            peer = f"a cp.async of {peer}"
            why = "nothing that this warp has waited for says that it is complete"
        m.findings.add(
            "race",
            f"{who} {'overwrites' if write else 'reads'} shared memory 0x{place[1] * WORD:x}, "
            f"which {peer} {did}{line}: {why}",
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
