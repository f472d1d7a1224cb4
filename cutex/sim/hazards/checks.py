"""All checks of a launch: the observers that look for hazards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.sim.hazards import cta_groups, unwritten_values
from cutex.sim.hazards.async_accesses import AsyncAccesses
from cutex.sim.hazards.barrier_order import BarrierOrder
from cutex.sim.hazards.byte_counts import ByteCounts
from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.copy_sources import CopySources
from cutex.sim.hazards.flag_order import FlagOrder, has_flags
from cutex.sim.hazards.global_races import GlobalRaces
from cutex.sim.hazards.grid_order import GridOrder, Stream
from cutex.sim.hazards.lane_acquires import LaneAcquires, acquires
from cutex.sim.hazards.lane_copies import LaneCopies
from cutex.sim.hazards.lane_releases import LaneReleases, releases
from cutex.sim.hazards.lane_waits import LaneWaits
from cutex.sim.hazards.launch_requests import LaunchRequests
from cutex.sim.hazards.leaders import Leaders, places_of_groups
from cutex.sim.hazards.lifetimes import Lifetimes
from cutex.sim.hazards.map_changes import TensorMapChanges
from cutex.sim.hazards.map_strides import MapStrides
from cutex.sim.hazards.mbarrier_memory import MBarrierMemory
from cutex.sim.hazards.mbarrier_order import MBarrierOrder
from cutex.sim.hazards.mbarrier_phases import MBarrierPhases
from cutex.sim.hazards.one_store import OneStore
from cutex.sim.hazards.rechecks import Rechecks
from cutex.sim.hazards.register_moves import RegisterMoves
from cutex.sim.hazards.smem_shadow import SmemShadow
from cutex.sim.hazards.strong_sizes import SharedSizes, StrongSizes
from cutex.sim.hazards.tmem_accesses import TmemAccesses
from cutex.sim.hazards.tmem_shadow import TmemShadow
from cutex.sim.hazards.unwritten_values import UnwrittenValues
from cutex.sim.hazards.wgmma_registers import WgmmaRegisters
from cutex.sim.machine.events import Observer

if TYPE_CHECKING:
    from cutex.sim.host.capture import Launch
    from cutex.sim.machine.machine import Machine


class Checks:
    """The checks of one launch, on one machine."""

    def __init__(self, machine: Machine, launch: Launch, stream: Stream) -> None:
        self.m = machine
        self.rechecks = Rechecks(machine)
        self.global_races = GlobalRaces(machine, self.rechecks)
        self.grid_order = GridOrder(machine, launch.programmatic, stream)
        self.unwritten: unwritten_values.Kept = {}
        cta_groups.tell(machine)
        self.map_changes = TensorMapChanges(machine, self.global_races)
        self.of_launch = [self.map_changes, MapStrides(machine)]

    def observers(self) -> list[Observer]:
        """The observers of the clusters that become resident now."""
        m, clocks = self.m, Clocks(self.m)
        mbarriers = MBarrierOrder(m, clocks)
        tmem: list[Observer] = []
        tmem_shadow = None
        if any(ins.name == "tcgen05" for ins in m.program.code):
            accesses = TmemAccesses(m, clocks)
            tmem_shadow = TmemShadow(m, clocks, accesses)
            tmem = [tmem_shadow, accesses]
        smem_shadow = SmemShadow(m, clocks, self.rechecks)
        asynchronous = AsyncAccesses(m, clocks, mbarriers, smem_shadow, tmem_shadow)
        lifetimes = Lifetimes(m, clocks, mbarriers, asynchronous)
        self.global_races.start(clocks)
        self.map_changes.start(clocks)
        orders = [self.global_races.lenient, self.global_races.order]
        for order in orders:
            order.start(clocks)
        self.grid_order.start(clocks)
        wgmma = [WgmmaRegisters(m)] if any(i.name == "wgmma" for i in m.program.code) else []
        flags: list[Observer] = [FlagOrder(m, clocks, orders)] if has_flags(m.program) else []
        flags += [LaneReleases(m, clocks)] if releases(m.program) else []
        one_lane: list[Observer] = [LaneWaits(m, clocks, asynchronous)]
        if acquires(m.program):
            one_lane.append(LaneAcquires(m, clocks, self.global_races))
        in_global, in_shared = StrongSizes(m, self.global_races), SharedSizes(m, clocks)
        if any(i.op.startswith("cp.async.wait") for i in m.program.code):
            one_lane.append(LaneCopies(m))
        flags += [Leaders(m)] if places_of_groups(m.program) else []
        grids = [self.grid_order] if self.grid_order.active else []
        rechecks = [self.rechecks] if self.rechecks.active else []
        return [
            smem_shadow, *tmem, asynchronous, lifetimes, mbarriers,
            ByteCounts(m, m.mbarriers), MBarrierMemory(m, clocks),
            MBarrierPhases(m, clocks, mbarriers), BarrierOrder(m, clocks),
            OneStore(m), *wgmma, RegisterMoves(m, clocks), LaunchRequests(m, clocks),
            UnwrittenValues(m, self.unwritten), CopySources(m, clocks, asynchronous, orders),
            *one_lane,  # NOTE: before the acquires that they watch count
            *([in_global] if in_global.active else []), *([in_shared] if in_shared.active else []),
            self.global_races, *flags, *orders, *grids, *rechecks, *self.of_launch,
            clocks,  # NOTE: after the order of clusters, which a fence releases before it counts
        ]  # fmt: skip

    def finish(self) -> None:
        """The grid has ended."""
        self.grid_order.finish()
        self.global_races.finish()
        self.stop()

    def stop(self) -> None:
        """Report what was kept, also of a grid that an error has ended."""
        self.rechecks.finish()
        unwritten_values.tell(self.m.findings, self.unwritten)
