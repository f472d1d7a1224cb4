"""Two launches of one call, the second of which may start before the first has ended."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from ptx_kernel import Shape, module

from cutex.sim.finding import Finding
from cutex.sim.host.capture import HostTensor
from cutex.sim.ptx.parse import parse
from cutex.sim.simulation import Simulation

SHAPE = Shape(block=64, grid=2)
LET, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
FIRST = f"{LET} ld.global.u32 %r0, [%x_i]; add.u32 %r0, %r0, 7; st.global.u32 [%y_i], %r0;"
READ = "ld.global.u32 %r0, [%y_i]; st.global.u32 [%z_i], %r0;"


def found(first: str, *others: str, programmatic: bool = True) -> list[Finding]:
    """All reports of the launches, advisories included."""
    arrays = {name: np.zeros(128, np.uint32) for name in "xyz"}
    names = ("second", "third", "fourth")
    texts = [module(body, arrays, SHAPE, "sm_90a", "") for body in (first, *others)]
    programs = parse(texts[0])
    for name, text in zip(names, texts[1:], strict=False):
        programs |= parse(text.replace("snippet", name))
    tensors = [HostTensor.of(array, name) for name, array in arrays.items()]
    values = [ctypes.c_uint64(t.address) for t in tensors]
    params = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
    run = Simulation(programs, tensors)
    run.launch(SHAPE.launch("snippet", params))
    for name, _ in zip(names, others, strict=False):
        run.launch(replace(SHAPE.launch(name, params), programmatic=programmatic))
    assert (arrays["y"] == 7).all()
    return [*run.report.findings, *run.report.advisories]


@pytest.mark.parametrize(
    "second",
    [
        f"{WAIT} {READ}",
        f"setp.eq.u32 %p0, %i, %i; @!%p0 bra on; {WAIT} on: {READ}",
        # one warp waits, and a barrier orders the others after it
        f"mov.u32 %r1, %tid.x; setp.lt.u32 %p0, %r1, 32; @!%p0 bra on; {WAIT} on: bar.sync 0;"
        f"{READ}",
    ],
)
def test_whoever_has_waited_or_knows_of_a_wait_reads_what_is_there(second: str) -> None:
    assert not found(FIRST, second)


@pytest.mark.parametrize("second", [READ, f"{READ} {WAIT}"])
def test_a_read_before_the_wait_races_with_the_kernel_before(second: str) -> None:
    (first, *_) = found(FIRST, second)
    assert not first.advisory and "snippet, launched before it, does not write it" in str(first)


@pytest.mark.parametrize("then, right", [("", False), ("bar.warp.sync -1;", True)])
def test_a_wait_of_one_lane_is_not_its_warps(then: str, right: bool) -> None:
    one = f"setp.eq.u32 %p0, %lane, 0; @!%p0 bra on; {WAIT} on: {then} {READ}"
    told = found(FIRST, one)
    assert right == (not told) and all(f.advisory for f in told)
    assert right or "only lane 0 has executed griddepcontrol.wait" in str(told[0])


def test_a_write_races_with_what_the_kernel_before_reads() -> None:
    (first, *_) = found(FIRST, "st.global.u32 [%x_i], 3;")
    assert not first.advisory and "does not read it" in str(first)


def test_other_places_are_an_advisory() -> None:
    """Only the caller knows which kernel precedes it."""
    (only,) = found(FIRST, "ld.global.u32 %r0, [%z_i];")
    assert only.advisory and "right only behind a kernel that does not write it" in only.message


def test_launches_in_order_need_no_wait() -> None:
    assert not found(FIRST, READ, programmatic=False)


def test_a_kernel_that_lets_none_start_early_ends_first() -> None:
    """Only an advisory remains, for the unknown kernel before it."""
    assert all(f.advisory for f in found(FIRST.replace(LET, ""), READ))


# -- chains of three: the last one waits for the second, and reads what the first writes --------

SECOND = "add.u32 %r0, %i, 1;"  # touches nothing
LAST = f"{WAIT} {READ}"
ONE = "setp.eq.u32 %p0, %i, 0;"


@pytest.mark.parametrize("second", [
    f"{LET} {SECOND}", SECOND, f"{ONE} @%p0 {LET}",
], ids=["lets start", "only ends", "of one thread"])  # fmt: skip
def test_a_wait_is_not_for_what_the_kernel_before_has_not_waited_for(second: str) -> None:
    (first, *_) = found(FIRST, second, LAST)
    assert not first.advisory and "PTX line" in str(first)
    assert "snippet, launched before it, does not write it any more" in str(first)
    assert "griddepcontrol.wait waits for second, which has not waited for it" in str(first)


@pytest.mark.parametrize("second", [
    f"{WAIT} {LET} {SECOND}", f"{LET} {SECOND} {WAIT}", f"{WAIT} {SECOND}",
    f"{ONE} @%p0 {WAIT} {LET}",
], ids=["waits first", "waits last", "only waits", "of one thread"])  # fmt: skip
def test_a_wait_is_for_what_the_kernel_before_has_waited_for(second: str) -> None:
    assert not found(FIRST, second, LAST)


def test_a_write_after_the_wait_races_with_a_read_of_the_kernel_before_the_last() -> None:
    (first, *_) = found(FIRST, f"{LET} {SECOND}", f"{WAIT} st.global.u32 [%x_i], 3;")
    assert not first.advisory and "does not read it any more" in str(first)


def test_a_chain_of_four_is_as_long_as_its_waits() -> None:
    waits, starts = f"{WAIT} {LET}", f"{LET} {SECOND}"
    assert not found(FIRST, f"{LET} {WAIT}", f"{LET} {WAIT}", LAST)
    assert [f for f in found(FIRST, starts, f"{LET} {WAIT}", LAST) if not f.advisory]
    assert [f for f in found(FIRST, f"{LET} {WAIT}", starts, LAST) if not f.advisory]
    assert not found(FIRST, waits, starts, LAST)  # the third starts behind the first's end


@pytest.mark.parametrize(("second", "safe"), [
    (f"{WAIT} {LET}", True), (f"{LET} {WAIT}", False),
], ids=["after its wait", "before"])  # fmt: skip
def test_who_does_not_wait_starts_with_the_letting_of_the_kernel_before(
    second: str, safe: bool
) -> None:
    races = [f for f in found(FIRST, second, READ) if not f.advisory]
    assert bool(races) != safe


def test_a_first_kernel_may_be_launched_so_that_it_waits() -> None:
    """Its bulk loads, too: before it nothing of the call runs."""
    copy = """.reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p0, %tid.x, 0;
    @%p0 mbarrier.init.shared.b64 [bar], 1; bar.sync 0; griddepcontrol.wait;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64; mov.u32 %r9, smem;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9+64], [%x], 64,
    [bar]; W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;"""
    arrays = {"x": np.zeros(64, np.uint32)}
    shape = Shape(block=64, smem=256)
    tensors = [HostTensor.of(arrays["x"], "x")]
    value = ctypes.c_uint64(tensors[0].address)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    run = Simulation(parse(module(copy, arrays, shape, "sm_90a", "")), tensors)
    run.launch(replace(shape.launch("snippet", params), programmatic=True))
    assert not run.report.findings and not run.report.advisories
