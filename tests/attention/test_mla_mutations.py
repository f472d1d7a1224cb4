"""A fault in an MLA kernel is found: as a wrong result, or by the simulator."""

from __future__ import annotations

import pytest
import test_mla
import torch
from cutlass import Int32, cute
from test_mla import Case

from cutex.compile import compile
from cutex.device import meeting
from cutex.device.atoms.umma import commit
from cutex.device.pipeline import PairRing, is_leader
from cutex.kernels.attention.mla.combine import MlaOut
from cutex.kernels.attention.mla.sm90 import mla as sm90
from cutex.kernels.attention.mla.sm90.config import Sm90MlaConfig
from cutex.kernels.attention.mla.sm90.scores import Block
from cutex.kernels.attention.mla.sm90.shared import GROUPS, WAVES, ChunkRing
from cutex.kernels.attention.mla.sm100 import mla as sm100
from cutex.kernels.attention.mla.sm100.config import Sm100MlaConfig
from cutex.kernels.attention.mla.sm100.roles import Mma
from cutex.kernels.attention.mla.sm100.softmax import Softmax
from cutex.sim import SimError, simulate

pytestmark = pytest.mark.slow
KERNELS = {
    "sm_90a": lambda: sm90.Mla(Sm90MlaConfig(num_sms=2, pairs=True)),
    "sm_100a": lambda: sm100.Mla(Sm100MlaConfig(num_sms=2)),
}
ORDERS = ({}, {"order": "random", "seed": 1}, {"order": "random", "seed": 2}, {"order": "starved"})


def wrong(arch: str) -> str | None:
    """The error of a kernel, compiled as it is now, under the first order that shows one."""
    case = Case(128, 1, (400, 70))
    kernel = compile(KERNELS[arch](), "bf16", arch, cache=False)
    want, want_lse = case.expected()
    for order in ORDERS:
        out, lse = torch.full_like(want, torch.nan).bfloat16(), want_lse.float() * torch.nan
        sums = torch.full((4 * 4 + 4 * 128 * 513,), torch.nan)
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


@pytest.mark.parametrize("arch", KERNELS)
def test_the_unchanged_kernel_is_right(arch):
    assert wrong(arch) is None


@pytest.mark.parametrize("arch", KERNELS)
def test_p_that_is_not_fenced_for_the_tensor_cores_is_found(arch, monkeypatch):
    monkeypatch.setattr(cute.arch, "fence_view_async_shared", lambda: None)
    assert wrong(arch) is not None


# ---- Hopper


def test_p_that_is_handed_over_before_it_is_written_is_found(monkeypatch):
    write, hand_over = Block.write, Block.hand_over

    def early(self, rescale):
        hand_over(self)
        write(self, rescale)

    monkeypatch.setattr(Block, "write", early)
    monkeypatch.setattr(Block, "hand_over", lambda self: None)
    assert wrong("sm_90a") is not None


def test_references_that_are_taken_out_of_turn_are_found(monkeypatch):
    monkeypatch.setattr(Block, "phase_before", lambda self, kv: kv.phase ^ 1)
    assert wrong("sm_90a") is not None


def test_a_turn_that_is_passed_before_the_references_are_written_is_found(monkeypatch):
    take_turn, pass_turn = Block.take_turn, Block.pass_turn

    def early(self, acc, i, kv):
        pass_turn(self)
        return take_turn(self, acc, i, kv)

    monkeypatch.setattr(Block, "take_turn", early)
    monkeypatch.setattr(Block, "pass_turn", lambda self: None)
    assert wrong("sm_90a") is not None


def test_sums_of_one_warpgroup_alone_are_found(monkeypatch):
    monkeypatch.setattr(Block, "add_other_sums", lambda self, kv: None)
    assert wrong("sm_90a") is not None


def test_a_slot_that_is_filled_again_too_early_is_found(monkeypatch):
    acquire = ChunkRing.acquire

    def early(self, state, group):
        if group == 0:
            acquire(self, state, 0)
            for wave in {self.wave_of(c) for c in GROUPS[1]} - {self.wave_of(c) for c in GROUPS[0]}:
                with cute.arch.elect_one():
                    self.full.arrive_expecting(self.wave_bytes, state.slot * WAVES + wave)

    monkeypatch.setattr(ChunkRing, "acquire", early)
    assert wrong("sm_90a") is not None


def met_wrongly() -> bool:
    """Whether a fault in how CTAs with parts meet is found, under some order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            test_mla, "kernel_for", lambda c, *how: compile(sm90.Mla(c), *how, cache=False)
        )
        for order in ORDERS:
            try:
                if test_mla.met(3, (900,), 7, **order):
                    return True
            except (SimError, AssertionError):
                return True
    return False


def test_parts_that_are_merged_before_all_are_written_are_found(monkeypatch):
    @cute.jit
    def hasty(words, parts, stays):
        before = cute.arch.atomic_add(words, Int32(meeting.WRITTEN), sem="acq_rel", scope="gpu")
        number = Int32(0) if before % meeting.MOST == 0 else Int32(meeting.LEAVES)
        return number, Int32(1)

    monkeypatch.setattr(meeting, "meet", hasty)
    assert met_wrongly()


def test_a_part_that_is_counted_before_all_warps_have_written_it_is_found(monkeypatch):
    monkeypatch.setattr(MlaOut, "sync", staticmethod(lambda: None))
    assert met_wrongly()


@pytest.mark.parametrize("name", ["atomic_add", "load"])
def test_parts_that_are_not_released_or_acquired_are_found(name, monkeypatch):
    """By whoever merges them: a load that waits for the last one acquires all."""
    real = getattr(cute.arch, name)

    def relaxed(*given, sem, **scope):
        return real(*given, sem="relaxed", **scope)

    monkeypatch.setattr(cute.arch, name, relaxed)
    assert met_wrongly()


# ---- Blackwell


def test_halves_of_a_row_with_references_of_their_own_are_found(monkeypatch):
    monkeypatch.setattr(Softmax, "other", lambda self, x, place: x)
    assert wrong("sm_100a") is not None


def test_an_exchange_in_one_place_is_found(monkeypatch):
    other = Softmax.other
    monkeypatch.setattr(Softmax, "other", lambda self, x, place: other(self, x, 0))
    assert wrong("sm_100a") is not None


def test_p_that_is_written_while_it_is_read_is_found(monkeypatch):
    block = Softmax.block
    monkeypatch.setattr(
        Softmax, "block", lambda self, row, blocks, i, buffer, o_phase, factors: block(
            self, row, blocks, i, buffer, None, factors
        )
    )  # fmt: skip
    assert wrong("sm_100a") is not None


def test_scores_that_are_announced_before_their_products_are_found(monkeypatch):
    scores = Mma.scores

    def early(self, qk, kv, buffer):
        commit(self.shared.barriers.s_full[buffer.slot], pair=True)
        return scores(self, qk, kv, buffer)

    monkeypatch.setattr(Mma, "scores", early)
    assert wrong("sm_100a") is not None


def test_slots_of_a_pair_that_are_not_waited_for_are_found(monkeypatch):
    @cute.jit
    def early(self, state):
        if is_leader():
            with cute.arch.elect_one():
                self.full.arrive_expecting(self.slot_bytes, state.slot)
        return self.full[state.slot]

    monkeypatch.setattr(PairRing, "acquire", early)
    assert wrong("sm_100a") is not None
