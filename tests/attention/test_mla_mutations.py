"""A fault in the MLA kernel is found: as a wrong result, or by the simulator."""

from __future__ import annotations

import pytest
import torch
from cutlass import cute
from test_mla import Case

from cutex.compile import compile
from cutex.kernels.attention.mla.config import MlaConfig
from cutex.kernels.attention.mla.sm90.mla import Mla
from cutex.kernels.attention.mla.sm90.scores import Block
from cutex.kernels.attention.mla.sm90.shared import GROUPS, ChunkRing
from cutex.sim import SimError, simulate

pytestmark = pytest.mark.slow
CONFIG = MlaConfig(num_sms=2, share=True)
ORDERS = ({}, {"order": "random", "seed": 1}, {"order": "random", "seed": 2}, {"order": "starved"})


def wrong(config: MlaConfig = CONFIG, orders=ORDERS) -> str | None:
    """The error of a kernel, compiled as it is now, under the first order that shows one."""
    case = Case(128, 1, (400, 70))
    kernel = compile(Mla(config), "bf16", "sm_90a", cache=False)
    want, want_lse = case.expected()
    for order in orders:
        out, lse = torch.full_like(want, torch.nan).bfloat16(), want_lse.float() * torch.nan
        sums = torch.full((4 * 4 + 4 * 64 * 513,), torch.nan)
        arguments = case.q, case.cache, out, lse, case.lengths, case.table, 576**-0.5, 0, sums
        try:
            simulate(kernel, *arguments, **order)
        except SimError as error:
            return str(error)
        if not (out.double() - want).abs().max() < 0.02:
            return "out is wrong"
        if not (lse.double() - want_lse).abs().max() < 1e-4:
            return "lse is wrong"
    return None


def test_the_unchanged_kernel_is_right():
    assert wrong() is None


def test_p_that_is_not_fenced_for_the_tensor_cores_is_found(monkeypatch):
    monkeypatch.setattr(cute.arch, "fence_view_async_shared", lambda: None)
    assert wrong() is not None


def test_p_that_is_handed_over_before_it_is_written_is_found(monkeypatch):
    write, hand_over = Block.write, Block.hand_over

    def early(self, rescale, slot):
        hand_over(self, slot)
        write(self, rescale, slot)

    monkeypatch.setattr(Block, "write", early)
    monkeypatch.setattr(Block, "hand_over", lambda self, slot: None)
    assert wrong() is not None


def test_a_group_that_is_released_at_one_cta_alone_is_found(monkeypatch):
    def alone(self, state, group):
        with cute.arch.elect_one():
            self.empty.arrive(state.slot * len(GROUPS) + group)

    monkeypatch.setattr(ChunkRing, "release", alone)
    assert wrong() is not None


def test_a_cta_that_leaves_before_the_other_has_written_is_found(monkeypatch):
    monkeypatch.setattr(ChunkRing, "drain", lambda self, state: None)
    assert wrong() is not None


def test_a_slot_that_is_filled_again_too_early_is_found(monkeypatch):
    acquire = ChunkRing.acquire

    def early(self, state, group):
        if group == 0:
            acquire(self, state, 0)
            for wave in {self.wave_of(c) for c in GROUPS[1]} - {self.wave_of(c) for c in GROUPS[0]}:
                with cute.arch.elect_one():
                    self.full.arrive_expecting(self.wave_bytes, state.slot * self.waves + wave)

    monkeypatch.setattr(ChunkRing, "acquire", early)
    assert wrong() is not None
