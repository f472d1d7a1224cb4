"""Reports begin with the cause: one report for it, at its line, with what follows folded below."""

from __future__ import annotations

import re

import mutants
import numpy as np
import pytest
import torch
from barriers import init, wait
from mutations import Mutant
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.sim import Deadlock, Hazards, SimError, simulate
from cutex.sim.reports import folded

ANNOUNCES = r"arrive\.expect_tx\S*\s+\S+, \S+, (%r\d+|\d+);"


def matrices(k: int) -> list[torch.Tensor]:
    return [
        torch.randn(256, k).bfloat16(),
        torch.randn(256, k).bfloat16(),
        torch.zeros(256, 256, dtype=torch.bfloat16),
    ]


def announcing(arch: str, number: int, size: int) -> Mutant:
    """A stage that announces `size` bytes for the loads of a slot."""
    compiled = compile(stage(arch, number).kernel(), "bf16", arch)
    ptx = re.sub(ANNOUNCES, lambda m: m[0].replace(f", {m[1]};", f", {size};"), compiled.ptx)
    assert ptx != compiled.ptx
    return Mutant(compiled.object_path, compiled.symbol, ptx)


@pytest.mark.parametrize(("arch", "number", "size"), [("sm_90a", 3, 16384), ("sm_100a", 3, 16384)])
def test_of_two_loads_one_is_announced(arch, number, size):
    """The phase completes with A's bytes while B's are under way: not B's reader is at fault."""
    with pytest.raises(SimError) as raised:
        simulate(announcing(arch, number, size), *matrices(512))
    first = re.sub(r"^\d+ hazards? found\n", "", str(raised.value)).partition("\n")[0]
    assert re.match(r"cutex/device/pipeline.py:\d+:\d+, called at \S+: bytes announced: ", first)
    assert f"the {size} bytes that were announced for it, while 2 copies of" in first
    assert "mbarrier ab.full[" in first and "the TMA load of m" in first
    assert str(raised.value).count(": bytes announced: ") == 1


def test_what_too_few_bytes_leave_at_the_end_is_no_report_of_its_own():
    copy = "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    text = f"""{init(1)} mov.u32 %r9, smem; setp.eq.u32 %p0, %i, 0;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
        {copy} [%r9+128], [%x], 128, [bar]; {copy} [%r9+256], [%x], 128, [bar];
        {wait("bar", 0, "W")} ld.shared.u32 %r1, [%r9+256]; st.global.u32 [%out_i], %r1;"""
    arrays = {"x": aligned(np.zeros(64, np.uint32)), "out": np.zeros(32, np.uint32)}
    with pytest.raises(Hazards) as raised:
        simulate_ptx(text, arrays, Shape(block=32, smem=4096))
    reports = folded(raised.value.findings)
    assert [r.root.rule for r in reports] == ["bytes announced"]
    assert "tx-count" in [f.rule for f in reports[0].followers]


def test_more_bytes_than_come_are_told_where_they_are_announced():
    with pytest.raises(Deadlock) as raised:
        simulate(announcing("sm_90a", 3, 65536), *matrices(512))
    first, second, third = str(raised.value).split("\n")[:3]
    assert re.match(r"cutex/device/pipeline.py:\d+:\d+, called at \S+: deadlock: no warp", first)
    assert "phase 0 of mbarrier ab.full[0]" in second
    assert "announced 65536 bytes, and 49152 bytes came" in second
    assert "mbarrier.arrive.expect_tx" in third
    announced = "cute.arch.mbarrier_arrive_and_expect_tx(self[slot], num_bytes)"
    assert announced in str(raised.value).partition("called at cutex/device/pipeline.py")[0]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("k", [64, 512])
@pytest.mark.parametrize("number", [0, 3])
def test_nobody_waits_for_the_mma(number, k):
    """The access that comes too early is told first, and the barrier that it should have waited
    for; that the CTA returns too early follows from that."""
    compiled = compile(stage("sm_100a", number).kernel(), "bf16", "sm_100a")
    waits = list(mutants.sites(compiled, "an mbarrier's wait"))
    report = None
    for site in waits:
        try:
            report = simulate(site.mutant, *matrices(k), raise_findings=False)
        except SimError:
            continue
        told = [str(r) for r in folded(report.findings)]
        if not any("tcgen05.mma" in text.partition("\n")[0] for text in told):
            continue
        first = told[0].partition("\n")[0]
        assert ": race: " in first, first
        assert "it completes on mbarrier" in first and "never waited" in first, first
        assert re.search(r"what would order the two: a wait, .* phase of mbarrier \w+", told[0])
        assert not any(": exit: " in text.partition("\n")[0] for text in told)
    assert report is not None


def test_a_load_that_comes_before_the_mma_is_told_at_the_load():
    """The epilogue's warps load before the MMA is issued: one report, of the load, which names the
    barrier that the last commit arrives on; that the MMA overwrites what was loaded follows."""
    compiled = compile(stage("sm_100a", 3).kernel(), "bf16", "sm_100a")
    *_, site = mutants.sites(compiled, "an mbarrier's wait")
    report = simulate(site.mutant, *matrices(512), raise_findings=False)
    (told,) = folded(report.findings)
    first = str(told).partition("\n")[0]
    assert re.match(r"cutex/device/epilogue/\S+, called at \S+: race: tcgen05.ld of CTA ", first)
    assert "before the tcgen05.mma of CTA (0,0,0) warp 5" in first and "has written it" in first
    assert "it completes on mbarrier acc full" in first and "never waited" in first
    assert (
        "a wait, by this warp or one that it waits for, for the phase of mbarrier acc full"
        in str(told)
    )
    assert any("overwrites" in f.message for f in told.followers)
