"""Cluster launch control of sm_100a (PTX ISA 9.7.13.16): a running cluster takes over one that has
not started.

The reply is opaque; here its four words are 1 (a cluster was taken) or 0, and the first CTA's x, y
and z. A request may be refused although clusters are left: hardware does so under contention, and
so does the random order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.machine.memory import POISON32, shared_addresses
from cutex.sim.machine.operation import Engine, Operation, Span
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Reg
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch
    from cutex.sim.machine.machine import Machine

REPLY_BYTES = 16


@instruction("clusterlaunchcontrol")
def clusterlaunchcontrol(d: Decoder) -> Execute:
    """clusterlaunchcontrol (9.7.13.16): dispatches to try_cancel and query_cancel."""
    return _try_cancel(d) if "try_cancel" in d.mods else _query(d)


def _try_cancel(d: Decoder) -> Execute:
    """try_cancel: writes the reply to shared memory and completes 16 bytes on the mbarrier; with
    .multicast, in every CTA of the cluster.
    """
    d.only(
        "try_cancel", "async", "shared", "cta", "mbarrier", "complete_tx", "bytes", "multicast",
        "cluster", "all",
    )  # fmt: skip
    to, barrier, m, ins = d.address(0), d.address(1), d.m, d.ins
    everywhere = "multicast" in d.mods

    def execute(b: Batch) -> None:
        targets = shared_addresses(to(b))
        bars = shared_addresses(barrier(b))
        rows, lanes = np.nonzero(b.active())
        for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
            warp = int(b.idx[row])
            own = int(m.grid.warp_cta[warp])
            first = own - int(m.grid.cta_rank[own])
            ctas = [first + r for r in range(m.grid.cluster_size)] if everywhere else [own]
            offset, bar = (int(x[row, lane]) & 0xFFFFFF for x in (targets, bars))
            here = np.array([own])
            m.check_shared(
                b.idx[row : row + 1], np.array([lane]), here, np.array([offset]), 16, ins
            )
            m.events.launch_requested(warp, ins)
            for cta in ctas:
                m.mbarriers.use(cta, bar, warp, ins)
            op = Operation(
                "the cluster launch request", warp, ins, ("clc", m.flight.issued),
                _reply(m, ctas, offset, bar, ins), Engine.LAUNCH_CONTROL, REPLY_BYTES * len(ctas),
                writes=[Span(c, offset, offset + REPLY_BYTES) for c in ctas],
                signals=[(c, bar) for c in ctas],
            )  # fmt: skip
            m.flight.issue(op)

    return execute


def _reply(
    m: Machine, ctas: list[int], offset: int, bar: int, ins: Instruction
) -> Callable[[], None]:
    def complete() -> None:
        refused = m.policy.refuses_launch()
        words = np.full(4, POISON32, np.uint32)
        words[0] = 0
        if len(m.pending_clusters) and not refused:
            (cluster,) = m.pending_clusters.start(1)
            words[0] = 1
            words[1:] = m.grid.coordinates(cluster * m.grid.cluster_size)
        for cta in ctas:
            m.smem[cta, offset : offset + REPLY_BYTES] = words.view(np.uint8)
            m.box_swizzle[cta, offset >> 4] = 0
            m.mbarriers.complete_tx(cta, bar, REPLY_BYTES, "a cluster launch reply", ins)

    return complete


def _query(d: Decoder) -> Execute:
    """query_cancel: is_canceled, or get_first_ctaid (vector, or ::x, ::y, ::z). A refused reply has
    poison in place of coordinates.
    """
    operand = d.ins.operands[1]
    if not isinstance(operand, Reg) or operand.bank != 128:
        raise d.unknown("reply operand")
    reply = d.m.register(operand)  # (warps, 32, 2)

    asks = "is_canceled" in d.mods

    def words(b: Batch) -> Any:
        found = np.ascontiguousarray(reply[b.sel]).view(np.uint32).reshape(b.n, 32, 4)
        refused = (found[:, :, 0] != 1) & b.active()
        if refused.any():
            d.m.events.reply_read(b.idx[refused.any(1)], not asks, d.ins)
        return found

    if asks:
        write = d.dst(0, "pred")
        return lambda b: write(b, words(b)[:, :, 0] == 1)
    axis = next((a for a in "xyz" if a in d.mods), None)
    if axis is not None:
        put = d.dst(0, "b32")
        return lambda b: put(b, words(b)[:, :, 1 + "xyz".index(axis)])
    writes = [d.write(o, "b32") for o in d.ins.operands[0].items[:3]]  # type: ignore[union-attr]

    def execute(b: Batch) -> None:
        got = words(b)
        for i, write in enumerate(writes):
            write(b, got[:, :, 1 + i])

    return execute
