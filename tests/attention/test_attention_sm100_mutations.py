"""A fault in Blackwell's attention kernel is found: as a wrong result, or by the simulator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from cutlass import Boolean, Float32, Int32, cute
from mutants import OPERATORS, sites
from test_attention_sm100_values import attend, large

from cutex.compile import compile
from cutex.device.attention import tmem_rows
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.tmem_rows import ScoreRow, store_columns
from cutex.device.pipeline import Barrier, PairRing
from cutex.kernels.attention.forward.sm100 import mma, softmax
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.forward import Forward
from cutex.problem.attention.case import AttentionCase
from cutex.sim import SimError, simulate

SLOW = pytest.mark.slow
# one CTA for all tiles, so that leftovers of one reach the next; references that move often
CONFIG = Sm100ForwardConfig(
    head_dim=64, head_dim_v=64, causal=True, window=(True, False), tile_n=64, p_first=32,
    rescale_threshold=2.0, num_ctas=1,
)  # fmt: skip
CASE = AttentionCase(
    seqlen_q=520, seqlen_k=330, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=64,
    causal=True, window=(150, None),
)  # fmt: skip
PAIR = replace(CONFIG, pair=True, dispatch="clc")
FALLING = replace(CASE, init="falling")


def compiled(config: Sm100ForwardConfig = CONFIG):
    return compile(Forward(config), "bf16", "sm_100a", cache=False)


@pytest.fixture(scope="module")
def kernel():
    return compiled()


def wrong(kernel, case=CASE, config=CONFIG, inputs=None, **order) -> str | None:
    """The error of a kernel."""
    inputs = inputs or case.inputs()
    band = [-case.window[0]] if config.window[0] else []
    out, lse = case.outputs()
    counter = (torch.zeros(2, dtype=torch.int32),) if config.dispatch == "dynamic" else ()
    arguments = (*inputs[:3], out, lse, *counter, case.softmax_scale, *band)
    try:
        simulate(kernel, *arguments, **order)
    except SimError as error:
        return str(error)
    found = case.check(inputs, out, lse)
    return None if found.ok else found.message


@pytest.mark.slow
def test_the_unchanged_kernel_is_right(kernel):
    assert wrong(kernel, order="random", seed=1) is None


@SLOW
@pytest.mark.parametrize("config", [CONFIG, PAIR], ids=["one CTA", "pair"])
def test_the_unchanged_kernel_is_right_where_references_move(config):
    for order in ({}, {"order": "random", "seed": 2}, {"order": "starved"}, {"order": "peer-late"}):
        assert wrong(compiled(config), FALLING, config, **order) is None


# ---- faults in the program


def another_tile(monkeypatch):
    """A row's scores are those of the other Q tile."""
    wait = softmax.RowLoop.wait_scores

    def other(self, state):
        buffer, state = wait(self, state)
        return buffer ^ 1, state

    monkeypatch.setattr(softmax.RowLoop, "wait_scores", other)


def p_too_far(monkeypatch):
    """P written to columns where S is still to be read."""
    store = softmax.store_columns

    def further(tmem, column, values):
        store(tmem, column + 24, values)

    monkeypatch.setattr(softmax, "store_columns", further)


def late_scaling(monkeypatch):
    """O scaled after P V has been allowed to begin."""

    @cute.jit
    def searched(self, n_block: Int32, state, masked):
        buffer, state = self.wait_scores(state)
        column, row = buffer * self.config.tile_n, self.row
        found = row.search(column, n_block, masked)
        raised = self.softmax.raise_reference(found[0], self.factors)
        row.exponentials(column, found, self.dtype, lambda p, part: self.store(buffer, p, part))
        if raised & (state.done > 1):
            self.scale_output(state.parities)
        return state

    monkeypatch.setattr(softmax.RowLoop, "searched", searched)


def no_scaling(monkeypatch):
    """A scaling of O that is left out."""
    monkeypatch.setattr(softmax.RowLoop, "scale_output", lambda self, parities: None)


def early_release(monkeypatch):
    """A slot of K that is read after its release."""
    scores = mma.Products.scores

    def other(self, tile, buffer, slot):
        scores(self, tile, buffer, slot ^ 1)

    monkeypatch.setattr(mma.Products, "scores", other)


def mask_off_by_one(monkeypatch):
    bounds = Mask._bounds

    def off(self, r, first_key):
        end, begin = bounds(self, r, first_key)
        return end + 1, begin

    monkeypatch.setattr(Mask, "_bounds", off)


def window_off_by_one(monkeypatch):
    bounds = Mask._bounds

    def off(self, r, first_key):
        end, begin = bounds(self, r, first_key)
        return end, begin + 1

    monkeypatch.setattr(Mask, "_bounds", off)


def half_of_the_warps(monkeypatch):
    """An MMA that waits for the P of one CTA only."""
    allocate = Barrier.allocate

    def less(smem, event, arrivals, slots=1):
        return allocate(smem, event, arrivals // 2 if event.endswith("of p") else arrivals, slots)

    monkeypatch.setattr(Barrier, "allocate", staticmethod(less))


def half_of_the_bytes(monkeypatch):
    """A load that counts the bytes of its own CTA's half only."""
    allocate = PairRing.allocate.__func__

    def less(cls, smem, name, num_slots, slot_bytes, consumers):
        return allocate(cls, smem, name, num_slots, slot_bytes // 2, consumers)

    monkeypatch.setattr(PairRing, "allocate", classmethod(less))


FAULTS = (
    (another_tile, CONFIG, CASE, True),
    (p_too_far, CONFIG, CASE, True),
    (late_scaling, CONFIG, FALLING, True),
    (no_scaling, CONFIG, FALLING, True),
    (early_release, CONFIG, CASE, True),
    (mask_off_by_one, CONFIG, CASE, True),
    (window_off_by_one, CONFIG, CASE, True),
    (half_of_the_warps, PAIR, CASE, False),
    (half_of_the_bytes, PAIR, CASE, True),
)


@pytest.mark.parametrize(
    ("fault", "config", "case"),
    [
        pytest.param(*x[:3], id=x[0].__name__.replace("_", " "), marks=(SLOW,) if x[3] else ())
        for x in FAULTS
    ],
)
def test_a_fault_is_found(monkeypatch, fault, config, case):
    fault(monkeypatch)
    assert wrong(compiled(config), case, config) is not None


# ---- blocks that are taken tentatively

FULL = replace(CONFIG, causal=False, window=(False, False))
FULL_CASE = replace(CASE, causal=False, window=(None, None), seqlen_q=130)


def hot_inputs(size: float = 24.0):
    """Blocks are taken from the last one down; only for row 100 a key of the first has the largest
    score, by far."""
    inputs = FULL_CASE.inputs()
    inputs.k[:, 5] = size * inputs.q[:, 100]
    return inputs


@SLOW
@pytest.mark.parametrize("config", [FULL, replace(FULL, pair=True, dispatch="clc")], ids=str)
def test_a_row_that_jumps_is_right(config):
    kernel = compiled(config)
    for order in ({}, {"order": "random", "seed": 5}, {"order": "starved"}, {"order": "peer-late"}):
        assert wrong(kernel, FULL_CASE, config, hot_inputs(), **order) is None


def everything_holds(monkeypatch):
    """A block kept although a row exceeds its reference by too much."""
    monkeypatch.setattr(RowSoftmax, "holds", lambda self, highest: Boolean(True))


def one_row_decides(monkeypatch):
    """A warp that keeps a block if any of its rows may."""
    monkeypatch.setattr(cute.arch, "vote_all_sync", cute.arch.vote_any_sync)


def stored_before(monkeypatch):
    """P stored over S before it is known whether the block is kept."""
    tentative = ScoreRow.tentative

    def early(self, column, n_block, num_held, dtype, store):
        kept = tentative(self, column, n_block, num_held, dtype, store)
        store_columns(self.tmem, column, cute.make_rmem_tensor(cute.make_layout(32), Float32))
        return kept

    monkeypatch.setattr(ScoreRow, "tentative", early)


def counted_twice(monkeypatch):
    """A block that is not kept, whose sum is added all the same."""
    keep = tmem_rows.keep

    def added(kept, held, others, total, exponentials, store):
        return keep(kept, held, others, total, exponentials, store) + total

    monkeypatch.setattr(tmem_rows, "keep", added)


def half_a_row_searched(monkeypatch):
    """A search that leaves out the first part."""
    highest_of = ScoreRow.highest_of

    def less(self, scores, n_block, part, highest):
        return highest if part == 0 else highest_of(self, scores, n_block, part, highest)

    monkeypatch.setattr(ScoreRow, "highest_of", less)


def rounded_shift(monkeypatch):
    """Scores of any size scaled and lowered in one step."""
    exponents = RowSoftmax.exponents
    monkeypatch.setattr(
        RowSoftmax, "exponents", lambda self, scores, exact: exponents(self, scores, False)
    )


def always_tame(monkeypatch):
    """Large references taken as if their products were exact."""
    monkeypatch.setattr(RowSoftmax, "is_tame", lambda self: Boolean(True))


def fraction_that_stays(monkeypatch):
    """What rounding took, not scaled when the reference moves."""
    count = RowSoftmax.count_rounding

    def more(self, *args, **named):
        count(self, *args, **named)
        self.lost[0] *= 64.0

    monkeypatch.setattr(RowSoftmax, "count_rounding", more)


@SLOW
@pytest.mark.parametrize(
    ("fault", "inputs"),
    [
        (everything_holds, partial(hot_inputs, 200.0)),
        (one_row_decides, partial(hot_inputs, 200.0)),
        (stored_before, hot_inputs),
        (counted_twice, hot_inputs),
        (half_a_row_searched, partial(hot_inputs, 200.0)),
        (fraction_that_stays, hot_inputs),
    ],
    ids=lambda x: getattr(x, "__name__", "").replace("_", " "),
)
def test_a_fault_of_tentative_blocks_is_found(monkeypatch, fault, inputs):
    fault(monkeypatch)
    assert wrong(compiled(FULL), FULL_CASE, FULL, inputs()) is not None


@SLOW
@pytest.mark.parametrize(
    "fault", [None, rounded_shift, always_tame], ids=["none", "rounded shift", "always tame"]
)
def test_a_fault_with_large_scores_is_found(monkeypatch, fault):
    """The scores are exact, so the error is the softmax's own."""
    if fault is not None:
        fault(monkeypatch)
    q, k, v = large(1e14, torch.bfloat16, head_dim=64)
    case = replace(FULL_CASE, seqlen_k=k.shape[1])
    out, lse = case.outputs()
    counter = torch.zeros(2, dtype=torch.int32)
    simulate(compiled(FULL), q, k, v, out, lse, counter, case.softmax_scale)
    want, _ = attend(q, k, v)
    is_right = (out.double() - want).abs().max() < 2.0**-6  # False for NaN
    assert bool(is_right) == (fault is None)


# ---- instructions that are left out


@pytest.mark.slow
def test_the_first_wait_for_a_store_to_tensor_memory_that_is_missing_is_found(kernel):
    site = next(sites(kernel, "a wait for tcgen05.st"))
    assert wrong(site.mutant) is not None, site


LEFT_OUT = ("a wait for tcgen05.st", "a commit of tcgen05", "a named barrier", "an arrival less",
            "an mbarrier's arrival", "a fence of proxies")  # fmt: skip


@SLOW
@pytest.mark.parametrize("operator", LEFT_OUT)
def test_what_synchronises_is_missed(kernel, operator):
    assert operator in OPERATORS
    case = replace(CASE, heads_q=2)  # so that the last event of a tile is not the last of all
    found = [(site, wrong(site.mutant, case)) for site in sites(kernel, operator)]
    unnoticed = [f"line {s.line}: {s.text}" for s, message in found if message is None]
    assert found and not unnoticed, "\n".join(unnoticed)


# at how many places nothing follows that needs it: dealloc, which is synchronous (9.7.16.6.1)
BY_THE_LETTER = {"a wait for tcgen05.ld": 0, "a fence of tcgen05": 1}


@SLOW
@pytest.mark.parametrize("operator", BY_THE_LETTER)
def test_what_orders_tensor_memory_by_the_letter_is_told(kernel, operator):
    """Registers are true dependencies, and hardware works without the fence: advisories."""
    inputs, untold = FALLING.inputs(), []
    for site in sites(kernel, operator):
        out, lse = FALLING.outputs()
        arguments = (*inputs[:3], out, lse, torch.zeros(2, dtype=torch.int32))
        try:
            report = simulate(site.mutant, *arguments, FALLING.softmax_scale, -FALLING.window[0])
        except SimError:
            continue
        if all(a.rule == "parked wait" for a in report.advisories):
            untold.append(f"line {site.line}: {site.text}")
    assert len(untold) == BY_THE_LETTER[operator], "\n".join(untold)
