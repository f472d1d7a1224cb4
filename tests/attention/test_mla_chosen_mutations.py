"""A fault in the MLA kernel of chosen keys is found: as a wrong result, or by the simulator."""

from __future__ import annotations

import pytest
import torch
from cutlass import Int32, cute
from test_mla_chosen import Case

from cutex.compile import compile
from cutex.kernels.attention.mla.sm90.shared import GROUPS, ChunkRing
from cutex.kernels.attention.mla.sparse import sm90 as sparse
from cutex.kernels.attention.mla.sparse.config import SparseMlaConfig
from cutex.sim import SimError, simulate

pytestmark = pytest.mark.slow
ORDERS = ({}, {"order": "random", "seed": 1}, {"order": "random", "seed": 2}, {"order": "starved"})


def wrong() -> str | None:
    """The error of the kernel, compiled as it is now, under the first order that shows one."""
    case = Case(heads=16, topk=400, batch=2, gaps=0.3)
    config = SparseMlaConfig(num_sms=2, lengths=False, combined=False)
    kernel = compile(sparse.SparseMla(config), "bf16", "sm_90a", cache=False)
    want, want_lse = case.expected()
    for order in ORDERS:
        out, lse = torch.full_like(want, torch.nan).bfloat16(), want_lse.float() * torch.nan
        sums, flags = torch.full((8 * 64 * 513,), torch.nan), torch.zeros(8, dtype=torch.int32)
        rows, table = case.cache.view(-1, 1, 1, 576), case.indices[:, 0]
        arguments = case.q, rows, out, lse, table, 576**-0.5, 0, sums, flags
        try:
            report = simulate(kernel, *arguments, **order)
        except SimError as error:
            return str(error)
        # NOTE: as of cp.async without a fence. By the letter a warp's arrival by one lane takes a
        # bar.warp.sync behind the others' loads, also where they have all used what they loaded
        advised = [str(a) for a in report.advisories if "arrival does not tell" not in str(a)]
        if advised:
            return advised[0]
        if not (out.double() - want).abs().max() < 0.02:
            return "out is wrong"
        if not (lse.double() - want_lse).abs().max() < 1e-4:
            return "lse is wrong"
    return None


def test_the_unchanged_kernel_is_right():
    assert wrong() is None


def test_copies_that_are_not_waited_for_are_found(monkeypatch):
    monkeypatch.setattr(cute.arch, "cp_async_wait_group", lambda n: None)
    assert wrong() is not None


def test_copies_of_a_wave_too_few_are_found(monkeypatch):
    wait = cute.arch.cp_async_wait_group
    monkeypatch.setattr(cute.arch, "cp_async_wait_group", lambda n: wait(n + 1))
    assert wrong() is not None


def test_copies_that_are_not_fenced_for_the_tensor_cores_are_found(monkeypatch):
    @cute.jit
    def wait_full(self, state, wave):
        cute.arch.cp_async_wait_group(sparse.WAVES - 1 - wave)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(state.slot * sparse.WAVES + wave)
        ChunkRing.wait_full(self, state, wave)

    monkeypatch.setattr(sparse.CopiedRing, "wait_full", wait_full)
    assert wrong() is not None


def test_a_slot_that_is_filled_again_too_early_is_found(monkeypatch):
    acquire = sparse.CopiedRing.acquire
    early = len(GROUPS) - 1
    monkeypatch.setattr(
        sparse.CopiedRing, "acquire", lambda self, s, g: None if g == early else acquire(self, s, g)
    )
    assert wrong() is not None


def test_rows_behind_the_cache_that_are_taken_for_keys_are_found(monkeypatch):
    monkeypatch.setattr(
        sparse.ChosenRows, "box",
        lambda self, row, rows: sparse.Box(
            sparse.clamp(Int32(self.index[sparse.clamp(row, self.length - 1)]), self.rows - 1), 1
        ),
    )  # fmt: skip
    assert wrong() is not None


def test_a_warp_that_swizzles_by_its_own_rows_is_found(monkeypatch):
    place = sparse.SparseLoad.place
    monkeypatch.setattr(
        sparse.SparseLoad, "place", lambda self, row, unit, slot: place(self, row, unit ^ 1, slot)
    )
    assert wrong() is not None
