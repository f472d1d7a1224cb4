"""The events of a simulated launch: what the machine and its instructions tell whoever watches.

An instruction computes, and says what it has done; checks and clocks subscribe by deriving from
`Observer` and defining the events that they want. Nothing here knows them. An event that nobody
watches costs one call of a function that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cutex.sim.machine.operation import Kind, Operation, Rectangle
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch, Lanes
    from cutex.sim.machine.memory import Part, Region
    from cutex.sim.machine.phase import MBarrier
    from cutex.sim.machine.registers import Registers


class SharedBytes(NamedTuple):
    """Bytes of shared memory, ``width`` for each lane of an access: flat arrays of warp, lane, CTA
    and offset.
    """

    warps: np.ndarray
    lanes: np.ndarray
    cta: np.ndarray
    offset: np.ndarray
    width: int


class Storing(NamedTuple):
    """A bulk store: the warp that issued it, and its number among the operations."""

    warp: int
    number: int


class RegisterUse(NamedTuple):
    """The registers of a wgmma: the accumulator, A if it is there, and all of them; and for each
    warp, the number of its open group, which the wgmma joins.
    """

    results: Registers
    sources: Registers | None
    all: np.ndarray
    groups: list[int]


@dataclass(eq=False)
class LateArrival:
    """An arrival on mbarriers that comes when operations issued before it are complete: those of a
    warp of one kind, up to ``number`` (0: none).
    """

    warp: int
    kind: Kind
    number: int
    instruction: Instruction


class Observer:
    """The events, each a method that does nothing. Each comes before the state changes, unless it
    says otherwise; arrays are flat, (n,).
    """

    # -- instructions ------------------------------------------------------------------------------

    def executing(self, batch: Batch, pc: int) -> None:
        """Warps are about to execute the instruction at ``pc``."""

    def executed(self, batch: Batch, pc: int, verdict: np.ndarray | None) -> None:
        """They have; ``verdict``: GO, RETRY or ARRIVED for each, None if all go on."""

    def using_registers(self, batch: Batch, pc: int) -> None:
        """As `executing`, with the guard's lanes only, of an instruction in `watched_places`."""

    def guarding(self, batch: Batch, pc: int) -> None:
        """Before `using_registers`, of all lanes that come to a guarded instruction, but a branch,
        in `watched_places`."""

    def watched_places(self) -> set[int]:
        """The places of the program of which it wants `using_registers` and `guarding`."""
        return set()

    def warps_left(self, warps: np.ndarray) -> None:
        """Warps have returned."""

    def clusters_ended(self) -> None:
        """The resident clusters have ended: no event follows."""

    # -- shared memory -----------------------------------------------------------------------------

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        """Lanes load or store; ``ordinary``: not as an atomic, volatile or the like."""

    def shared_stores(
        self, where: Lanes, places: np.ndarray, values: np.ndarray, ins: Instruction
    ) -> None:
        """Lanes store ``values``, (n, width) bytes, as `shared` has reported them; ``places``
        (n,): the number of the first byte among those of all CTAs.
        """

    def local_unwritten(self, where: Lanes, offset: np.ndarray, ins: Instruction) -> None:
        """Lanes load local memory at these offsets, (n,), that nothing has written."""

    def local_accessed(self, where: Lanes, at: np.ndarray, write: bool, ins: Instruction) -> None:
        """Lanes load or store their bytes ``at`` of local memory, (n, width)."""

    def copying(self, at: SharedBytes, op: Operation, ins: Instruction) -> None:
        """Lanes of one warp issue a non-bulk cp.async that writes there, as a part of ``op``."""

    # -- asynchronous operations -------------------------------------------------------------------

    def issued(self, ops: Sequence[Operation]) -> None:
        """An operation is in flight; several are of one instruction, in different clusters, with
        the same places in all.
        """

    def completing(self, op: Operation) -> None:
        """It takes effect now."""

    def waited(self, warps: Sequence[int], kind: Kind, numbers: Sequence[int]) -> None:
        """Warps have waited for their operations of this kind, each up to a number; groups, of
        wgmma.
        """

    def lanes_waited(self, warp: int, lanes: np.ndarray, ins: Instruction) -> None:
        """These lanes of a warp (their numbers) have waited for bulk stores, as was reported."""

    def copies_waited(
        self,
        warp: int,
        lanes: np.ndarray,
        limit: np.ndarray,
        ops: Sequence[tuple[Operation, np.ndarray]],
    ) -> None:
        """The ``lanes`` (32,) of a warp have waited for their groups of cp.async below ``limit``
        (32,); ``ops``: what the warp knows of now, with each lane's group, -1 for none.
        """

    def waited_writes(self, warp: int, number: int) -> None:
        """It has, and for what these bulk stores write."""

    def wgmma_executes(self, warps: np.ndarray, use: RegisterUse, ins: Instruction) -> None:
        """Warps execute a wgmma, which their warpgroups issue when all four have."""

    def wgmma_fenced(self, warps: np.ndarray) -> None:
        """wgmma.fence."""

    # -- mbarriers ---------------------------------------------------------------------------------

    def mbarrier_made(self, barrier: MBarrier, warp: int, lane: int, again: bool) -> None:
        """Initialised; ``again``: where one was before."""

    def mbarrier_init_fenced(self, warp: int, lanes: np.ndarray) -> None:
        """fence.mbarrier_init of some of a warp's lanes, (32,) bool."""

    def mbarrier_used(self, barrier: MBarrier, warp: int, ins: Instruction) -> None:
        """A warp's instruction names it."""

    def mbarrier_reached(self, barrier: MBarrier, warp: int, what: str, ins: Instruction) -> None:
        """A thread of another CTA is about to arrive, or to change the tx-count."""

    def arriving(self, warps: np.ndarray, whole: np.ndarray) -> None:
        """Warps, each with all of its lanes or not, are about to arrive on mbarriers."""

    def mbarrier_arrives(
        self, barrier: MBarrier, warp: int, to_cluster: bool, ins: Instruction
    ) -> None:
        """One lane of them arrives; ``to_cluster``: with a scope wider than the CTA."""

    def arrives_late(self, arrival: LateArrival) -> None:
        """An arrival is bound to the end of operations."""

    def mbarrier_arrives_late(self, barrier: MBarrier, arrival: LateArrival) -> None:
        """It comes, perhaps on one of several barriers."""

    def mbarrier_completed(self, barrier: MBarrier) -> None:
        """A phase has."""

    def mbarrier_passed(
        self, barrier: MBarrier, warp: int, lanes: np.ndarray, ins: Instruction
    ) -> None:
        """The wait of these lanes of a warp (their numbers) for a phase that is complete has
        passed.
        """

    # -- other barriers and fences -----------------------------------------------------------------

    def named_arrives(self, key: tuple[int, int], warp: int, whole: bool, ins: Instruction) -> None:
        """A warp, or some of its lanes, arrives at a named barrier, by CTA and number."""

    def named_completed(self, key: tuple[int, int]) -> None:
        """All have arrived."""

    def named_passed(self, key: tuple[int, int], warp: int) -> None:
        """A warp that waited goes on."""

    def cluster_arrives(self, which: int, warp: int, relaxed: bool, ins: Instruction) -> None:
        """A warp arrives at the barrier of a cluster."""

    def cluster_completed(self, which: int) -> None:
        """All have arrived."""

    def cluster_passed(self, which: int, warp: int) -> None:
        """A warp that waited goes on."""

    def lanes_met(self, warps: np.ndarray) -> None:
        """bar.warp.sync of all of their lanes."""

    def some_lanes_met(self, warp: int, lanes: int) -> None:
        """A bar.warp.sync of these lanes of a warp (bits), which are not all."""

    def fenced(self, warps: np.ndarray, lanes: np.ndarray, releases: bool, scope: str) -> None:
        """A fence by these lanes, (warps, 32), with the scope of a "cta", a "cluster" or the "gpu"
        (or the system).
        """

    def proxy_fenced(self, warps: np.ndarray) -> None:
        """fence.proxy.async, of all memory or of shared memory."""

    def global_proxy_fenced(self, warps: np.ndarray) -> None:
        """fence.proxy.async, of all memory or of global memory."""

    def grids_waited(self, warps: np.ndarray, lanes: np.ndarray) -> None:
        """griddepcontrol.wait, by these lanes of each, (n, 32) bool."""

    def dependents_let_start(self, warps: np.ndarray) -> None:
        """griddepcontrol.launch_dependents."""

    def registers_set(self, warp: int, registers: int, ins: Instruction) -> None:
        """setmaxnreg of a warp, which has them now."""

    def launch_requested(self, warp: int, ins: Instruction) -> None:
        """clusterlaunchcontrol.try_cancel."""

    def reply_read(self, warps: np.ndarray, coordinates: bool, ins: Instruction) -> None:
        """clusterlaunchcontrol.query_cancel of a reply that refuses; ``coordinates``: not only
        whether it does.
        """

    # -- tensor memory -----------------------------------------------------------------------------

    def tmem_accessed(self, warp: int, place: Rectangle, write: bool, ins: Instruction) -> None:
        """tcgen05.ld or st."""

    def tmem_unwritten(self, warps: np.ndarray, tells: list[str], ins: Instruction) -> None:
        """tcgen05.ld has loaded columns that nothing has written; ``tells``: what of each warp."""

    def tmem_waited(self, kind: Kind, warps: np.ndarray) -> None:
        """tcgen05.wait."""

    def tmem_fenced(self, before: bool, warps: np.ndarray) -> None:
        """tcgen05.fence::before_thread_sync, or ::after_thread_sync."""

    def tmem_allocated(self, warp: int, cta: int, pair: bool, ins: Instruction) -> None:
        """tcgen05.alloc has."""

    def tmem_freeing(self, warp: int, place: Rectangle, own: bool, ins: Instruction) -> None:
        """tcgen05.dealloc of a warp; ``own``: of its CTA's columns, not the peer's."""

    def tmem_freed(self, place: Rectangle) -> None:
        """Both CTAs of a pair have come to it."""

    # -- global memory -----------------------------------------------------------------------------

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        """Lanes have loaded ``size`` bytes each."""

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        """Lanes store ``values``, (n, size) bytes, in the regions of ``parts``."""

    def bulk_issued(
        self, warp: int, address: int, size: int, write: bool, ins: Instruction
    ) -> None:
        """A bulk copy of contiguous bytes from or to global memory."""

    def box_issued(
        self, warp: int, tmap: Any, at: tuple[int, ...], write: bool, ins: Instruction
    ) -> None:
        """A TMA copy of a box of a tensor."""

    def bulk_writes(
        self,
        region: Region,
        offsets: np.ndarray,
        values: np.ndarray,
        by: Storing,
        ins: Instruction,
    ) -> None:
        """A bulk store writes ``values``, (n, size) bytes, at these offsets."""

    def bulk_reduced(
        self, region: Region, offsets: np.ndarray, size: int, by: Storing, ins: Instruction
    ) -> None:
        """A bulk reduction has changed ``size`` bytes at each offset."""

    def maps_released(self, warps: np.ndarray, scope: str) -> None:
        """fence.proxy.tensormap, release, with the scope of a "cta", a "cluster" or the "gpu" (or
        the system); or a cp_fenceproxy, behind its stores."""

    def map_fenced(self, warp: int, address: int, scope: str) -> None:
        """fence.proxy.tensormap, acquire."""

    def map_used(self, warp: int, address: int, ins: Instruction) -> None:
        """An operation takes a tensor map from global memory."""


EVENTS = tuple({name for name in vars(Observer) if name[0] != "_"} - {"watched_places"})


class Events(Observer):
    """Tells each event to the observers that define it, in their order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        handlers: dict[str, list[Callable[..., None]]] = {name: [] for name in EVENTS}
        for observer in observers:
            for name in _defined_by(type(observer)):
                handlers[name].append(getattr(observer, name))
        for name, to in handlers.items():
            setattr(self, name, _to_all(to))
        # the places of the program of which somebody wants `using_registers`
        self.places = set[int]().union(*(o.watched_places() for o in observers))
        self.step = bool(handlers["executing"] or handlers["executed"])


_DEFINED: dict[type, tuple[str, ...]] = {}


def _defined_by(kind: type[Observer]) -> tuple[str, ...]:
    """The events that a class of observers defines."""
    if kind not in _DEFINED:
        own = (name for name in EVENTS if getattr(kind, name) is not getattr(Observer, name))
        _DEFINED[kind] = tuple(own)
    return _DEFINED[kind]


def _to_all(handlers: list[Callable[..., None]]) -> Callable[..., None]:
    if not handlers:
        return _to_nobody
    if len(handlers) == 1:
        return handlers[0]
    if len(handlers) == 2:  # NOTE: as most events; a loop takes twice as long
        one, two = handlers

        def tell_both(*what: Any) -> None:
            one(*what)
            two(*what)

        return tell_both

    def tell(*what: Any) -> None:
        for each in handlers:
            each(*what)

    return tell


def _to_nobody(*_: Any) -> None:
    return None
