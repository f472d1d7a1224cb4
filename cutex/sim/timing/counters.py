"""Counters in global memory from which the CTAs of a persistent grid take their tiles.

One cluster is recorded where many would run, so it would get every tile. Clusters count as
asking in turn: those before it ask first, and all others between one time that it asks and the
next.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import numpy as np

from cutex.sim.machine.batch import Batch
from cutex.sim.machine.machine import Machine
from cutex.sim.ptx.decode import Decoder
from cutex.sim.ptx.program import Instruction

WORDS = {"u32": ctypes.c_uint32, "s32": ctypes.c_int32, "u64": ctypes.c_uint64}
Counter = tuple[int, int]  # the line of the PTX that adds to it, and its address


class SharedCounters:
    """The counters from which a recorded cluster takes tiles, advanced for ``others`` clusters
    beside it.

    A counter is a word to which one lane adds by the same ``atom`` more than once; the flags of
    tiles, to which a CTA adds once each, are none.
    """

    def __init__(
        self, machine: Machine, others: int, number: int = 0, known: Iterable[Counter] = ()
    ) -> None:
        """``number``: of the recorded cluster, so many of which asked the ``known`` counters before
        it."""
        self.m, self.others, self.number, self.known = machine, others, number, set(known)
        self.asked: set[Counter] = set()
        self.asked_again: set[Counter] = set()

    def before(self, ins: Instruction) -> Callable[[Batch], None] | None:
        """The function to call before the instruction; None for any but an atomic integer
        addition."""
        word = WORDS.get(ins.parts[-1])
        if ins.name != "atom" or not {"global", "add"} <= set(ins.parts) or word is None:
            return None
        d = Decoder(ins, self.m)
        address, amount = d.address(1), d.src(2, ins.parts[-1])

        def ask(b: Batch) -> None:
            places = b.lanes(address(b)).astype(np.int64)
            amounts = b.lanes(amount(b))
            for row, lanes in enumerate(b.active()):
                if lanes.sum() != 1:
                    continue
                lane = int(np.argmax(lanes))
                counter = ins.line, int(places[row, lane])
                before = 0
                if counter in self.asked:
                    self.asked_again.add(counter)
                    before = self.others
                elif counter in self.known:
                    before = self.number
                if before:  # NOTE: it has been asked before, so the address is known to be good
                    word.from_address(counter[1]).value += before * int(amounts[row, lane])
                self.asked.add(counter)

        return ask
