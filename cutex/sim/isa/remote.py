"""Stores and reductions to shared memory of the cluster that complete on an mbarrier there (PTX ISA
9.7.9.12, 9.7.13.7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa.atomics import combine
from cutex.sim.isa.bulk_operands import check_reduced
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.memory import shared_addresses
from cutex.sim.machine.operation import Engine, Operation, Span
from cutex.sim.ptx.declarations import WIDTH
from cutex.sim.ptx.decode import TYPES, Decoder, Execute, Read, instruction
from cutex.sim.ptx.operands import Vector

_REDUCTIONS = ("add", "min", "max", "and", "or", "xor", "inc", "dec")
_MODS = ("async", "weak", "relaxed", "shared", "cluster", "mbarrier", "complete_tx", "bytes")


@instruction("st.async")
def store_async(d: Decoder) -> Execute:
    """st.async (9.7.9.12): 1, 2 or 4 values per thread; their bytes count on the mbarrier when they
    arrive.
    """
    d.only(*_MODS, "v2", "v4")
    return _remote(d, None)


@instruction("red.async")
def reduce_async(d: Decoder) -> Execute:
    """red.async (9.7.13.7): each thread's value is combined atomically with the value in memory."""
    d.only(*_MODS, *_REDUCTIONS)
    name = next((p for p in d.parts if p in _REDUCTIONS), None)
    if name is None or WIDTH[d.type] not in (32, 64):
        raise d.unknown()
    return _remote(d, name)


def _remote(d: Decoder, reduction: str | None) -> Execute:
    m, ins, word = d.m, d.ins, TYPES[f"b{WIDTH[d.type]}"]
    to, barrier, operand = d.address(0), d.address(2), ins.operands[1]
    items = operand.items if isinstance(operand, Vector) else (operand,)
    reads = [d.read(o, f"b{WIDTH[d.type]}") for o in items]
    size = len(items) * WIDTH[d.type] // 8

    def completer(
        target: int, offset: int, bar: tuple[int, int], new: np.ndarray
    ) -> Callable[[], None]:
        end = offset + new.nbytes

        def complete() -> None:
            if reduction:
                check_reduced(m, f"the {ins.name}.async", target, offset, end, ins)
            place = m.smem[target, offset:end].view(word)
            place[:] = new if reduction is None else combine(reduction, d.type, place, new)
            m.box_swizzle[target, offset >> 4 : (end + 15) >> 4] = 0
            m.mbarriers.complete_tx(bar[0], bar[1], new.nbytes, f"a {ins.name}.async", ins)

        return complete

    def execute(b: Batch) -> None:
        values = np.stack([b.lanes(r(b)) for r in reads], 2)
        rows, lanes = np.nonzero(b.active())
        warps = b.idx[rows]

        def located(address: Read, width: int) -> list[tuple[int, int]]:
            at = shared_addresses(b.lanes(address(b))[rows, lanes])
            cta, offset = m.grid.shared_location(warps, at)
            m.check_shared(warps, lanes, cta, offset, width, ins)
            return list(zip(cta.tolist(), offset.tolist(), strict=True))

        places = list(zip(located(to, size), located(barrier, 8), strict=True))
        for k, ((target, _), bar) in enumerate(places):
            if bar[0] != target:
                raise BadOperand.at(
                    ins,
                    f"{m.grid.name_warp(int(warps[k]))} stores to {m.grid.name_cta(target)} and "
                    f"completes on an mbarrier of {m.grid.name_cta(bar[0])}: they must lie in the "
                    f"same CTA",
                )
        for first, end in _runs(warps, places, size if reduction is None else 0):
            warp, ((target, offset), bar) = int(warps[first]), places[first]
            m.mbarriers.use(*bar, warp, ins)
            new = np.ascontiguousarray(values[rows[first:end], lanes[first:end]]).reshape(-1)
            op = Operation(
                f"the {ins.name}.async", warp, ins,
                # NOTE: reductions of one place are atomic, so they do not race with each other
                ("remote", target if reduction else m.flight.issued, reduction),
                completer(target, offset, bar, new), Engine.DSMEM, new.nbytes,
                writes=[Span(target, offset, offset + new.nbytes)], signals=[bar],
            )  # fmt: skip
            m.flight.issue(op)

    return execute


def _runs(
    warps: np.ndarray, places: list[tuple[tuple[int, int], tuple[int, int]]], size: int
) -> Iterator[tuple[int, int]]:
    """The runs of a warp's lanes, as first and end, whose places are adjacent and `size` bytes each
    and which complete on one mbarrier: they are one operation, as the hardware sends them. Lanes of
    size 0 are alone."""
    first = 0
    for k in range(1, len(places) + 1):
        if k < len(places) and size and warps[k] == warps[k - 1]:
            (target, offset), bar = places[k - 1]
            if places[k] == ((target, offset + size), bar):
                continue
        yield first, k
        first = k
