"""A fault in the backward's kernels is found: as a wrong gradient, or by the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_gradients import definition, far_off, upstream, wide
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.compile import compile
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.mask import KeyMask
from cutex.device.handover import Handover
from cutex.device.kept_sums import KeptSums
from cutex.device.pipeline import Barrier, PipelineState
from cutex.kernels.attention.backward import rows
from cutex.kernels.attention.backward.choose import fitted
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.rows import Convert
from cutex.kernels.attention.backward.sm90 import shared
from cutex.kernels.attention.backward.sm90.backward import Backward
from cutex.kernels.attention.backward.sm90.keys import WideKeys
from cutex.kernels.attention.backward.sm90.queries import AllGradients, QueryGradients
from cutex.kernels.attention.backward.sm90.scores import Scores
from cutex.kernels.attention.backward.sm90.shared import SumsQueue, Zeros
from cutex.kernels.attention.backward.tiles import Rotation, turn_of
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.problem.attention.case import AttentionCase
from cutex.schedulers.counter import Counter
from cutex.schedulers.dispatch import Ticket
from cutex.sim import SimError, simulate

UNFITTED = BackwardConfig(head_dim=64, head_dim_v=64, causal=True, window=(True, False))
# a warpgroup of its own computes dQ, as with a soft cap
CONFIG = replace(fitted(replace(UNFITTED, softcap=True)), softcap=False, overlap=True)
CASE = AttentionCase(
    seqlen_q=200, seqlen_k=270, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=64, causal=True,
    window=(150, None),
)  # fmt: skip
WIDE = fitted(BackwardConfig(head_dim=192, head_dim_v=192, causal=True, window=(True, False)))
WIDE_CASE = replace(CASE, head_dim=192, head_dim_v=192)
# one CTA, which takes two tiles of keys; their warpgroups compute dQ
OWN = replace(fitted(BackwardConfig(causal=True)), num_ctas=1)
OWN_CASE = AttentionCase(
    seqlen_q=130, seqlen_k=200, heads_q=1, heads_kv=1, head_dim=128, head_dim_v=128, causal=True
)
# the same where adds come in one order, by warps of their own
IN_ORDER = replace(fitted(BackwardConfig(causal=True, deterministic=True)), num_ctas=1)
# the same where all queries are seen, from queries of its own on
ROTATED = replace(fitted(BackwardConfig(deterministic=True)), num_ctas=4)
# of 128 queries a block
OWN_64 = replace(fitted(BackwardConfig(head_dim=64, head_dim_v=64, causal=True)), num_ctas=1)
IN_ORDER_64 = replace(OWN_64, deterministic=True, late_zeros=False)
# the sums of the last of these heads are zeroed by main, by one CTA or two
LATE_CASES = {n: replace(OWN_CASE, heads_q=2 + n, heads_kv=2 + n) for n in (1, 2)}
# packed: of two heads that share one, without queries, without keys, without either, of one key
PACKED = replace(fitted(BackwardConfig(causal=True, varlen_q=True, varlen_k=True)), num_ctas=1)
PACKED_CASE = replace(
    OWN_CASE, batch=6, heads_q=4, heads_kv=2, lengths_q=(70, 0, 200, 90, 0, 150),
    lengths_k=(200, 130, 200, 0, 0, 1), seqlen_q=200, seqlen_k=200,
)  # fmt: skip
# the queries of the last two of five tiles of keys are cut into shares for three CTAs
SPREAD = replace(fitted(BackwardConfig()), num_ctas=3)
SPREAD_64 = replace(fitted(BackwardConfig(head_dim=64, head_dim_v=64)), num_ctas=3)
SPREAD_CASE = replace(OWN_CASE, seqlen_q=260, seqlen_k=600, causal=False)
ORDERS = ({}, {"order": "random", "seed": 1}, {"order": "starved"}, {"order": "eager"})


def wrong(
    config: BackwardConfig = CONFIG, orders=ORDERS, case: AttentionCase = CASE, ranges: int = 1
) -> str | None:
    """The error of the kernels as they are now, under the first order that shows one; where heads
    are divided, each into `ranges` of queries."""
    kernel = compile(Backward(config), "bf16", "sm_90a", cache=False)
    inputs, (do, _) = case.inputs(), upstream(case, 1, False)
    exact = wide(inputs)
    out, lse = definition(case, exact)
    out.backward(do.double())
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": do, "o": out.detach().bfloat16()}
    given |= {"lse": lse.detach().float(), "scale": case.softmax_scale, "lo": -150}
    given |= {"seqused_q": inputs.seqused_q, "seqused_k": inputs.seqused_k}
    given |= {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    given |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    given |= {"head_parts": case.heads_q // case.heads_kv * ranges, "query_parts": ranges}
    given |= {"whole": config.num_ctas // config.key_ctas}
    tiles = -(-case.seqlen_q // config.tile_m) * case.batch * case.heads_q
    shares = config.num_ctas
    if config.head_parts or config.last_parts:
        count = -(-case.seqlen_k // (config.key_ctas * config.tile_n)) + 1
        shares = count * config.key_ctas * case.batch * case.heads_q * ranges
    if case.lengths_q is not None:
        tiles = (inputs.q.shape[0] // config.tile_m + case.batch) * case.heads_q
    for order in orders:
        found = {f"d{name}": torch.full_like(given[name], torch.nan) for name in "qkv"}
        found["stats"] = torch.full((tiles, 2 * config.tile_m), torch.nan)
        found["dq_sums"] = torch.full((tiles, config.tile_m * config.head_dim), torch.nan)
        found["turns"] = torch.full((tiles, config.turns), 9, dtype=torch.int32)
        found["ranks"] = torch.full((case.batch + 1, 3), 9, dtype=torch.int32)
        found["zeroed"] = torch.full((case.batch * case.heads_kv,), 9, dtype=torch.int32)
        found["counter"] = torch.zeros(2 + config.sum_warps * shares, dtype=torch.int32)
        found["partials"] = torch.full((shares, config.partial_numbers), torch.nan)
        values = [(given | found)[name] for name in kernel.argument_names]
        try:
            simulate(kernel, *values, **order)
        except SimError as error:
            return str(error)
        for name in "qkv":
            message = far_off(found[f"d{name}"], getattr(exact, name).grad, 2.0**-7)
            if message is not None:
                return f"d{name} {message}"
        if found["counter"].any():
            return f"the counter is left at {found['counter'].tolist()}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_unchanged_kernels_are_right(deterministic):
    assert wrong(replace(CONFIG, deterministic=deterministic), ORDERS[1:3]) is None


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", HEAD_DIMS[1:], ids=str)
def test_the_unchanged_kernels_of_larger_head_dims_are_right(dims, deterministic):
    d, dv = dims
    config = replace(UNFITTED, head_dim=d, head_dim_v=dv, deterministic=deterministic)
    assert wrong(fitted(config), case=replace(CASE, head_dim=d, head_dim_v=dv)) is None


@pytest.mark.slow
@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(
    "config",
    [OWN, replace(OWN, alternate=False), IN_ORDER, OWN_64, IN_ORDER_64],
    ids=["alternation", "any order", "one order", "head dim 64", "head dim 64, one order"],
)
def test_the_unchanged_kernel_of_several_tiles_is_right(config, ctas):
    assert config.own_dq and config.why_not() is None
    orders = *ORDERS, {"order": "random", "seed": 7}
    case = replace(OWN_CASE, head_dim=config.head_dim, head_dim_v=config.head_dim)
    assert wrong(replace(config, num_ctas=ctas), orders, case) is None


@pytest.mark.slow
@pytest.mark.parametrize("config", [IN_ORDER, IN_ORDER_64], ids=["128", "64"])
def test_heads_that_are_taken_the_other_way_around_are_right(config):
    """The last two of four heads of K."""
    dims = {"head_dim": config.head_dim, "head_dim_v": config.head_dim}
    case = replace(OWN_CASE, seqlen_q=300, seqlen_k=270, batch=2, heads_q=4, heads_kv=2, **dims)
    assert config.flips and wrong(replace(config, num_ctas=2), case=case) is None


@pytest.mark.slow
@pytest.mark.parametrize("ctas", [2, 3, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_that_begin_at_queries_of_their_own_are_right(dim, ctas):
    """Some of five tiles of keys begin at one time."""
    config = fitted(BackwardConfig(head_dim=dim, head_dim_v=dim, deterministic=True))
    config = replace(config, rotated=True)
    case = replace(OWN_CASE, causal=False, seqlen_q=520, seqlen_k=600, heads_q=2)
    case = replace(case, head_dim=dim, head_dim_v=dim)
    assert wrong(replace(config, num_ctas=ctas), ORDERS, case) is None


@pytest.mark.slow
def test_a_turn_that_is_counted_from_another_start_is_found(monkeypatch):
    monkeypatch.setattr(Rotation, "turn", lambda self, n_block, m_block: n_block + 1)
    case = replace(OWN_CASE, causal=False, seqlen_q=520, seqlen_k=600)
    message = wrong(ROTATED, orders=({},), case=case)
    assert message is not None and ("deadlock" in message or "never" in message), message


@pytest.mark.slow
@pytest.mark.parametrize("event", ["dq full", "dq empty"])
def test_dq_that_is_taken_early_is_found(monkeypatch, event):
    """Added before it is there, or overwritten before it was added."""
    wait = Barrier.wait

    def careless(self, phase, slot=0):
        if self.event != event:
            wait(self, phase, slot)

    monkeypatch.setattr(Barrier, "wait", careless)
    message = wrong(IN_ORDER, case=OWN_CASE)
    assert message is not None and ("race" in message or "hazard" in message), message


@pytest.mark.slow
def test_adds_without_a_fence_behind_what_they_read_are_found(monkeypatch):
    def hand_over(self, number):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(number % self.turns)

    monkeypatch.setattr(SumsQueue, "hand_over", hand_over)
    message = wrong(IN_ORDER, case=OWN_CASE)
    assert message is not None and "proxy" in message, message


@pytest.mark.slow
def test_a_turn_that_an_adding_warp_counts_wrongly_is_found(monkeypatch):
    """A block of keys that takes itself for the one behind it."""
    monkeypatch.setattr(shared, "turn_of", lambda *of: turn_of(*of) + 1)
    message = wrong(replace(IN_ORDER, num_ctas=2), orders=({},), case=OWN_CASE)
    assert message is not None and ("deadlock" in message or "never" in message), message


@pytest.mark.slow
@pytest.mark.parametrize("event", ["v read", "k read"])
def test_a_tile_of_keys_that_is_overwritten_by_the_next_one_is_found(monkeypatch, event):
    wait = Barrier.wait

    def careless(self, phase, slot=0):
        if self.event != event:
            wait(self, phase, slot)

    monkeypatch.setattr(Barrier, "wait", careless)
    message = wrong(OWN, case=OWN_CASE)
    assert message is not None and ("race" in message or "hazard" in message), message


@pytest.mark.slow
@pytest.mark.parametrize("ctas", LATE_CASES)
@pytest.mark.parametrize("config", [OWN, OWN_64], ids=["hd 128", "hd 64"])
def test_sums_that_main_zeroes_are_right(config, ctas):
    case = replace(LATE_CASES[ctas], head_dim=config.head_dim, head_dim_v=config.head_dim)
    assert wrong(replace(config, num_ctas=ctas), ORDERS, case) is None


@pytest.mark.slow
def test_sums_behind_a_sequence_without_queries_are_zeroed():
    config = fitted(BackwardConfig(causal=True, used_q=True, used_k=True))
    used = {"batch": 2, "used_q": (0, 130), "used_k": (150, 200), "heads_q": 2, "heads_kv": 2}
    assert config.late_zeros
    assert wrong(replace(config, num_ctas=1), ({},), replace(OWN_CASE, **used)) is None


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_sums_of_packed_sequences_that_main_zeroes_are_right(ctas, causal):
    config = replace(PACKED, causal=causal, num_ctas=ctas)
    assert config.late_zeros and config.why_not() is None
    assert wrong(config, ORDERS, replace(PACKED_CASE, causal=causal)) is None


@pytest.mark.slow
def test_sums_of_packed_sequences_of_which_a_share_is_not_zeroed_are_found(monkeypatch):
    monkeypatch.setattr(Zeros, "clear", lambda self, tile: None)
    assert wrong(PACKED, orders=({},), case=PACKED_CASE) is not None


@pytest.mark.slow
def test_sums_of_a_sequence_without_keys_that_are_not_zeroed_are_found(monkeypatch):
    """Main has no tile for it."""
    clear = rows.Preprocess.clear

    def of_plain_kernels(self, sums, part):
        if not self.config.late_zeros:
            clear(self, sums, part)

    monkeypatch.setattr(rows.Preprocess, "clear", of_plain_kernels)
    assert wrong(PACKED, orders=({},), case=PACKED_CASE) is not None


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_sums_that_are_added_to_before_they_are_zero_are_found(monkeypatch, waits):
    """A share is zeroed one unit ahead, by a warp that runs last."""
    monkeypatch.setattr(shared, "tiles_ahead", lambda config, sizes: sizes.num_n_blocks)
    if not waits:
        monkeypatch.setattr(shared, "await_zeros", lambda walk, tile: None)
    late = {"order": "starved", "seed": 9}
    assert (wrong(OWN, (late,), LATE_CASES[1]) is None) == waits


@pytest.mark.slow
def test_sums_of_which_a_share_is_not_zeroed_are_found(monkeypatch):
    monkeypatch.setattr(Zeros, "clear", lambda self, tile: None)
    assert wrong(OWN, orders=({},), case=LATE_CASES[1]) is not None


@pytest.mark.slow
def test_ds_of_a_hidden_block_that_is_not_zero_is_found(monkeypatch):
    """A warpgroup that passes over a tile's first block leaves the other's dQ what was there."""

    def hidden_block(self, state, number, rdS):
        ds = self.shared.ds.state(number)
        self.enter()
        self.leave()
        self.shared.ds.wait_empty(ds)
        self.shared.ds.hand_over(ds)
        self.enter()
        self.leave()
        self.shared.q.wait_full(state)
        self.shared.do.wait_full(state)
        self.release(state)

    monkeypatch.setattr(AllGradients, "hidden_block", hidden_block)
    assert wrong(OWN, orders=({},), case=OWN_CASE) is not None


@pytest.mark.slow
def test_dv_that_is_overwritten_before_its_store_has_read_it_is_found(monkeypatch):
    """The next tile's first dQ goes through the smem that dV is stored from."""
    monkeypatch.setattr(AllGradients, "await_stores", lambda self: None)
    message = wrong(OWN, case=OWN_CASE)
    assert message is not None and ("race" in message or "hazard" in message), message


@pytest.mark.slow
def test_dq_from_half_of_the_keys_is_found(monkeypatch):
    """dQ is started before the other warpgroup has handed its dS over: where these alternate, their
    turns say so, too."""
    wait = Barrier.wait

    def careless(self, phase, slot=0):
        if self.event != "ds full":
            wait(self, phase, slot)

    monkeypatch.setattr(Barrier, "wait", careless)
    message = wrong(replace(OWN, alternate=False), case=OWN_CASE)
    assert message is not None, message


@pytest.mark.slow
def test_dq_of_a_last_block_that_is_forgotten_is_found(monkeypatch):
    """dQ is computed beside the next block, which the last one does not have."""
    monkeypatch.setattr(AllGradients, "last_dq", lambda self, tile, number: None)
    assert wrong(OWN, orders=({},), case=OWN_CASE) is not None


@pytest.mark.slow
def test_a_counter_that_is_not_reset_is_found(monkeypatch):
    """The next launch would begin with its last tiles."""

    def ahead(self, ticket, asked, total):
        ctas, _, _ = cute.arch.grid_dim()
        return Ticket(ctas + cute.arch.shuffle_sync(asked, 0), ticket.phase)

    monkeypatch.setattr(Counter, "next", ahead)
    message = wrong(OWN, orders=({},), case=OWN_CASE)
    assert message is not None and "the counter is left at" in message, message


@pytest.mark.slow
@pytest.mark.parametrize(("side", "by"), [("end", 1), ("end", -1), ("begin", 1), ("begin", -1)])
def test_a_mask_that_is_off_by_one_is_found(monkeypatch, side, by):
    bounds = KeyMask._bounds

    def off(self, r, first_query):
        end, begin = bounds(self, r, first_query)
        return (end + by, begin) if side == "end" else (end, begin + by)

    monkeypatch.setattr(KeyMask, "_bounds", off)
    message = wrong(orders=({},))
    assert message is not None and "off by" in message


@pytest.mark.slow
@pytest.mark.parametrize(("config", "case"), [(CONFIG, CASE), (OWN, OWN_CASE)], ids=["", "own"])
def test_ds_that_wgmma_may_not_see_yet_is_found(monkeypatch, config, case):
    """Handed over without the fence between a thread's stores and the tensor core's reads."""

    def hand_over(self, state):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(state.slot)

    monkeypatch.setattr(Handover, "hand_over", hand_over)
    message = wrong(config, case=case)
    assert message is not None and "proxy" in message, message


@pytest.mark.slow
def test_ds_that_is_handed_over_in_front_of_the_fence_behind_dq_is_found(monkeypatch):
    finish, hand_over = AllGradients.finish, Handover.hand_over_fenced

    def early(self, state, ds, acc_dq, of_dq):
        if of_dq is not None:
            cute.arch.sync_warp()
            hand_over(self.shared.ds, ds)
        with monkeypatch.context() as within:
            if of_dq is not None:
                within.setattr(Handover, "hand_over_fenced", lambda *of: None)
            finish(self, state, ds, acc_dq, of_dq)

    monkeypatch.setattr(AllGradients, "finish", early)
    message = wrong(OWN, case=OWN_CASE)
    assert message is not None and "proxy" in message, message


@pytest.mark.slow
def test_a_slot_of_ds_that_is_still_read_is_found(monkeypatch):
    monkeypatch.setattr(Handover, "wait_empty", lambda self, state: None)
    message = wrong()
    assert message is not None and "hazard" in message, message


def test_keys_that_are_overwritten_before_the_last_dq_are_found(monkeypatch):
    """dK is stored through the smem of K."""
    wait = Barrier.wait

    def careless(self, phase, slot=0):
        if self.event != "k read":
            wait(self, phase, slot)

    monkeypatch.setattr(Barrier, "wait", careless)
    message = wrong()
    assert message is not None and "race" in message, message


@pytest.mark.slow
def test_dk_of_wide_head_dims_from_ds_that_is_not_there_is_found(monkeypatch):
    """Another warpgroup writes dS to smem; the one that sums dK reads it there."""
    run = WideKeys.sum

    def early(self, *of):
        with monkeypatch.context() as within:
            within.setattr(Barrier, "wait", lambda *of: None)
            run(self, *of)

    monkeypatch.setattr(WideKeys, "sum", early)
    message = wrong(WIDE, case=WIDE_CASE)
    assert message is not None and ("race" in message or "hazard" in message), message


@pytest.mark.slow
def test_slots_that_are_loaded_while_dk_is_computed_are_found(monkeypatch):
    """Of two slots of Q, the warpgroup that sums dK loads what follows into those that it has
    read."""
    assert WIDE.dk_loads
    run, wait, advance = WideKeys.sum, warpgroup.wait_group, PipelineState.advance

    def late(self, *of):
        with monkeypatch.context() as within:
            within.setattr(warpgroup, "wait_group", lambda n: None)
            within.setattr(PipelineState, "advance", lambda state: wait(0) or advance(state))
            run(self, *of)

    monkeypatch.setattr(WideKeys, "sum", late)
    message = wrong(WIDE, case=replace(WIDE_CASE, seqlen_q=300))
    assert message is not None and ("race" in message or "hazard" in message), message


@pytest.mark.slow
def test_a_slot_of_dq_that_is_still_read_is_found(monkeypatch):
    """Columns of dQ written to smem before the adds from that slot have read it."""
    monkeypatch.setattr(cute.arch, "cp_async_bulk_wait_group", lambda *of, **how: None)
    message = wrong(replace(CONFIG, dq_slots=1), orders=({"order": "starved"}, *ORDERS))
    assert message is not None and ("race" in message or "hazard" in message), message


@pytest.mark.slow
def test_dq_that_adds_may_not_see_yet_is_found(monkeypatch):
    """Added from smem without the fence behind the stores to it."""
    add = QueryGradients.add_from_smem

    def unfenced(self, *of):
        with monkeypatch.context() as within:
            within.setattr(cute.arch, "fence_view_async_shared", lambda: None)
            add(self, *of)

    monkeypatch.setattr(QueryGradients, "add_from_smem", unfenced)
    message = wrong()
    assert message is not None and "proxy" in message, message


@pytest.mark.slow
def test_a_delta_that_is_forgotten_is_found(monkeypatch):
    of_columns = Scores.of_columns

    def none(self, which, *of):
        found = of_columns(self, which, *of)
        if which == 1:
            found.fill(0.0)
        return found

    monkeypatch.setattr(Scores, "of_columns", none)
    message = wrong(orders=({},))
    assert message is not None and message.startswith("dq off by")


@pytest.mark.slow
def test_a_scale_that_is_forgotten_is_found(monkeypatch):
    tile = Convert.tile
    monkeypatch.setattr(Convert, "tile", lambda self, *a: tile(self, *a[:-1], Float32(1.0)))
    message = wrong(orders=({},))
    assert message is not None and message.startswith("dq off by")


@pytest.mark.slow
def test_a_turn_that_is_taken_early_is_found(monkeypatch):
    """CTAs of a deterministic kernel that do not wait pass on the wrong turn, or none."""
    monkeypatch.setattr(BlockInfo, "n_blocks", shifted(BlockInfo.n_blocks))
    message = wrong(replace(CONFIG, deterministic=True), orders=({},))
    assert (message is not None and "deadlock" in message) or "never" in message, message


def shifted(n_blocks):
    def later(self, *of):
        blocks = n_blocks(self, *of)
        return blocks._replace(end=blocks.end + Int32(1))

    return later


@pytest.fixture
def short_shares(monkeypatch):
    """A share of the last tiles may be one block of queries."""
    monkeypatch.setattr(BackwardConfig, "tail_steps", (1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("ctas", [2, 3])
@pytest.mark.parametrize("config", [SPREAD, SPREAD_64], ids=["128", "64"])
def test_last_tiles_whose_queries_are_spread_are_right(short_shares, config, ctas):
    dims = {"head_dim": config.head_dim, "head_dim_v": config.head_dim}
    case = replace(SPREAD_CASE, heads_q=2, heads_kv=1, **dims)
    assert config.spread
    assert wrong(replace(config, num_ctas=ctas), case=case) is None


@pytest.mark.slow
@pytest.mark.parametrize("ctas", [3, 5])
@pytest.mark.parametrize("lengths", [(130, 200), (300, 300), (260, 140)])
@pytest.mark.parametrize("config", [OWN, OWN_64], ids=["128", "64"])
def test_causal_tiles_that_are_all_cut_are_right(short_shares, config, lengths, ctas):
    """The shares hold a part of a tile, or several."""
    dims = {"head_dim": config.head_dim, "head_dim_v": config.head_dim}
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "heads_q": 2}
    case = replace(OWN_CASE, batch=1 + (ctas == 5), **sizes, **dims)
    cut = replace(config, num_ctas=ctas, spread=True, late_zeros=False)
    assert wrong(cut, case=case) is None


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no wait", "no reset", "not added"])
def test_sums_of_a_piece_that_are_passed_on_wrongly_are_found(short_shares, monkeypatch, fault):
    if fault == "no wait":
        monkeypatch.setattr(KeptSums, "await_kept", lambda self: None)
    elif fault == "no reset":
        say = KeptSums.say
        monkeypatch.setattr(KeptSums, "say", lambda self, kept: say(self, 1))
    else:
        monkeypatch.setattr(KeptSums, "add", lambda self, *of: self.say(0))
    assert wrong(SPREAD, case=SPREAD_CASE) is not None
