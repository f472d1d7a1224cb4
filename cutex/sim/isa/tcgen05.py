"""Fifth-generation tensor cores of sm_100a and tensor memory (PTX ISA 9.7.16).

Tensor memory is 128 lanes x 512 columns of 32 bits per CTA, addressed as lane << 16 | column. The
data-path layouts and the register fragments of ld/st are given by the PTX ISA as figures; the
functions here are those of CUTLASS's atoms, which the kernels use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cutex.sim.errors import BadAddress, BadOperand, BarrierMisuse
from cutex.sim.hazards.clocks import Kind
from cutex.sim.hazards.lifetimes import RemoteUse
from cutex.sim.isa.sync import require_whole_warp
from cutex.sim.machine.batch import RETRY, Batch
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import as_bytes, shared_addresses
from cutex.sim.machine.operation import Engine, Operation, Place, Rectangle, Span
from cutex.sim.machine.tmem import COLUMNS
from cutex.sim.machine.waits import Wait
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.parse import Address, Instruction, Operand, Vector


@instruction("tcgen05.wait")
def wait(d: Decoder) -> Execute:
    """9.7.16.8.3: ld and st take effect when they execute; who has waited is remembered."""
    d.only("wait", "ld", "st", "sync", "aligned")
    kind = Kind.LOAD if "ld" in d.mods else Kind.STORE

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        d.m.tmem.accesses.wait(kind, b.idx[b.any_active()])

    return execute


@instruction("tcgen05.fence")
def fence(d: Decoder) -> Execute:
    """9.7.16.11.1: what it orders is remembered (see TmemAccesses)."""
    d.only("fence", "before_thread_sync", "after_thread_sync")
    if "before_thread_sync" in d.mods:
        return lambda b: d.m.tmem.accesses.before_sync(b.idx[b.any_active()])
    return lambda b: d.m.tmem.accesses.after_sync(b.idx[b.any_active()])


def cta_group(d: Decoder) -> int:
    at = d.parts.index("cta_group")
    return int(d.parts[at + 1])


@dataclass(frozen=True)
class Issuer:
    """The thread that issues an mma, cp or commit, and the CTAs that carry it out (9.7.16.5): its
    own, or with cta_group::2 its pair, even CTA first. Any thread of either CTA may issue for both.
    """

    m: Machine
    warp: int
    lane: int
    group: int
    ins: Instruction

    @property
    def ctas(self) -> list[int]:
        own = int(self.m.grid.warp_cta[self.warp])
        first = own if self.group == 1 else own - int(self.m.grid.cta_rank[own]) % 2
        return [first + r for r in range(self.group)]

    def require_peer(self) -> None:
        """9.7.16.5: the other CTA of the pair must be there, and not have exited."""
        m = self.m
        if self.group == 1:
            return
        who, what = m.grid.name_warp(self.warp), f"executes {self.ins.op}"
        if m.grid.cluster_size % 2:
            raise BadOperand.at(
                self.ins, f"{who} {what}, but clusters of {m.grid.cluster_size} have no pairs"
            )
        peer = int(m.grid.warp_cta[self.warp]) ^ 1  # NOTE: resident clusters start at even CTAs
        if not m.live[peer :: m.grid.num_ctas].any():
            raise BarrierMisuse.at(
                self.ins, f"{who} {what}, but {m.grid.name_cta(peer)}, its peer, has exited"
            )

    @property
    def _thread(self) -> tuple[int, int, int]:
        return self.warp, self.lane, self.group

    def issue(
        self,
        engine: Engine,
        complete: Callable[[], None],
        reads: list[Place],
        writes: list[Place],
        flops: int = 0,
    ) -> None:
        """An mma or cp: those of one CTA, or pair, are carried out in order."""
        self.require_peer()
        what, queue = f"the {engine}", ("tcgen05", self.ctas[0])
        size = sum(place.size for place in reads if isinstance(place, Span))
        op = Operation(
            what, self.warp, self.ins, queue, complete, engine, size, flops, reads, writes,
            agents=[(self._slot, self.m.flight.issued + 1)],
        )  # fmt: skip
        self.m.flight.issue(op)
        self.m.flight.latest.setdefault(self._thread, []).append(op)

    @property
    def _slot(self) -> int:
        return self.m.clocks.agent(Kind.TENSOR, self.warp)

    def commit(self, barrier: tuple[int, int], arrive: Callable[[np.ndarray], None]) -> None:
        """Arrives when what this thread issued before is complete: nobody else's work counts.
        ``arrive`` takes what is released then.
        """
        self.require_peer()
        given = self.m.clocks.give(self.warp)
        tracked = self.m.flight.latest.get(self._thread)
        if not tracked:
            arrive(given)
            return
        self.m.clocks.release(given, self._slot, tracked[-1].number)
        if tracked[-1].done:
            arrive(given)
            return
        for op in tracked:
            op.signals = op.signals or [barrier]
        tracked[-1].then.append(lambda: arrive(given))
        self.m.flight.latest[self._thread] = tracked[-1:]


# -- allocation ------------------------------------------------------------------------------------


@instruction("tcgen05.alloc")
def alloc(d: Decoder) -> Execute:
    """9.7.16.7.1: a power of two of columns, at least 32; waits until they are free, writes their
    address to shared memory. With cta_group::2 the pair allocates together, so each waits for the
    other.
    """
    d.only("alloc", "cta_group", "1", "2", "sync", "aligned", "shared", "cta")
    address, columns, m, ins = d.address(0), d.src(1, "u32"), d.m, d.ins
    pair = cta_group(d) == 2

    def execute(b: Batch) -> np.ndarray | None:
        require_whole_warp(d, b)
        out = np.zeros(b.n, np.int8)
        counts, where = b.one(columns(b)), shared_addresses(b.one(address(b)))
        for row in np.nonzero(b.any_active())[0].tolist():
            warp, n = int(b.idx[row]), int(counts[row])
            cta = int(m.grid.warp_cta[warp])
            if n < 32 or n > COLUMNS or n & (n - 1):
                raise BadOperand.at(
                    ins, f"tcgen05.alloc of {n} columns: takes 32, 64, 128, 256 or 512"
                )
            if cta in m.tmem.relinquished:
                raise BarrierMisuse.at(ins, "tcgen05.alloc after relinquish_alloc_permit")
            first = m.tmem.request(cta, pair, n, ins)
            if first is None:
                out[row] = RETRY
                tell = lambda n=n, cta=cta: f"tcgen05.alloc: {m.tmem.why_not(cta, n)}"
                m.sleep(warp, Wait("tensor memory", ("tmem", cta), ins, tell))
                continue
            target, offset = m.grid.shared_location(b.idx[row : row + 1], where[row : row + 1])
            m.check_shared(b.idx[row : row + 1], np.zeros(1, int), target, offset, 4, ins)
            lane = np.zeros(1, int)
            m.smem_shadow.generic(b.idx[row : row + 1], lane, target, offset, 4, True, ins)
            m.box_swizzle[target, offset >> 4] = 0
            m.smem[target[0], offset[0] : offset[0] + 4] = as_bytes(np.array([first], np.uint32))[0]
            m.progress += 1
        return out if out.any() else None

    return execute


@instruction("tcgen05.dealloc")
def dealloc(d: Decoder) -> Execute:
    """9.7.16.7.1, 9.7.16.5: comes after all accesses to these columns. With cta_group::2, after
    those of the peer's as well; it may wait for the peer to deallocate too, and does here.
    """
    address, columns, m, ins = d.src(0, "u32"), d.src(1, "u32"), d.m, d.ins
    pair = cta_group(d) == 2

    def execute(b: Batch) -> np.ndarray | None:
        require_whole_warp(d, b)
        firsts, counts = b.one(address(b)), b.one(columns(b))
        out = np.zeros(b.n, np.int8)
        for row in np.nonzero(b.any_active())[0].tolist():
            warp = int(b.idx[row])
            cta, first, n = (
                int(m.grid.warp_cta[warp]),
                int(firsts[row]) & 0xFFFF,
                int(counts[row]),
            )
            both = [cta, cta ^ 1] if pair else [cta]
            if m.tmem.together("dealloc", cta, pair):
                continue  # the peer, which came later, has freed both
            m.tmem.check(cta, first, n, m.grid.name_warp(warp), ins)
            places = [Rectangle(c, 0, 128, first, first + n) for c in both]
            if cta not in m.tmem.came["dealloc"]:
                for place in places:
                    m.tmem.shadow.before_free(warp, place, ins)
            if not m.tmem.meet("dealloc", cta, pair):
                out[row] = RETRY
                m.sleep(warp, Wait("tensor memory", ("tmem", cta), ins, _peer_teller(m, cta, ins)))
                continue
            by = f"{m.grid.name_warp(warp)} at {ins.where()}"
            for place in places:
                m.tmem.shadow.free(place)
                m.tmem.free(place.cta, first, n, by)
                m.wake(("tmem", place.cta))
            m.progress += 1
        return out if out.any() else None

    return execute


def _peer_teller(m: Machine, cta: int, ins: Instruction) -> Callable[[], str]:
    return lambda: f"{ins.op}: the other CTA of the pair, {m.grid.name_cta(cta ^ 1)}, has not come"


@instruction("tcgen05.relinquish_alloc_permit")
def relinquish(d: Decoder) -> Execute:
    """9.7.16.7.1, 9.7.16.5: this CTA allocates no more; with cta_group::2, nor does its peer, for
    which it may wait.
    """
    m, ins, pair = d.m, d.ins, cta_group(d) == 2

    def execute(b: Batch) -> np.ndarray | None:
        out = np.zeros(b.n, np.int8)
        for row in np.nonzero(b.any_active())[0].tolist():
            warp = int(b.idx[row])
            cta = int(m.grid.warp_cta[warp])
            m.tmem.relinquished.add(cta)
            if m.tmem.together("relinquish", cta, pair):
                continue
            if m.tmem.meet("relinquish", cta, pair):
                m.progress += 1
                m.wake(("tmem", cta ^ 1 if pair else cta))
                continue
            out[row] = RETRY
            m.sleep(warp, Wait("tensor memory", ("tmem", cta), ins, _peer_teller(m, cta, ins)))
        return out if out.any() else None

    return execute


# -- ld and st -------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def fragment(shape: str, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) of register i in thread t, relative to the address: two (registers, 32)
    arrays.
    """
    t = np.arange(32)[None, :]
    if shape == "32x32b":
        i = np.arange(repeats)[:, None]
        return t + 0 * i, i + 0 * t
    if shape == "16x64b":
        i = np.arange(repeats)[:, None]
        return t // 4 + 8 * (t % 2) + 0 * i, t // 2 % 2 + 2 * i
    if shape == "16x128b":
        i = np.arange(2 * repeats)[:, None]
        return t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)
    if shape == "16x256b":
        i = np.arange(4 * repeats)[:, None]
        return t // 4 + 8 * (i // 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i // 4)
    i = np.arange(repeats)[:, None]  # 16x32bx2: lanes 16.. add the immediate to their columns
    return t % 16 + 0 * i, i + 0 * t


_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")


class _TmemAccess:
    """The address operand and fragment of one ld or st."""

    def __init__(self, d: Decoder, address: int) -> None:
        d.only(
            "ld",
            "st",
            "sync",
            "aligned",
            *_SHAPES,
            *(f"x{1 << i}" for i in range(8)),
            "pack",
            "unpack",
            "16b",
        )
        self.d, self.m = d, d.m
        self.shape = next(s for s in _SHAPES if s in d.mods)
        repeats = next(int(p[1:]) for p in d.parts if p[0] == "x" and p[1:].isdigit())
        self.packed = "16b" in d.mods
        # 16x32bx2 alone has an immediate, behind the address
        split = d.immediate(address + 1) if self.shape == "16x32bx2" else 0
        self.lanes, self.columns = fragment(self.shape, repeats)
        if self.packed:
            # NOTE: the shape says where 16-bit elements lie in registers, one per column: the two
            # halves of a register are neighbouring columns (CUTLASS's _16b atoms)
            self.lanes = np.repeat(self.lanes, 2, 0)
            self.columns = np.stack([2 * self.columns, 2 * self.columns + 1], 1).reshape(-1, 32)
        if split:
            self.columns = self.columns + split * (np.arange(32) // 16)
        operand = d.ins.operands[address]
        self.address = (
            d.address(address) if isinstance(operand, Address) else d.read(operand, "u32")
        )

    def registers(self, k: int) -> tuple[Operand, ...]:
        """The registers that operand ``k`` names, one for each of the fragment."""
        operand = self.d.ins.operands[k]
        items = operand.items if isinstance(operand, Vector) else (operand,)
        wanted = len(self.columns) // (2 if self.packed else 1)
        if len(items) != wanted:
            raise self.d.unknown(f"{len(items)} registers, and {wanted} are wanted")
        return items

    def places(self, b: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rows of the batch that take part, and cta, lane, column of every register: (rows,
        registers, 32).

        NOTE: hardware ignores the bits of an address that name a warp's quarter, and DeepGEMM's
        kernels leave them zero (sm100_bf16_gemm.cuh, 54e2261), as does an example of CUTLASS
        (1cta_mma_a_from_tmem.py). Whoever names the quarter of another warp expects its lanes.
        """
        require_whole_warp(self.d, b)
        rows = np.nonzero(b.any_active())[0]
        base = b.one(self.address(b))[rows].astype(np.int64)
        lane, column = base >> 16, base & 0xFFFF
        quarter = self.m.grid.warp_in_cta[b.idx[rows]] % 4 * 32
        lane = np.where(lane < 32, quarter + lane, lane)
        high = int(self.lanes.max())
        bad = (lane < quarter) | (lane + high >= quarter + 32) | (lane % 16 != 0)
        if bad.any():
            k = int(np.nonzero(bad)[0][0])
            raise BadAddress.at(
                self.d.ins,
                f"{self.m.grid.name_warp(int(b.idx[rows[k]]))} accesses tensor memory lanes "
                f"{lane[k]}..{lane[k] + high}, a warp may touch only lanes "
                f"{quarter[k]}..{quarter[k] + 31} (its number modulo 4)",
            )
        cta = self.m.grid.warp_cta[b.idx[rows]]
        width = int(self.columns.max()) + 1
        for k, row in enumerate(rows.tolist()):
            self.m.tmem.check(
                int(cta[k]),
                int(column[k]),
                width,
                self.m.grid.name_warp(int(b.idx[row])),
                self.d.ins,
            )
        return (
            rows,
            cta[:, None, None],
            lane[:, None, None] + self.lanes,
            column[:, None, None] + self.columns,
        )

    def conflicts(
        self,
        b: Batch,
        rows: np.ndarray,
        cta: np.ndarray,
        lane: np.ndarray,
        column: np.ndarray,
        write: bool,
    ) -> None:
        for k, row in enumerate(rows.tolist()):
            place = Rectangle(
                int(cta[k, 0, 0]),
                int(lane[k].min()),
                int(lane[k].max()) + 1,
                int(column[k].min()),
                int(column[k].max()) + 1,
            )
            self.m.tmem.shadow.access(int(b.idx[row]), place, write, self.d.ins)


@instruction("tcgen05.ld")
def ld(d: Decoder) -> Execute:
    """9.7.16.8.1: each warp reads its quarter of the lanes."""
    access = _TmemAccess(d, 1)
    writes = [d.write(t, "b32") for t in access.registers(0)]

    def execute(b: Batch) -> None:
        rows, cta, lane, column = access.places(b)
        access.conflicts(b, rows, cta, lane, column, False)
        got = d.m.tmem.cells[cta, lane, column]  # (rows, registers, 32)
        if access.packed:
            got = got[:, ::2] & np.uint32(0xFFFF) | got[:, 1::2] << np.uint32(16)
        part = (
            b if len(rows) == b.n else Batch(b.idx[rows], None if b.mask is None else b.mask[rows])
        )
        for i, write in enumerate(writes):
            write(part, got[:, i])

    return execute


@instruction("tcgen05.st")
def st(d: Decoder) -> Execute:
    """9.7.16.8.2"""
    access = _TmemAccess(d, 0)
    reads = [d.read(s, "b32") for s in access.registers(len(d) - 1)]

    def execute(b: Batch) -> None:
        rows, cta, lane, column = access.places(b)
        access.conflicts(b, rows, cta, lane, column, True)
        values = np.stack([b.lanes(r(b)) for r in reads], 1)[rows]
        if access.packed:
            values = np.stack([values & np.uint32(0xFFFF), values >> np.uint32(16)], 2).reshape(
                len(rows), -1, 32
            )
        d.m.tmem.cells[cta, lane, column] = values
        d.m.progress += 1

    return execute


# -- completion ------------------------------------------------------------------------------------


@instruction("tcgen05.commit")
def commit(d: Decoder) -> Execute:
    """9.7.16.12.1: arrives once on the mbarrier when all earlier mma and cp of this thread, with
    the same cta_group, are complete.
    """
    d.only(
        "commit",
        "cta_group",
        "1",
        "2",
        "mbarrier",
        "arrive",
        "one",
        "shared",
        "cluster",
        "multicast",
    )
    group = cta_group(d)
    address, m, ins = d.address(0), d.m, d.ins
    mask = d.src(1, "u16") if "multicast" in d.mods else None

    def execute(b: Batch) -> None:
        a = shared_addresses(address(b))
        masks = b.lanes(mask(b)) if mask else None
        rows, lanes = np.nonzero(b.active())
        for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
            warp = int(b.idx[row])
            own = int(m.grid.warp_cta[warp])
            cta, offset = m.grid.shared_location(b.idx[row : row + 1], a[row, lane : lane + 1])
            m.check_shared(b.idx[row : row + 1], np.array([lane]), cta, offset, 8, ins)
            first = own - int(m.grid.cta_rank[own])
            targets = (
                [int(cta[0])]
                if masks is None
                else [
                    first + r for r in range(m.grid.cluster_size) if int(masks[row, lane]) >> r & 1
                ]
            )
            for target in targets:
                m.mbarriers.use(target, int(offset[0]), warp, ins)
            barrier = own if own in targets else min(targets, default=own), int(offset[0])
            arrive = _arriver(m, targets, int(offset[0]), warp, ins)
            Issuer(m, warp, lane, group, ins).commit(barrier, arrive)

    return execute


def _arriver(
    m: Machine, targets: list[int], offset: int, warp: int, ins: Instruction
) -> Callable[[np.ndarray], None]:
    def complete(given: np.ndarray) -> None:
        for target in targets:
            after = m.mbarriers.get(target, offset, ins)
            after.remote = bool(target != m.grid.warp_cta[warp])
            if after.remote:
                number = int(given[0, m.clocks.agent(Kind.TENSOR, warp)])
                use = RemoteUse(number, after.phases + 1, "the commit", warp, ins)
                m.lifetimes.use(target, m.clocks.agent(Kind.TENSOR, warp), use, after)
            m.mbarriers.give(target, offset, given, ins)
            m.mbarriers.arrive(
                target, offset, 1, f"tcgen05.commit of {m.grid.name_warp(warp)}", ins
            )

    return complete
