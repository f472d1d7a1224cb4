"""Registers that share storage: never two whose values are needed at the same time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from ptx_kernel import simulate_ptx

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.sim import Hazards
from cutex.sim.machine.memory import POISON32
from cutex.sim.ptx.operands import Reg
from cutex.sim.ptx.parse import parse
from cutex.sim.ptx.temporaries import homes, lasting, used

_TEXT = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k() {{
  .reg .pred %p<4>;
  .reg .b32 %r<20>;
{body}
  ret;
}}
"""


def program(body: str):
    return parse(_TEXT.format(body=body))["k"]


def places(body: str) -> dict[str, int]:
    """The storage of each register of ``body``."""
    found = program(body)
    registers = {
        o for ins in found.code for o in ins.operands if isinstance(o, Reg) and o.bank == 32
    }
    return {r.name.strip("%"): homes(found)[32][r.index] for r in registers}


def test_values_that_are_dead_give_their_place_on() -> None:
    at = places("mov.u32 %r1, 1;\nadd.u32 %r2, %r1, 1;\nadd.u32 %r3, %r2, 1;\nadd.u32 %r4, %r3, 1;")
    assert at["r3"] == at["r1"] and at["r4"] == at["r2"]
    assert at["r1"] != at["r2"]  # not within one instruction


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("add.u32 %r2, %r1, 1;\nmov.u32 %r1, 3;\nmov.u32 %r3, %r1;", "read before it is written"),
        ("@%p1 mov.u32 %r1, 1;\nmov.u32 %r3, %r1;", "written by some lanes"),
        ("mov.u32 %r1, 1;\n@%p1 bra $L;\nmov.u32 %r3, 2;\n$L:\nmov.u32 %r4, %r1;", "across blocks"),
        ("$L:\nadd.u32 %r1, %r1, 1;\n@%p1 bra $L;\nmov.u32 %r4, %r3;", "carried by a loop"),
        ("mov.u32 %r1, 1;\nshfl.sync.idx.b32 %r2, %r1, 0, 31, -1;", "read by other lanes"),
    ],
    ids=lambda value: value if " " in value and ";" not in value else "",
)
def test_what_outlives_its_block_or_its_lane_keeps_its_own_place(body: str, why: str) -> None:
    found = program(body)
    (register,) = {
        o for ins in found.code for o in ins.operands if isinstance(o, Reg) and o.name == "%r1"
    }
    assert register.index in lasting(found)[32], why
    assert homes(found)[32].count(register.index) == 1


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_no_two_live_values_of_a_kernel_share_a_place(arch: str) -> None:
    kernel = compile(stage(arch, 6).kernel(), "bf16", arch)
    (found,) = parse(kernel.ptx).values()
    own = lasting(found)
    touched: dict[tuple[int, int], list[int]] = {}
    for pc, ins in enumerate(found.code):
        for r in registers_of(ins):
            touched.setdefault(r, []).append(pc)
    by_place: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (bank, index), pcs in touched.items():
        home = homes(found)[bank][index]
        if index in own[bank]:
            assert home == index and homes(found)[bank].count(index) == 1
        else:
            by_place.setdefault((bank, home), []).append((pcs[0], pcs[-1]))
    for spans in by_place.values():
        spans.sort()
        assert all(end < start for (_, end), (start, _) in pairwise(spans))
    assert len(used(found)[32]) < found.registers[32] * 0.8


def registers_of(ins) -> set[tuple[int, int]]:
    """All registers that the text of an instruction names, found independently of the simulator."""
    found, left = set(), [*ins.operands, ins.guard]
    while left:
        item = left.pop()
        if isinstance(item, Reg):
            found.add((item.bank, item.index))
        elif item is not None:
            left += [v for v in vars(item).values() if not isinstance(v, str | int | float | tuple)]
            left += [x for v in vars(item).values() if isinstance(v, tuple) for x in v]
    return found


def test_a_register_that_nothing_wrote_is_poisoned_though_temporaries_come_before_it() -> None:
    out = np.zeros(32, np.uint32)
    text = "mov.u32 %r0, 5;\nadd.u32 %r1, %r0, 1;\nst.global.u32 [%out_i], %r2;"
    with pytest.raises(Hazards, match="register %r2, which nothing has written"):
        simulate_ptx(text, {"out": out})
    assert (out == POISON32).all()
