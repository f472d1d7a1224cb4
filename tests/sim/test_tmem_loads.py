"""tcgen05.ld is asynchronous: instructions that hold its registers, that use them, and that follow
it.

Warp 0 loads a column of tensor memory; a barrier; then warp 1 frees the columns.
"""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import Hazards
from cutex.sim.simulation import SimReport

each_order = pytest.mark.parametrize("order", ["fifo", "starved", "random"])
WAIT = "tcgen05.wait::ld.sync.aligned;"
USE = "st.global.b32 [%out_i], mine;"
RELEASE = "tcgen05.fence::before_thread_sync;"
BODY = f"""
    .reg .b32 at, t, mine, other; .reg .b64 both; mov.u32 at, smem;
    setp.lt.u32 %p1, %i, 32; @!%p1 bra LAST;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [at], 32; ld.shared.b32 t, [at];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [t], {{%lane}}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{mine}}, [t]; HELD
    {RELEASE} bar.sync 0; LATER bra END;
    LAST: bar.sync 0; ld.shared.b32 t, [at];
    tcgen05.fence::after_thread_sync; tcgen05.dealloc.cta_group::1.sync.aligned.b32 t, 32;
    END:
"""
COPIES = "mov.b64 both, {mine, mine}; mov.b64 {other, mine}, both;"  # as LLVM packs two words


def run(held: str, order: str, later: str = "") -> SimReport:
    out = np.zeros(64, np.uint32)
    body = BODY.replace("HELD", held).replace("LATER", later)
    shape = Shape(block=64, smem=64)
    report = simulate_ptx(body, {"out": out}, shape, arch="sm_100a", order=order)
    assert (out[:32] == np.arange(32)).all()
    return report


def rules(report: SimReport) -> list[str]:
    return [a.rule for a in report.advisories]


@pytest.mark.sweep(2)
@each_order
@pytest.mark.parametrize("held", [f"{WAIT} {USE}", f"{COPIES} {WAIT} {USE}"])
def test_copies_before_the_wait_are_no_uses(held, order):
    assert rules(run(held, order)) == []


@pytest.mark.sweep(2)
@each_order
@pytest.mark.parametrize("copies", ["", COPIES, f"bra ON; ON: {COPIES}"])
def test_a_use_before_the_wait_is_told(copies, order):
    """PTX ISA 9.7.16.6.4.5: the value is right, but the use orders nothing for other threads."""
    report = run(f"{copies} {USE} {WAIT}", order)
    assert rules(report) == ["register"]
    assert "tcgen05.ld at PTX line" in report.advisories[0].message


@each_order
def test_a_use_without_a_wait_orders_others_by_the_letter_only(order):
    """9.7.16.6.4.4: the load is complete, but no wait makes that known to others."""
    report = run(USE, order)
    assert sorted(rules(report)) == ["race", "register"]
    assert any("a wait or a tcgen05.fence is missing" in a.message for a in report.advisories)


@pytest.mark.sweep(2)
@each_order
@pytest.mark.parametrize("held", ["", COPIES])
def test_a_load_is_in_flight_until_more_than_a_copy_uses_it(held, order):
    """The columns are freed while it may still read them."""
    race = r"tcgen05\.dealloc of .* loaded at PTX line \d+: no barrier orders the two"
    with pytest.raises(Hazards, match=race):
        run(held, order, USE)


@each_order
def test_a_copy_that_is_overwritten_is_in_flight_no_longer(order):
    """``other`` held the loaded value, and is used when it holds another one."""
    held = f"{COPIES} mov.u32 other, 5; add.u32 other, other, 1; {WAIT} {USE}"
    assert rules(run(held, order)) == []


@each_order
def test_an_earlier_load_is_not_complete_because_a_later_one_is_used(order):
    """Nothing orders two loads: a use of the second does not complete the first."""
    second = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {other}, [t]; add.u32 other, other, 1;"
    with pytest.raises(Hazards, match=r"tcgen05\.dealloc of .* loaded at PTX line \d+"):
        run(second, order, USE)
