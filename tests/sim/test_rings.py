"""Rings of mbarriers of which a run uses no slot twice are named: it cannot tell a missing wait."""

from __future__ import annotations

import pytest
import torch

from cutex.compile import compile
from cutex.gemm import main
from cutex.kernels.gemm import stage, stages
from cutex.problem.gemm import GemmProblem
from cutex.sim import simulate
from cutex.sim.reports import used_once


def run(arch: str, number: int, m: int, n: int, k: int):
    compiled = compile(stage(arch, number).kernel(), "bf16", arch)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    return simulate(compiled, a, b, torch.zeros(m, n, dtype=torch.bfloat16))


@pytest.mark.parametrize(("k", "phases"), [(128, 1), (256, 1), (320, 2), (1024, 4)])
def test_a_ring_wraps_if_a_slot_is_used_twice(k, phases):
    """Stage 3 has 4 slots of 64 columns."""
    report = run("sm_90a", 3, 256, 256, k)
    assert report.rings["ab.full"] == (4, phases)
    assert report.unwrapped == (["ab.full", "ab.empty"] if phases == 1 else [])


def test_one_barrier_is_no_ring():
    report = run("sm_100a", 3, 256, 256, 1024)
    assert report.rings["acc full"] == (1, 1) and report.unwrapped == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_default_size_wraps_the_rings_of_operands(arch):
    (sizes,) = GemmProblem.cases["sim"]
    m, n, k = (sizes[name] for name in "mnk")
    for number in (s.number for s in stages(arch) if not s.chooses and s.number > 1):
        report = run(arch, number, min(m, 256), min(n, 256), k)
        rings = {name: use for name, use in report.rings.items() if "ab." in name}
        assert rings and all(most > 1 for _, most in rings.values()), (number, rings)


def test_the_ladder_says_so(capsys):
    argv = ["--arch", "sm_90a", "--stage", "3", "--device", "sim", "--mnk", "256,256,128"]
    assert main(argv) == 0
    assert f"stage 3: {used_once(['ab.full', 'ab.empty'])}" in capsys.readouterr().out
    assert main([*argv[:-1], "256,256,512"]) == 0
    assert "used twice" not in capsys.readouterr().out
