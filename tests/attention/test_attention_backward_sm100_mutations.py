"""A fault in the Blackwell backward is found: as a wrong gradient, or by the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import pytest
import torch
from attention_gradients import definition, far_off, upstream, wide
from cutlass import Boolean, Float32, cute
from torch import Tensor

from cutex.compile import Compiled, compile
from cutex.device.attention.mask import KeyMask
from cutex.device.pipeline import Barrier, Ring
from cutex.device.turns import await_turn, pass_turn
from cutex.kernels.attention.backward.choose import fitted
from cutex.kernels.attention.backward.sm100 import compute, mma, queries
from cutex.kernels.attention.backward.sm100.config import Sm100BackwardConfig
from cutex.kernels.attention.backward.sm100.mma import Mma
from cutex.kernels.attention.backward.sm100.queries import Convert
from cutex.kernels.attention.backward.sm100.shared import Load
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.problem.attention.case import AttentionCase, Inputs
from cutex.problem.stage import package
from cutex.sim import SimError, simulate

SLOW = pytest.mark.slow
CONFIG = fitted(Sm100BackwardConfig(causal=True, window=(True, False)))
# two blocks of keys, and four of queries for each, of two heads: twice the slots of their ring
CASE = AttentionCase(
    seqlen_q=140, seqlen_k=140, heads_q=2, heads_kv=1, causal=True, window=(90, None)
)
UNSEEN = replace(CASE, seqlen_q=40, seqlen_k=520, heads_q=1)  # keys that no query sees
ORDERS = ({}, {"order": "eager"}, {"order": "starved"}, {"order": "random", "seed": 1})


@dataclass(frozen=True)
class Run:
    """The kernels of a config as they are now, and a case's inputs and gradients in float64."""

    config: Sm100BackwardConfig
    case: AttentionCase

    @cached_property
    def kernel(self) -> Compiled:
        place = f"{package('attention_backward', 'sm_100a')}.{self.config.kernel_module}"
        kernel = import_module(place).Backward(self.config)
        return compile(kernel, "bf16", "sm_100a", cache=False)

    @cached_property
    def exact(self) -> tuple[dict[str, Any], Inputs]:
        """The arguments that are read, and the exact gradients of leaves."""
        case = self.case
        inputs, (do, _) = case.inputs(), upstream(case, 1, False)
        exact = wide(inputs)
        out, lse = definition(case, exact)
        out.backward(do.double().nan_to_num())
        given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": do}
        given |= {"o": out.detach().bfloat16(), "lse": lse.detach().float()}
        given |= {"scale": case.softmax_scale, "lo": -(case.window[0] or 0)}
        if case.lengths_q is not None:
            given |= {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
            given |= {"max_seqlen_q": max(case.lengths_q), "max_seqlen_k": max(case.lengths_k)}
        return given, exact

    def gradients(self, **order: Any) -> dict[str, Tensor]:
        """dQ, dK and dV, simulated; raises SimError."""
        c, (given, _) = self.config, self.exact
        rows, batch = given["q"].shape[0], self.case.batch
        per_head = rows // c.tile_m + batch if c.varlen_q else -(-self.case.seqlen_q // c.tile_m)
        tiles = per_head * self.case.heads_q
        found = {f"d{name}": torch.full_like(given[name], torch.nan) for name in "qkv"}
        found["stats"] = torch.full((tiles, c.row_stats * c.tile_m), torch.nan)
        found["dq_sums"] = torch.full((tiles, c.tile_m * c.head_dim), torch.nan)
        found["turns"] = torch.full((tiles, c.turns), 9, dtype=torch.int32)
        values = [(given | found)[name] for name in self.kernel.argument_names]
        simulate(self.kernel, *values, **order)
        return found


def wrong(config: Sm100BackwardConfig = CONFIG, orders=ORDERS, of=CASE) -> str | None:
    """The error of the kernels as they are now, under the first order that shows one."""
    run = Run(config, replace(of, head_dim=config.head_dim, head_dim_v=config.head_dim_v))
    for order in orders:
        try:
            found = run.gradients(**order)
        except SimError as error:
            return str(error)
        for name in "qkv":
            message = far_off(found[f"d{name}"], getattr(run.exact[1], name).grad, 2.0**-7)
            if message is not None:
                return f"d{name} {message}"
    return None


@SLOW
def test_the_unchanged_kernels_are_right():
    assert wrong(orders=ORDERS[:1]) is None


@SLOW
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_the_unchanged_kernels_of_each_head_dim_are_right(dims, deterministic):
    d, dv = dims
    config = replace(CONFIG, head_dim=d, head_dim_v=dv, deterministic=deterministic)
    assert wrong(fitted(config)) is None


STAGED = replace(CONFIG, folded=False, dq_slots=1, ahead=False)
WAITS = ("q rest", "k loaded", "v loaded", "s full", "p full", "dp full", "ds full", "dq full",
         "dq empty", "sums done", "dk staged", "dv staged", "k empty", "v empty")  # fmt: skip


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
    assert wrong() is not None


@SLOW
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("role", [Load, compute.Compute, compute.Store], ids=lambda x: x.__name__)
def test_smem_of_the_tile_before_that_is_not_waited_for_is_found(monkeypatch, role, dim):
    """K loaded before products have read the last tile's; dS written over dK that is being stored;
    the same smem said to be free before it is."""
    config = fitted(replace(CONFIG, head_dim=dim, head_dim_v=dim))
    if role is Load:
        monkeypatch.setattr(Load, "await_k", lambda self: None)
    elif role is compute.Compute:
        monkeypatch.setattr(compute, "await_staging", lambda shared: None)
    else:
        wait = cute.arch.cp_async_bulk_wait_group
        monkeypatch.setattr(
            cute.arch, "cp_async_bulk_wait_group", lambda n, read: wait(2, read=read)
        )
    assert (config.staged_in_ds, config.staged_in_q) == ((2, False) if dim == 64 else (1, True))
    assert wrong(config) is not None


@SLOW
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_tiles_whose_keys_no_query_sees_are_right(dims):
    """Of five tiles of keys that one CTA takes the first two, and after them others."""
    config = fitted(replace(CONFIG, head_dim=dims[0], head_dim_v=dims[1]))
    assert config.persistent
    assert wrong(config, of=UNSEEN) is None


@SLOW
def test_a_tile_that_is_two_ahead_is_found(monkeypatch):
    """Where no query sees the keys, LOAD holds MMA back; else it completes two phases of a barrier
    that COMPUTE has not waited for."""
    no_block, wait = Load.no_block, Barrier.wait

    def careless(self, phase, slot=0):
        if self.event != "v empty":
            wait(self, phase, slot)

    def unwaited(self):
        with monkeypatch.context() as within:
            within.setattr(Barrier, "wait", careless)
            no_block(self)

    monkeypatch.setattr(Load, "no_block", unwaited)
    message = wrong(fitted(replace(CONFIG, head_dim=64, head_dim_v=64)), of=UNSEEN)
    assert message is not None and "deadlock" in message


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
    """Q loaded over before dK has read it; dK of a block left out, or counted twice."""
    start_dq, start_dk = Mma.start_dq, Mma.start_dk
    held: list[Any] = []  # the slot of Q

    def early(self, i):
        start_dq(self, i)
        mma.commit(self.shared.barriers.q.empty[held[0]], pair=False)

    def wrongly(self, i, q):
        if fault == "twice":
            self.products.dk.issue(q.slot, i > 0)
            start_dk(self, i + 1, q)
        elif fault == "left out":
            mma.commit(self.shared.barriers.q.empty[q.slot], pair=False)
        else:
            self.products.dk.issue(q.slot, i > 0)

    def noted(self, i, q):
        held[:] = [q.slot]
        both(self, i, q)

    both = Mma.start_dk_and_dq
    if fault == "slot given back":
        monkeypatch.setattr(Mma, "start_dk_and_dq", noted)
        monkeypatch.setattr(Mma, "start_dq", early)
    monkeypatch.setattr(Mma, "start_dk", wrongly)
    assert CONFIG.late_dk
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
@pytest.mark.parametrize("event", ["s full", "q empty"])
def test_a_half_of_q_that_is_still_read_is_found(monkeypatch, event):
    """Loaded over before S, or dK, has read it; LOAD alone does not wait, others do."""
    config = fitted(replace(CONFIG, head_dim=256, head_dim_v=256))
    assert config.halves
    queries, wait = Load.queries, Barrier.wait

    def careless(self, phase, slot=0):
        if self.event != event:
            wait(self, phase, slot)

    def unwaited(self, *of):
        with monkeypatch.context() as within:
            within.setattr(Barrier, "wait", careless)
            queries(self, *of)

    monkeypatch.setattr(Load, "queries", unwaited)
    assert wrong(config) is not None


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
    # NOTE: where dK is late, dS^T is in smem alone
    config = CONFIG if "shared" in fence else fitted(replace(CONFIG, head_dim=64, head_dim_v=64))
    assert config.late_dk == ("shared" in fence)
    assert wrong(config) is not None


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
    assert message is not None and message.startswith("d")


@SLOW
def test_a_scale_that_is_forgotten_is_found(monkeypatch):
    write = Convert.write
    monkeypatch.setattr(Convert, "write", lambda self, *a: write(self, *a[:-1], Float32(1.0)))
    message = wrong(orders=ORDERS[:1])
    assert message is not None and message.startswith("dq off by")


IN_TURN = fitted(Sm100BackwardConfig(head_dim=64, head_dim_v=64, deterministic=True))
# three blocks of keys that add to each of two tiles of dQ, and take equally long
THREE = AttentionCase(seqlen_q=150, seqlen_k=384, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=64)
SEEDS = (1, 2, 7)


@SLOW
def test_a_turn_that_is_not_passed_on_is_found(monkeypatch):
    monkeypatch.setattr(queries, "pass_turn", lambda *of: None)
    message = wrong(IN_TURN, ORDERS[:1], THREE)
    assert message is not None and ("deadlock" in message or "never" in message)


def early(turns, tile, part, turn):
    await_turn(turns, tile, part, turn)
    pass_turn(turns, tile, part, turn)


def of_no_warp(self):
    return self.shared.split * 4


TURNS = {  # what is changed, and where
    "right": (queries, "await_turn", await_turn),
    "not waited for": (queries, "await_turn", lambda *of: None),
    "passed on before the adds": (queries, "await_turn", early),
    "the one before": (queries, "await_turn", lambda *of: await_turn(*of[:3], of[3] - 1)),
    "of another warp": (queries.Add, "turn_part", of_no_warp),
}


@SLOW
@pytest.mark.parametrize("fault", TURNS)
def test_a_turn_that_is_not_waited_for_is_found(monkeypatch, fault):
    """Sums of three in fp32 depend on who adds first, which orders of CTAs change."""
    monkeypatch.setattr(*TURNS[fault])
    run = Run(IN_TURN, THREE)
    try:
        found = [run.gradients(order="random", seed=i)["dq_sums"].view(torch.int32) for i in SEEDS]
    except SimError as error:
        assert fault != "right" and ("deadlock" in str(error) or "never" in str(error)), error
        return
    assert all(torch.equal(found[0], x) for x in found[1:]) == (fault == "right")


# by the barrier of each commit in mma.py
COMMITS = ("s full", "dp full", "q empty", "do empty", "dq full", "sums done")


@SLOW
@pytest.mark.parametrize("event", COMMITS)
def test_a_commit_that_is_left_out_is_found(monkeypatch, event):
    """Whoever waits for the products would wait for ever."""
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
    message = wrong(orders=ORDERS[:1])
    assert message is not None and "deadlock" in message


@SLOW
@pytest.mark.parametrize("event", ["s full", "dp full"])
def test_a_commit_before_its_product_is_found(monkeypatch, event):
    """Scores read before tensor cores have written them."""
    name = {"s full": "start_s", "dp full": "start_dp"}[event]
    start = getattr(Mma, name)

    def early(self, *of):
        barrier = self.shared.barriers.s_full if event == "s full" else self.shared.barriers.dp_full
        mma.commit(barrier[0], pair=False)
        with monkeypatch.context() as within:
            within.setattr(mma, "commit", lambda barrier, pair: None)
            start(self, *of)

    monkeypatch.setattr(Mma, name, early)
    assert wrong() is not None


@SLOW
def test_p_that_the_mma_may_not_see_yet_is_found(monkeypatch):
    """Handed over without the wait behind the stores to tensor memory."""
    probabilities = compute.Compute.probabilities

    def unfenced(self, *of):
        with monkeypatch.context() as within:
            within.setattr(cute.arch, "fence_view_async_tmem_store", lambda: None)
            return probabilities(self, *of)

    monkeypatch.setattr(compute.Compute, "probabilities", unfenced)
    assert wrong() is not None


@SLOW
@pytest.mark.parametrize("event", ["p full", "ds full", "dq empty", "dk staged", "dv staged"])
def test_fewer_arrivals_than_warps_are_found(monkeypatch, event):
    """A barrier that half of the warps complete."""
    allocate = Barrier.allocate

    def fewer(smem, name, arrivals, slots=1):
        arrivals = arrivals // 2 if name == event else arrivals
        return allocate(smem, name, arrivals=arrivals, slots=slots)

    monkeypatch.setattr(Barrier, "allocate", staticmethod(fewer))
    assert wrong() is not None
