"""A fault in the Blackwell backward is found: as a wrong gradient, or by the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_gradients import definition, far_off, upstream, wide
from cutlass import Boolean, Float32, cute

from cutex.compile import compile
from cutex.device.attention.mask import KeyMask
from cutex.device.pipeline import Barrier, Ring
from cutex.kernels.attention.backward.choose import fitted
from cutex.kernels.attention.backward.sm100 import compute, mma, queries
from cutex.kernels.attention.backward.sm100.backward import Backward
from cutex.kernels.attention.backward.sm100.config import Sm100BackwardConfig
from cutex.kernels.attention.backward.sm100.convert import Convert
from cutex.kernels.attention.backward.sm100.mma import Mma
from cutex.kernels.attention.backward.sm100.preprocess import Preprocess
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.problem.attention.case import AttentionCase
from cutex.sim import SimError, simulate

SLOW = pytest.mark.slow
CONFIG = fitted(Sm100BackwardConfig(causal=True, window=(True, False)))
CASE = AttentionCase(
    seqlen_q=300, seqlen_k=270, heads_q=2, heads_kv=1, causal=True, window=(150, None)
)
# two blocks of keys, and four of queries for each, of two heads: twice the slots of their ring
SMALL = replace(CASE, seqlen_q=140, seqlen_k=140, window=(90, None))
ORDERS = ({}, {"order": "eager"}, {"order": "starved"}, {"order": "random", "seed": 1})


def wrong(config: Sm100BackwardConfig = CONFIG, orders=ORDERS, of=CASE) -> str | None:
    """The error of the kernels as they are now, under the first order that shows one."""
    case = replace(of, head_dim=config.head_dim, head_dim_v=config.head_dim_v)
    kernel = compile(Backward(config), "bf16", "sm_100a", cache=False)
    inputs, (do, _) = case.inputs(), upstream(case, 1, False)
    exact = wide(inputs)
    out, lse = definition(case, exact)
    out.backward(do.double())
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": do, "o": out.detach().bfloat16()}
    given |= {"lse": lse.detach().float(), "scale": case.softmax_scale, "lo": -case.window[0]}
    tiles = -(-case.seqlen_q // config.tile_m) * case.heads_q
    for order in orders:
        found = {f"d{name}": torch.full_like(given[name], torch.nan) for name in "qkv"}
        found["stats"] = torch.full((tiles, config.row_stats * config.tile_m), torch.nan)
        found["dq_sums"] = torch.full((tiles, config.tile_m * config.head_dim), torch.nan)
        found["turns"] = torch.full((tiles, config.turns), 9, dtype=torch.int32)
        values = [(given | found)[name] for name in kernel.argument_names]
        try:
            simulate(kernel, *values, **order)
        except SimError as error:
            return str(error)
        for name in "qkv":
            message = far_off(found[f"d{name}"], getattr(exact, name).grad, 2.0**-7)
            if message is not None:
                return f"d{name} {message}"
    return None


@SLOW
def test_the_unchanged_kernels_are_right():
    assert wrong(orders=ORDERS[:1], of=SMALL) is None


@SLOW
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_the_unchanged_kernels_of_each_head_dim_are_right(dims, deterministic):
    d, dv = dims
    config = replace(CONFIG, head_dim=d, head_dim_v=dv, deterministic=deterministic)
    assert wrong(fitted(config)) is None


STAGED = replace(CONFIG, folded=False, dq_slots=1, ahead=False)
WAITS = ("k loaded", "v loaded", "s full", "p full", "dp full", "ds full", "dq full", "dq empty",
         "sums done")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "event", [x if x == "dq empty" else pytest.param(x, marks=SLOW) for x in WAITS]
)
def test_a_wait_that_is_left_out_is_found(monkeypatch, event):
    wait = Barrier.wait

    def careless(self, phase, slot=0):
        if self.event != event:
            wait(self, phase, slot)

    monkeypatch.setattr(Barrier, "wait", careless)
    assert wrong(of=SMALL if event == "dq empty" else CASE) is not None


@SLOW
@pytest.mark.parametrize("event", ["dq full", "dq empty"])
def test_a_wait_for_the_second_place_of_dq_is_found(monkeypatch, event):
    wait = Barrier.wait

    def careless(self, phase, slot=0):
        if self.event != event or slot != 1:
            wait(self, phase, slot)

    monkeypatch.setattr(Barrier, "wait", careless)
    config = fitted(replace(CONFIG, head_dim=192, head_dim_v=128))
    assert len(config.dq_columns) == 2
    assert wrong(config) is not None


@SLOW
@pytest.mark.parametrize("fault", ["slot given back", "left out", "twice"])
def test_a_fault_in_what_comes_behind_dq_is_found(monkeypatch, fault):
    """Q loaded over before dK of the last queries has read it; these queries missing from dK, or
    counted twice."""
    start, late = Mma.start_dk, Mma.start_late_dk

    def early(self, i, q):
        start(self, i, q)
        mma.commit(self.shared.barriers.q.empty[q.slot], pair=False)

    def behind(self, q):
        if fault != "left out":
            self.products.late_dk.issue(q.slot, Boolean(True), self.dk_blocks()[1])
        if fault == "twice":
            late(self, q)
        if fault == "left out":
            mma.commit(self.shared.barriers.q.empty[q.slot], pair=False)

    if fault == "slot given back":
        monkeypatch.setattr(Mma, "start_dk", early)
    monkeypatch.setattr(Mma, "start_late_dk", behind)
    assert CONFIG.late_parts > 0
    assert wrong() is not None


@SLOW
@pytest.mark.parametrize("name", ["q", "do"])
@pytest.mark.parametrize("method", ["acquire", "wait_full"])
def test_a_slot_that_is_not_waited_for_is_found(monkeypatch, name, method):
    """Loaded into before its reads are complete, or read before it is loaded."""
    original = getattr(Ring, method)

    def careless(self, state):
        if not self.full.event.startswith(f"{name} "):
            return original(self, state)
        if method == "acquire":
            with cute.arch.elect_one():
                self.full.arrive_expecting(self.slot_bytes, state.slot)
            return self.full[state.slot]
        return None

    monkeypatch.setattr(Ring, method, careless)
    assert wrong() is not None


@SLOW
@pytest.mark.parametrize("fence", ["fence_view_async_shared", "fence_view_async_tmem_store"])
def test_ds_that_the_mma_may_not_see_yet_is_found(monkeypatch, fence):
    """Handed over without the fence, or the wait, behind the stores to smem or tensor memory."""
    gradients = compute.Compute.gradients

    def unfenced(self, *of):
        with monkeypatch.context() as within:
            within.setattr(cute.arch, fence, lambda: None)
            gradients(self, *of)

    monkeypatch.setattr(compute.Compute, "gradients", unfenced)
    assert wrong() is not None


@SLOW
def test_a_slot_of_dq_that_is_still_read_is_found(monkeypatch):
    """Columns of dQ written to smem before the adds from that slot have read it."""
    monkeypatch.setattr(cute.arch, "cp_async_bulk_wait_group", lambda *of, **how: None)
    message = wrong(STAGED, orders=({"order": "starved"}, *ORDERS))
    assert message is not None and ("race" in message or "hazard" in message), message


@SLOW
@pytest.mark.parametrize("product", ["start_dk", "start_dv"])
def test_sums_that_forget_earlier_blocks_are_found(monkeypatch, product):
    original = getattr(Mma, product)
    monkeypatch.setattr(Mma, product, lambda self, i, state: original(self, i * 0, state))
    assert wrong(orders=ORDERS[:1]) is not None


@SLOW
def test_a_dq_that_is_added_to_is_found(monkeypatch):
    """dQ of a block must not begin with that of the block before."""
    issue = mma.UmmaProduct.issue

    def adding(self, slot, accumulate, k_blocks=None):
        if self.mma.a_major is mma.OperandMajorMode.MN:
            accumulate = Boolean(True)
        issue(self, slot, accumulate, k_blocks)

    monkeypatch.setattr(mma.UmmaProduct, "issue", adding)
    assert wrong(orders=ORDERS[:1]) is not None


@SLOW
@pytest.mark.parametrize("which", [0, 1])
def test_lse_and_delta_that_are_not_subtracted_are_found(monkeypatch, which):
    subtract = Mma.subtract

    def forgetful(self, of, q):
        if of != which:
            subtract(self, of, q)

    monkeypatch.setattr(Mma, "subtract", forgetful)
    message = wrong(orders=ORDERS[:1])
    assert message is not None and "d" in message


@SLOW
@pytest.mark.parametrize(("side", "by"), [("end", 1), ("end", -1), ("begin", 1), ("begin", -1)])
def test_a_mask_that_is_off_by_one_is_found(monkeypatch, side, by):
    bounds = KeyMask._bounds

    def off(self, r, first_query):
        end, begin = bounds(self, r, first_query)
        return (end + by, begin) if side == "end" else (end, begin + by)

    monkeypatch.setattr(KeyMask, "_bounds", off)
    message = wrong(orders=ORDERS[:1])
    assert message is not None and "off by" in message


@SLOW
def test_a_scale_that_is_forgotten_is_found(monkeypatch):
    write = Convert.write
    monkeypatch.setattr(Convert, "write", lambda self, *a: write(self, *a[:-1], Float32(1.0)))
    message = wrong(orders=ORDERS[:1])
    assert message is not None and message.startswith("dq off by")


@SLOW
def test_rows_past_the_end_that_count_are_found(monkeypatch):
    """Padding of a tile whose P is not 0."""
    keep = Preprocess.keep

    def counted(self, stats, place, lse, delta, passed):
        lse = Float32(0.0) if lse == Float32.inf else lse
        keep(self, stats, place, lse, delta + 1.0, passed)

    monkeypatch.setattr(Preprocess, "keep", counted)
    assert wrong(orders=ORDERS[:1]) is not None


@SLOW
@pytest.mark.parametrize("name", ["await_turn", "pass_turn"])
def test_a_turn_that_is_not_kept_is_found(monkeypatch, name):
    """CTAs that do not wait for their turn, or never pass it on."""
    monkeypatch.setattr(queries, name, lambda *of: None)
    config = replace(CONFIG, deterministic=True)
    message = wrong(config)
    if name == "pass_turn":
        assert message is not None and ("deadlock" in message or "never" in message)
    else:
        assert message is not None, "adds of two CTAs to a tile are not ordered"
