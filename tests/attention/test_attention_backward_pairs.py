"""The Blackwell backward by pairs of CTAs that exchange dS: its gradients, and faults of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import tcgen05
from test_attention_backward_sm100_mutations import CASE, CONFIG, ORDERS, SLOW, wrong

from cutex.arch import arch
from cutex.device.pipeline import Barrier, PairRing, Ring
from cutex.kernels.attention.backward.sm100 import compute
from cutex.kernels.attention.backward.sm100.config import Sm100BackwardConfig
from cutex.kernels.attention.backward.sm100.pairs import backward, mma, shared
from cutex.kernels.attention.backward.sm100.pairs.config import PairConfig, pairs_of
from cutex.problem.attention.case import AttentionCase

PAIR = pairs_of(CONFIG)  # causal, with a window
# two pairs, the second of which has keys of one CTA; five blocks of queries of two heads
OF_PAIRS = replace(
    CASE, seqlen_q=300, seqlen_k=330, window=(200, None), head_dim=128, head_dim_v=128
)
SHORT = replace(OF_PAIRS, seqlen_q=140, seqlen_k=256)
FULL = AttentionCase(seqlen_q=200, seqlen_k=400, head_dim=128, head_dim_v=128)
CASES = {
    "causal window": (PAIR, OF_PAIRS),
    "full": (PairConfig(), FULL),
    "few keys": (PairConfig(), replace(FULL, seqlen_k=5)),
    "no query of some keys": (PairConfig(causal=True), replace(FULL, seqlen_q=40, causal=True)),
    "heads": (PairConfig(causal=True), replace(FULL, heads_q=4, heads_kv=2, causal=True)),
    "packed": (
        PairConfig(varlen_q=True, varlen_k=True),
        replace(FULL, batch=4, lengths_q=(130, 0, 1, 200), lengths_k=(257, 40, 300, 0)),
    ),
}


def test_a_pair_fits_or_says_why_not():
    b200 = arch("sm_100a")
    assert PairConfig().why_not(arch=b200) is None
    assert "pairs of CTAs have 128" in PairConfig(head_dim=64, head_dim_v=64).why_not()
    assert "not deterministic" in PairConfig(deterministic=True).why_not()
    assert pairs_of(Sm100BackwardConfig(softcap=True, folded=False)) is None


@SLOW
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_pairs_are_right_in_all_orders(name):
    config, case = CASES[name]
    assert wrong(config, of=case) is None


WAITS = ("k loaded", "v loaded", "s full", "p full", "dp full", "staged", "received", "ds full",
         "sent", "dq full", "dq empty", "sums done")  # fmt: skip
RINGS = ("q", "do", "qt", "dot", "rows")


def fault(of: AttentionCase = SHORT) -> str | None:
    return wrong(PAIR, of=of)


@SLOW
@pytest.mark.parametrize("event", WAITS)
def test_a_wait_that_is_left_out_is_found(monkeypatch, event):
    wait = Barrier.wait

    def careless(self, phase, slot=0):
        if self.event != event:
            wait(self, phase, slot)

    monkeypatch.setattr(Barrier, "wait", careless)
    assert fault(OF_PAIRS if event == "sent" else SHORT) is not None


@SLOW
@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("method", ["acquire", "wait_full"])
def test_a_slot_that_is_not_waited_for_is_found(monkeypatch, name, method):
    if (method, name) == ("acquire", "rows"):
        pytest.skip("LOAD has waited for dO's slot, which the same commit empties")
    owner = PairRing if method == "acquire" else Ring
    original, wait = getattr(owner, method), Barrier.wait

    def careless(self, state):
        if not self.full.event.startswith(f"{name} "):
            return original(self, state)
        if method == "wait_full":
            return None
        with monkeypatch.context() as within:
            within.setattr(Barrier, "wait", lambda *of: None)
            found = original(self, state)
        assert Barrier.wait is wait
        return found

    monkeypatch.setattr(owner, method, careless)
    assert fault() is not None


COMMITS = ("s full", "dp full", "dq full", "sums done", *(f"{x} empty" for x in RINGS))


@SLOW
@pytest.mark.parametrize("event", COMMITS)
def test_a_commit_that_is_left_out_is_found(monkeypatch, event):
    last: list[str] = []  # the event of the barrier that is passed next
    at, commit = Barrier.__getitem__, mma.commit

    def noted(self, slot):
        last[:] = [self.event]
        return at(self, slot)

    def careless(barrier, pair):
        if last != [event]:
            commit(barrier, pair=pair)

    monkeypatch.setattr(Barrier, "__getitem__", noted)
    monkeypatch.setattr(mma, "commit", careless)
    message = wrong(PAIR, orders=ORDERS[:1], of=SHORT)
    assert message is not None and "deadlock" in message


@SLOW
def test_a_commit_to_the_leader_alone_is_found(monkeypatch):
    def alone(barrier, pair):
        with cute.arch.elect_one():
            mask = Int32(1) << (cute.arch.block_idx_in_cluster() // 2 * 2)
            tcgen05.commit(barrier, mask, tcgen05.CtaGroup.TWO)

    monkeypatch.setattr(mma, "commit", alone)
    message = wrong(PAIR, orders=ORDERS[:1], of=SHORT)
    assert message is not None


@SLOW
@pytest.mark.parametrize("event", ["p full", "ds full", "staged", "dq empty"])
def test_fewer_arrivals_than_warps_are_found(monkeypatch, event):
    allocate = Barrier.allocate

    def fewer(smem, name, arrivals, slots=1):
        arrivals = arrivals // 2 if name == event else arrivals
        return allocate(smem, name, arrivals=arrivals, slots=slots)

    monkeypatch.setattr(Barrier, "allocate", staticmethod(fewer))
    assert fault() is not None


@SLOW
@pytest.mark.parametrize("fence", ["fence_view_async_shared", "fence_view_async_tmem_store"])
@pytest.mark.parametrize("of", ["probabilities", "gradients"])
def test_p_or_ds_that_the_mma_may_not_see_yet_is_found(monkeypatch, of, fence):
    if of == "probabilities" and fence == "fence_view_async_shared":
        pytest.skip("P is in tensor memory alone")
    original = getattr(compute.Compute, of)

    def unfenced(self, *args):
        with monkeypatch.context() as within:
            within.setattr(cute.arch, fence, lambda: None)
            return original(self, *args)

    monkeypatch.setattr(compute.Compute, of, unfenced)
    assert fault() is not None


@SLOW
@pytest.mark.parametrize("what", ["to itself", "before it is there", "half", "not at all"])
def test_an_exchange_that_goes_wrong_is_found(monkeypatch, what):
    """dS of this CTA's keys, sent to the wrong CTA, before all warps have it in smem, in part, or
    never."""
    copy, wait = backward.copy_to_cta, Barrier.wait

    def wrongly(to, smem, num_bytes, barrier, rank):
        if what == "to itself":
            copy(to, smem, num_bytes, barrier, 1 - rank)
        elif what == "half":
            copy(to, smem, num_bytes // 2, barrier, rank)

    def careless(self, phase, slot=0):
        if self.event != "staged":
            wait(self, phase, slot)

    if what == "before it is there":
        monkeypatch.setattr(Barrier, "wait", careless)
    else:
        monkeypatch.setattr(backward, "copy_to_cta", wrongly)
    assert fault() is not None


@SLOW
@pytest.mark.parametrize("which", ["columns", "half"])
def test_the_other_ctas_part_is_found(monkeypatch, which):
    """Columns, or queries, of the other CTA of the pair."""
    original = getattr(shared.PairLoad, which)

    def other(self, *args):
        original(replace(self, shared=replace(self.shared, rank=1 - self.shared.rank)), *args)

    monkeypatch.setattr(shared.PairLoad, which, other)
    message = wrong(PAIR, orders=ORDERS[:1], of=SHORT)
    assert message is not None and message.startswith("d")


@SLOW
def test_a_dq_that_is_added_to_is_found(monkeypatch):
    """dQ of a block must not begin with that of the block before."""
    issue = mma.UmmaProduct.issue

    def adding(self, slot, accumulate, k_blocks=None):
        if self.mma.a_major is mma.OperandMajorMode.MN:
            accumulate = Boolean(True)
        issue(self, slot, accumulate, k_blocks)

    monkeypatch.setattr(mma.UmmaProduct, "issue", adding)
    assert wrong(PAIR, orders=ORDERS[:1], of=SHORT) is not None
