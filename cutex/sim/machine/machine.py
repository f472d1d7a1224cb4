"""The state of a simulated grid: registers, shared and tensor memory, barriers, operations in
flight.

Registers of all resident warps are in one array per bank, (register, warp, lane), so that one numpy
call executes an instruction for every warp at the same place in the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cutex.sim.errors import BadAddress
from cutex.sim.host.capture import Launch
from cutex.sim.machine.async_copies import AsyncCopies
from cutex.sim.machine.barriers import ClusterBarriers, NamedBarriers
from cutex.sim.machine.bulk_groups import BulkGroups
from cutex.sim.machine.core import Core
from cutex.sim.machine.events import Observer
from cutex.sim.machine.findings import Findings
from cutex.sim.machine.flight import Flight
from cutex.sim.machine.grid import Grid
from cutex.sim.machine.mbarrier import MBarriers
from cutex.sim.machine.memory import POISON16, POISON32, POISON64, SYSTEM_SMEM, GlobalMemory
from cutex.sim.machine.pending_clusters import PendingClusters
from cutex.sim.machine.residency import Residency
from cutex.sim.machine.tmem import TensorMemory
from cutex.sim.machine.waits import PassedWait
from cutex.sim.machine.warpgroup import WarpgroupMma
from cutex.sim.policy import Policy
from cutex.sim.ptx.operands import Reg
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.strength import is_own_shared
from cutex.sim.ptx.temporaries import homes, lasting
from cutex.sim.sides import SmemNames

_POISON = {1: True, 16: POISON16, 32: POISON32, 64: POISON64, 128: POISON64}  # by bank


@dataclass
class RegisterPool:
    """The registers of a CTA that setmaxnreg moves: free ones, and those per thread of each
    warp."""

    free: int = 0
    held: dict[int, int] = field(default_factory=dict)


def registers_at_start(warps: int, ctas_per_sm: int = 1) -> int:
    """The registers per thread with which a CTA of so many warps starts, as ptxas allots them:
    65536 divided by the threads of the CTAs of an SM, rounded down to 8.
    """
    return min(65536 // (32 * warps * ctas_per_sm) // 8 * 8, 248)


class Machine(Core):
    """The state that instructions read and write while a set of CTAs is resident."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        params: np.ndarray,
        residency: Residency,
        policy: Policy,
    ) -> None:
        self.program, self.memory, self.params = program, memory, params
        self.residency, self.policy = residency, policy
        self.pending_clusters = PendingClusters([])
        self.static_smem = self._place_variables()
        self.smem_end = SYSTEM_SMEM + self.static_smem + launch.smem
        self.smem_bytes = -(-self.smem_end // 128) * 128

        names = SmemNames.of(program, SYSTEM_SMEM + self.static_smem, launch.smem)
        super().__init__(program, Grid(launch, residency.ctas), Findings(program, names))
        self.ticks = 0
        # how often each try_wait of the program returns false before it sleeps, as a time limit
        # of the hardware's may make it
        self.early_time_outs = 0
        self.carry = np.zeros((self.grid.num_warps, 32), bool)  # the carry of add.cc and the like
        self.smem = np.empty((residency.ctas, self.smem_bytes), np.uint8)
        self.smem_chunks = self.smem.view(np.complex128)  # the same by 16 bytes
        self.flight = Flight(self)
        self.mbarriers = MBarriers(self, self.flight)
        self.bulk_groups = BulkGroups(self, self.flight)
        self.async_copies = AsyncCopies(self, self.flight)
        self.warpgroups = WarpgroupMma(self)
        self.named = NamedBarriers(self)
        self.clusters = ClusterBarriers(self)
        self.tmem = TensorMemory(self, alone=residency.per_sm == 1)
        # functions that give those who observe the clusters that become resident
        self.watchers: list[Callable[[], Sequence[Observer]]] = []

    # -- residency ---------------------------------------------------------------------------------

    def load_clusters(self, clusters: Sequence[int]) -> None:
        """Make these clusters of the grid (numbered by x, then y, then z) resident, with fresh,
        poisoned state.
        """
        self.grid.place(clusters)
        num_ctas, num_warps = self.grid.num_ctas, self.grid.num_warps
        for bank, registers in self.registers.items():
            registers[lasting(self.program)[bank]] = _POISON[bank]
        self.smem.view(np.uint32)[...] = POISON32
        # per 16 bytes: 1 + swizzle of the TMA load that wrote them (0: written otherwise, -1: not
        # written), and its PTX line
        self.box_swizzle = np.full((num_ctas, self.smem_bytes // 16), -1, np.int8)
        self.box_line = np.zeros((num_ctas, self.smem_bytes // 16), np.int32)
        self.mbarriers.clear()
        self.flight.clear()
        self.bulk_groups.clear()
        self.async_copies.clear()
        self.warpgroups.clear()
        self.tmem.clear()
        self.local = np.full((num_warps, 32, self.local_bytes), 0x7F, np.uint8)
        self.local[..., ::2] = 0xFF
        self.local_written = np.zeros(self.local.shape, bool)
        self.start()
        self.named.clear()
        self.clusters.clear()
        # by warp and mbarrier: the try_wait that returned false, with no other there since
        self.failed_wait: dict[int, dict[tuple[int, int], Instruction]] = defaultdict(dict)
        self.last_wait: dict[int, dict[tuple[int, int], PassedWait]] = defaultdict(dict)
        self.register_pools: dict[int, RegisterPool] = {}  # by cta
        self.events.clusters_ended()
        self.observers = []
        self.observe(*(each for observers in self.watchers for each in observers()))

    def register(self, reg: Reg) -> np.ndarray:
        """The storage of a register, (warps, 32); see `homes`."""
        return self.registers[reg.bank][homes(self.program)[reg.bank][reg.index]]

    def release(self) -> None:
        """Release its memory at once, by breaking the reference cycles between it and its parts."""
        self.events.clusters_ended()
        self.__dict__.clear()

    def _place_variables(self) -> int:
        """Assign offsets to shared, local and module variables; return the bytes of static smem."""
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

    def clock(self) -> int:
        """The value of the clock registers: it grows with every read, and has no other meaning."""
        self.ticks += 256
        return self.ticks

    # -- shared memory -----------------------------------------------------------------------------

    def check_shared(
        self,
        warps: np.ndarray,
        lanes: np.ndarray,
        cta: np.ndarray,
        offset: np.ndarray,
        size: int,
        ins: Instruction,
    ) -> None:
        """Check bounds and alignment of ``size``-byte accesses; raises BadAddress for the first bad
        one.
        """
        first = self.grid.warp_cta[warps] - self.grid.cta_rank[self.grid.warp_cta[warps]]
        bad = (
            (cta < first)
            | (cta >= first + self.grid.cluster_size)
            | (offset < SYSTEM_SMEM)
            | (offset + size > self.smem_end)
        )
        bad |= (offset & (size - 1)) != 0
        if self.grid.cluster_size > 1 and is_own_shared(ins.op):
            self._check_own(warps, lanes, cta, ins)
        if bad.any():
            k = int(np.nonzero(bad)[0][0])
            why = "not aligned" if offset[k] & (size - 1) else "outside the CTA's shared memory"
            address, rank = int(offset[k]), int(cta[k] - first[k])
            if not 0 <= rank < self.grid.cluster_size:
                address, why = address | rank << 24, "in no CTA of its cluster, each of which has"
            raise BadAddress.at(
                ins,
                f"{self.grid.name_warp(int(warps[k]))} lane {lanes[k]} accesses {size} bytes at "
                f"shared 0x{address:x}, {why} (0x{SYSTEM_SMEM:x}..0x{self.smem_end:x})",
            )

    def _check_own(
        self, warps: np.ndarray, lanes: np.ndarray, cta: np.ndarray, ins: Instruction
    ) -> None:
        """Raise BadAddress for an address in another CTA's shared memory, by an instruction that
        takes those of its own only (PTX ISA 5.1.7).
        """
        other = cta != self.grid.warp_cta[warps]
        if other.any():
            k = int(other.argmax())
            raise BadAddress.at(
                ins,
                f"{self.grid.name_warp(int(warps[k]))} lane {lanes[k]} names shared memory of "
                f"{self.grid.name_cta(int(cta[k]))} by .shared, which is its own CTA's: that of "
                "others takes .shared::cluster",
            )

    def shared_at(
        self, warp: int, lane: int, address: int, size: int, ins: Instruction
    ) -> tuple[int, int]:
        """The (cta, byte offset) of ``size`` bytes at a shared address; raises as
        `check_shared`."""
        first = self.grid.first_cta[warp]
        cta, offset = first + (address >> 24), address & 0xFFFFFF
        if (
            cta >= first + self.grid.cluster_size
            or offset < SYSTEM_SMEM
            or offset + size > self.smem_end
            or offset & (size - 1)
            or (cta != self.grid.cta_of(warp) and is_own_shared(ins.op))
        ):
            at = np.array([cta]), np.array([offset])
            self.check_shared(np.array([warp]), np.array([lane]), *at, size, ins)
        return cta, offset

    def smem_words(self, size: int) -> np.ndarray:
        """All resident shared memory as (ctas * smem_bytes / size,) unsigned words."""
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
        return self.smem.reshape(-1).view(kind)
