"""The state of a simulated grid: CTAs, warps, registers, shared and tensor memory, and batches of
warps.

Registers of all resident warps lie in one array per bank, (register, warp, lane), so that one numpy
call executes an instruction for every warp that stands at the same place in the program. Warps are
numbered ``warp * num_ctas + cta``: the same warp of all resident CTAs is a contiguous range.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cutex.sim.errors import BadAddress, Finding
from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.flight import Flight
from cutex.sim.hazards.map_changes import TensorMapChanges
from cutex.sim.hazards.overwrites import Overwrites
from cutex.sim.host.capture import Launch
from cutex.sim.machine.async_copies import AsyncCopies
from cutex.sim.machine.barriers import ClusterBarriers, NamedBarriers
from cutex.sim.machine.bulk_groups import BulkGroups
from cutex.sim.machine.divergence import BLOCKED, Divergence
from cutex.sim.machine.mbarrier import MBarriers
from cutex.sim.machine.memory import POISON16, POISON32, POISON64, SYSTEM_SMEM, GlobalMemory
from cutex.sim.machine.residency import Residency
from cutex.sim.machine.tmem import TensorMemory
from cutex.sim.machine.waiting import Waiting
from cutex.sim.machine.warpgroup import WarpgroupMma
from cutex.sim.ptx.parse import Instruction, Program

_POISON = {1: True, 16: POISON16, 32: POISON32, 64: POISON64, 128: POISON64}  # by bank

# What an instruction says of each warp of its batch, where not all go on:
GO, RETRY, ARRIVED = 0, 1, 2  # next instruction; blocked, executes again; blocked, has executed


class Batch:
    """Warps that execute the same instruction together.

    ``idx`` (n,) warp numbers, ascending; ``sel`` the same as a slice where they are contiguous;
    ``mask`` (n, 32) the active lanes, None when all are.
    """

    __slots__ = ("idx", "mask", "n", "sel")

    def __init__(self, idx: np.ndarray, mask: np.ndarray | None) -> None:
        self.idx, self.mask, self.n = idx, mask, len(idx)
        contiguous = self.n and int(idx[-1]) - int(idx[0]) + 1 == self.n
        self.sel: Any = slice(int(idx[0]), int(idx[-1]) + 1) if contiguous else idx

    def active(self) -> np.ndarray:
        return np.ones((self.n, 32), bool) if self.mask is None else self.mask

    def any_active(self) -> np.ndarray:
        """(n,) whether the warp has an active lane."""
        return np.ones(self.n, bool) if self.mask is None else np.any(self.mask, axis=1)

    def first_lane(self) -> np.ndarray:
        """(n,) the lowest active lane; 0 where there is none."""
        return np.zeros(self.n, int) if self.mask is None else self.mask.argmax(1)

    def pick(self, rows: np.ndarray) -> Batch:
        """Some of its warps."""
        return Batch(self.idx[rows], None if self.mask is None else self.mask[rows])

    def one(self, values: Any) -> np.ndarray:
        """(n,) the value that the lowest active lane holds."""
        v = np.broadcast_to(values, (self.n, 32))
        return v[:, 0] if self.mask is None else v[np.arange(self.n), self.first_lane()]


@dataclass(slots=True, eq=False)
class Wait:
    """Why a warp is blocked, for wake-ups and for the deadlock report."""

    kind: str
    key: Any  # what `Machine.wake` is called with
    instruction: Instruction
    tell: Callable[[], str]
    lanes: np.ndarray | None = None  # of a warp whose lanes are apart; None for all
    on_wake: Callable[[], None] | None = None  # what it was waiting for is there


class PassedWait(NamedTuple):
    """A wait by parity that let a warp pass: what the warp then knew of the barrier."""

    parity: int
    phases: int  # completed
    instruction: Instruction


class Chance(NamedTuple):
    """``drawn``: whether chance, from the seed, decides what hardware leaves open."""

    seed: int = 0
    drawn: bool = False


@dataclass
class RegisterPool:
    """Registers of a CTA that setmaxnreg moves: free ones, and per thread of each warp."""

    free: int
    held: dict[int, int] = field(default_factory=dict)


class Machine:
    """Everything that instructions read and write while a set of CTAs is resident."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        params: np.ndarray,
        residency: Residency,
        chance: Chance,
    ) -> None:
        self.program, self.memory, self.params = program, memory, params
        self.grid: tuple[int, int, int] = launch.grid
        self.block: tuple[int, int, int] = launch.block
        self.cluster: tuple[int, int, int] = launch.cluster
        self.seed, self.drawn, self.random = chance.seed, chance.drawn, random.Random(chance.seed)
        self.residency = residency
        self.waiting = Waiting([])  # clusters of the grid that have not started
        # NOTE: elect.sync may choose any lane, but the same one for the same mask (PTX ISA
        # 9.7.14.14)
        self.elected = self.random.randrange(32) if self.drawn else 0
        self.num_threads, self.warps_per_cta = launch.num_threads, launch.warps_per_cta
        self.cluster_size = launch.cluster_size
        self.num_ctas = num_ctas = residency.ctas
        self.num_warps = num_ctas * self.warps_per_cta
        self.static_smem = self._place_variables()
        self.smem_end = SYSTEM_SMEM + self.static_smem + launch.smem
        self.smem_bytes = -(-self.smem_end // 128) * 128

        self.findings: dict[tuple[str, int], Finding] = {}
        self.progress = 0  # grows with every visible effect; tells a spin loop from work
        warps = np.arange(self.num_warps)
        self.warp_cta = warps % num_ctas
        self.warp_in_cta = warps // num_ctas
        banks = {1: bool, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: np.uint64}
        self.registers = {
            bank: np.empty((count, self.num_warps, 32, *((2,) if bank == 128 else ())), banks[bank])
            for bank, count in program.registers.items()
        }
        self.lanes = Divergence(self)
        self.sleepers: dict[Any, list[tuple[int, Wait]]] = {}  # by key
        self.ticks = 0
        self.carry = np.zeros((self.num_warps, 32), bool)  # of add.cc and its kin
        self.smem = np.empty((num_ctas, self.smem_bytes), np.uint8)
        self.mbarriers = MBarriers(self)
        self.flight = Flight(self)
        self.bulk_groups = BulkGroups(self)
        self.async_copies = AsyncCopies(self)
        self.warpgroups = WarpgroupMma(self)
        self.named = NamedBarriers(self)
        self.clusters = ClusterBarriers(self)
        self.tmem = TensorMemory(self)
        self.overwrites = Overwrites(self)
        self.tensor_maps = TensorMapChanges(self)

    @property
    def live(self) -> np.ndarray:
        """(warps, 32) lanes that have not returned."""
        return self.lanes.live

    # -- residency ---------------------------------------------------------------------------------

    def load_clusters(self, clusters: Sequence[int]) -> None:
        """Makes these clusters of the grid (numbered by x, then y, then z) resident, with fresh,
        poisoned state.
        """
        self.present = count = len(clusters) * self.cluster_size
        assert count <= self.num_ctas
        self.cta_coord = np.zeros((self.num_ctas, 3), np.uint32)
        self.cta_rank = np.arange(self.num_ctas) % self.cluster_size
        self.cta_cluster = np.zeros(self.num_ctas, np.int64)  # its number in the grid
        for i in range(count):
            which, rank = divmod(i, self.cluster_size)
            self.cta_coord[i] = self.coordinates(clusters[which] * self.cluster_size + rank)
            self.cta_cluster[i] = clusters[which]
        for bank, registers in self.registers.items():
            registers[...] = _POISON[bank]
        self.smem.view(np.uint32)[...] = POISON32
        # per 16 bytes: 1 + swizzle of the TMA load that wrote them (0: none did), and its PTX line
        self.box_swizzle = np.zeros((self.num_ctas, self.smem_bytes // 16), np.int8)
        self.box_line = np.zeros((self.num_ctas, self.smem_bytes // 16), np.int32)
        self.mbarriers.clear()
        self.flight.clear()
        self.bulk_groups.clear()
        self.async_copies.clear()
        self.warpgroups.clear()
        self.tmem.clear()
        self.local = np.full((self.num_warps, 32, self.local_bytes), 0x7F, np.uint8)
        self.local[..., ::2] = 0xFF
        threads = self.warp_in_cta[:, None] * 32 + np.arange(32)
        live = (threads < self.num_threads) & (self.warp_cta[:, None] < count)
        self.lanes.clear(live)
        self.sleepers.clear()
        self.waits: dict[int, list[Wait]] = {}  # by warp
        self.timed_out = np.zeros((self.num_warps, 32), bool)
        self.named.clear()
        self.clusters.clear()
        self.last_wait: dict[int, dict[tuple[int, int], PassedWait]] = defaultdict(dict)
        self.register_pools: dict[int, RegisterPool] = {}  # by cta
        self.clocks = Clocks(self)

    def coordinates(self, linear: int) -> tuple[int, int, int]:
        """Grid coordinates of the ``linear``-th CTA in cluster order: clusters by x, y, z; ranks
        within, likewise.
        """
        cx, cy, cz = self.cluster
        gx, gy = self.grid[0] // cx, self.grid[1] // cy
        which, rank = divmod(linear, self.cluster_size)
        x, y, z = which % gx, which // gx % gy, which // (gx * gy)
        rx, ry, rz = rank % cx, rank // cx % cy, rank // (cx * cy)
        return x * cx + rx, y * cy + ry, z * cz + rz

    def _place_variables(self) -> int:
        """Offsets of shared, local and module variables; returns the bytes of static smem."""
        self.offsets: dict[str, int] = {}
        sizes = {"shared": 0, "local": 0, "global": 0, "const": 0}
        dynamic = []
        for v in self.program.variables.values():
            if v.space == "shared" and v.size == 0:
                dynamic.append(v)
                continue
            space = "global" if v.space == "const" else v.space
            at = -(-sizes[space] // v.align) * v.align
            self.offsets[v.name] = at + (SYSTEM_SMEM if space == "shared" else 0)
            sizes[space] = at + v.size
        static = sizes["shared"]
        for v in dynamic:
            static = -(-static // v.align) * v.align if static else 0
            self.offsets[v.name] = SYSTEM_SMEM + static
        self.local_bytes = sizes["local"]
        return static

    # -- names for reports -------------------------------------------------------------------------

    def name_warp(self, warp: int) -> str:
        cta = int(self.warp_cta[warp])
        x, y, z = self.cta_coord[cta]
        rank = f" (rank {self.cta_rank[cta]} of its cluster)" if self.cluster_size > 1 else ""
        return f"CTA ({x},{y},{z}){rank} warp {self.warp_in_cta[warp]}"

    def name_cta(self, cta: int) -> str:
        x, y, z = self.cta_coord[cta]
        return f"CTA ({x},{y},{z})"

    def find(self, rule: str, message: str, instruction: Instruction) -> None:
        """Records a finding, once per rule and instruction."""
        self.findings.setdefault(
            (rule, instruction.line), Finding(rule, message, instruction.where())
        )

    def clock(self) -> int:
        """What clocks show: it grows whenever it is read, and means nothing else."""
        self.ticks += 256
        return self.ticks

    # -- blocking and waking -----------------------------------------------------------------------

    def sleep(self, warp: int, wait: Wait) -> None:
        """The lanes of ``warp`` that execute now sleep until ``wait.key`` wakes them."""
        self.waits.setdefault(warp, []).append(wait)
        self.sleepers.setdefault(wait.key, []).append((warp, wait))
        self.lanes.state[warp] = BLOCKED

    def wake(self, key: Any) -> None:
        for warp, wait in self.sleepers.pop(key, ()):
            self._forget(warp, wait)
            if wait.on_wake is not None:
                wait.on_wake()
            self.lanes.wake(warp, wait.lanes)

    def time_out(self, warp: int, wait: Wait) -> None:
        """A try_wait gives up once."""
        self.sleepers[wait.key].remove((warp, wait))
        if not self.sleepers[wait.key]:
            del self.sleepers[wait.key]
        self._forget(warp, wait)
        self.timed_out[warp, slice(None) if wait.lanes is None else wait.lanes] = True
        self.lanes.wake(warp, wait.lanes)

    def _forget(self, warp: int, wait: Wait) -> None:
        self.waits[warp].remove(wait)
        if not self.waits[warp]:
            del self.waits[warp]

    # -- shared memory -----------------------------------------------------------------------------

    def shared_location(
        self, warps: np.ndarray, addresses: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Shared-window addresses (rank in bits 24 and up) -> (cta, byte offset), for each of
        ``warps``.
        """
        own = self.warp_cta[warps]
        rank = (addresses >> np.uint64(24)).astype(np.int64)
        return own - self.cta_rank[own] + rank, (addresses & np.uint64(0xFFFFFF)).astype(np.int64)

    def check_shared(
        self,
        warps: np.ndarray,
        lanes: np.ndarray,
        cta: np.ndarray,
        offset: np.ndarray,
        size: int,
        ins: Instruction,
    ) -> None:
        """Bounds and alignment of ``size``-byte accesses; raises BadAddress for the first that
        breaks them.
        """
        first = self.warp_cta[warps] - self.cta_rank[self.warp_cta[warps]]
        bad = (
            (cta < first)
            | (cta >= first + self.cluster_size)
            | (offset < SYSTEM_SMEM)
            | (offset + size > self.smem_end)
        )
        bad |= (offset & (size - 1)) != 0
        if bad.any():
            k = int(np.nonzero(bad)[0][0])
            why = "not aligned" if offset[k] & (size - 1) else "outside the CTA's shared memory"
            raise BadAddress.at(
                ins,
                f"{self.name_warp(int(warps[k]))} lane {lanes[k]} accesses {size} bytes at shared "
                f"0x{int(offset[k]):x}, {why} (0x{SYSTEM_SMEM:x}..0x{self.smem_end:x})",
            )

    def smem_words(self, size: int) -> np.ndarray:
        """All resident shared memory as (ctas * smem_bytes / size,) unsigned words."""
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
        return self.smem.reshape(-1).view(kind)
