"""Counters in global memory from which the CTAs of a persistent grid take their tiles.

One cluster is recorded where many would run, so it would get every tile. Each time that it
asks a counter again, all other clusters count as having asked once since.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from cutex.sim.machine.batch import Batch
from cutex.sim.machine.machine import Machine
from cutex.sim.ptx.decode import Decoder
from cutex.sim.ptx.parse import Instruction

WORDS = {"u32": ctypes.c_uint32, "s32": ctypes.c_int32, "u64": ctypes.c_uint64}


class SharedCounters:
    """The counters from which a recorded cluster takes tiles, advanced for ``others`` clusters
    beside it.

    A counter is a word to which one lane adds by the same ``atom`` more than once; the flags of
    tiles, to which a CTA adds once each, are none.
    """

    def __init__(self, machine: Machine, others: int) -> None:
        self.m, self.others = machine, others
        self.known: set[tuple[int, int]] = set()  # line of the PTX, address
        self.asked_again = False

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
                if counter in self.known:
                    self.asked_again = True
                    # NOTE: it has been asked before, so the address is known to be good
                    value = word.from_address(counter[1])
                    value.value += self.others * int(amounts[row, lane])
                self.known.add(counter)

        return ask
