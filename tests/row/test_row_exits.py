"""A signal to a CTA of the cluster that may have ended, which an H100 answers with a fault once in
some thousand launches, is found in each run of the simulator."""

from __future__ import annotations

import pytest
import torch
from cutlass import cute

from cutex.compile import compile
from cutex.device.row.reduction import RowReduction
from cutex.device.row.tile import RowTile
from cutex.kernels.row import norm_backward
from cutex.kernels.row.norm_backward import NormBackward, NormBackwardConfig
from cutex.sim import Hazards, simulate

CONFIG = NormBackwardConfig(RowTile(1, 128, 2, 1, 8), weight="bf16", stages=0)
MANY = 1 << 30


class Signalling(RowReduction):
    """A reduction that signals after the last turns, too, when no CTA waits for it."""

    @cute.jit
    def __call__(self, values, combine, turn=0, turns=1):
        return RowReduction.__call__(self, values, combine, turn, MANY)


class MetRelaxed(NormBackward):
    """The gradient whose CTAs meet at their end, by a barrier that waits for no memory."""

    @cute.jit
    def write_sums(self, columns, rSum, whole, mParts):
        NormBackward.write_sums(self, columns, rSum, whole, mParts)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


def report_of(kind):
    kernel = compile(kind(CONFIG), "bf16", "sm_90a", cache=False)
    x, dy = (torch.randn(8, 2048).bfloat16() for _ in range(2))
    w, dw, dx = torch.randn(2048).bfloat16(), torch.zeros(2048).bfloat16(), torch.empty_like(x)
    parts, rstd = torch.zeros(2, 2048), torch.ones(8)
    return simulate(kernel, x, dy, dx, rstd, w, dw, parts, 2)


@pytest.fixture
def signalling(monkeypatch):
    made = norm_backward.reductions

    def reductions(*given, **options):
        return [
            Signalling(r.tile, r.count, r.words, r.full, r.read) for r in made(*given, **options)
        ]

    monkeypatch.setattr(norm_backward, "reductions", reductions)


def test_the_kernel_itself_has_no_such_signal():
    assert not [a for a in report_of(NormBackward).advisories if a.rule == "exit"]


def test_a_signal_to_a_cta_that_may_have_ended_is_found(signalling):
    with pytest.raises(Hazards, match=r"exit: .*an arrival of CTA"):
        report_of(NormBackward)


def test_a_relaxed_barrier_at_the_end_is_no_wait_for_it(signalling):
    (found,) = (a for a in report_of(MetRelaxed).advisories if a.rule == "exit")
    assert "only a barrier.cluster.arrive.relaxed is in between" in str(found)
