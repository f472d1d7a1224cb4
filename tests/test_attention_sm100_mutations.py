"""A fault in Blackwell's attention kernel is found: as a wrong result, or by the simulator."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import pytest
import torch
from cutlass import Boolean, Int32, cute
from mutants import OPERATORS, sites

from cutex.compile import compile
from cutex.device.attention import tmem_rows
from cutex.device.attention.mask import Mask
from cutex.device.pipeline import Barrier, PairRing
from cutex.kernels.attention.forward.sm100 import mma, softmax
from cutex.kernels.attention.forward.sm100.config import Sm100Config
from cutex.kernels.attention.forward.sm100.forward import Forward
from cutex.kernels.attention.vote import Vote
from cutex.problem.attention.case import AttentionCase
from cutex.sim import SimError, simulate

SLOW = pytest.mark.slow
# one CTA for all tiles, so that leftovers of one reach the next
CONFIG = Sm100Config(
    head_dim=64, head_dim_v=64, causal=True, window=(True, False), tile_n=64, p_first=32, num_ctas=1
)
CASE = AttentionCase(
    seqlen_q=520, seqlen_k=330, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=64,
    causal=True, window=(150, None),
)  # fmt: skip
PAIR = replace(CONFIG, pair=True, dispatch="clc")
FALLING = replace(CASE, init="falling")
# pairs whose tiles may fail, by one CTA's rows alone
BOLD = replace(PAIR, causal=False, window=(False, False))
BOLD_CASE = replace(CASE, causal=False, window=(None, None))


def compiled(config: Sm100Config = CONFIG):
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


def test_the_unchanged_kernel_is_right(kernel):
    assert wrong(kernel, order="random", seed=1) is None


@SLOW
@pytest.mark.parametrize("config", [CONFIG, PAIR], ids=["one CTA", "pair"])
def test_the_unchanged_kernel_is_right_where_references_move(config):
    for order in ({}, {"order": "random", "seed": 2}, {"order": "starved"}, {"order": "peer-late"}):
        assert wrong(compiled(config), FALLING, config, **order) is None


# ---- faults in the program


def another_row(monkeypatch):
    """The lane quarter of another warp."""
    monkeypatch.setattr(tmem_rows, "LANES", 64)


def p_too_far(monkeypatch):
    """P written to columns where S is still to be read."""
    store = softmax.store_columns

    def further(tmem, column, values):
        store(tmem, column + 24, values)

    monkeypatch.setattr(softmax, "store_columns", further)


def late_scaling(monkeypatch):
    """O scaled after P V has been allowed to begin."""

    @cute.jit
    def step(self, n_block: Int32, state, kind: cutlass.Constexpr[str], masked):
        buffer, state = self.wait_scores(state)
        rescale = Boolean(False)
        if cutlass.const_expr(kind != "add"):
            highest = self.row.search(buffer * self.config.tile_n, n_block, masked)
            rescale = self.softmax.raise_references([highest], self.factors)
        self.exponentials(buffer, n_block, kind)
        if rescale & (state[0] > 1):
            self.scale_output(state)
        return state

    monkeypatch.setattr(softmax.RowLoop, "step", step)


def no_scaling(monkeypatch):
    """A scaling of O that is left out."""
    monkeypatch.setattr(softmax.RowLoop, "scale_output", lambda self, state: None)


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
    (another_row, CONFIG, CASE, True),
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


# ---- tiles that a pair computes again


def bold_inputs(row: int):
    """Blocks are taken from the last one down; only for `row` a key of the first has the largest
    score. Rows 0 to 127 of every 256 are the leader's."""
    inputs = BOLD_CASE.inputs()
    inputs.k[:, 5] = 24 * inputs.q[:, row]
    return inputs


@SLOW
def test_what_one_cta_of_a_pair_took_too_boldly_both_compute_again():
    kernel = compiled(BOLD)
    for row in (100, 200):
        for order in ({}, {"order": "random", "seed": row}, {"order": "peer-late"}):
            assert wrong(kernel, BOLD_CASE, BOLD, bold_inputs(row), **order) is None


@SLOW
def test_a_cta_that_does_not_hear_of_the_others_failure_is_found(monkeypatch):
    monkeypatch.setattr(Vote, "either", lambda self, failed, state: failed)
    assert wrong(compiled(BOLD), BOLD_CASE, BOLD, bold_inputs(200)) is not None


# ---- instructions that are left out


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
