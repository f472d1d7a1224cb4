"""Hopper's forward where the tiles of the last round are cut along their keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cutlass import cute

from cutex.compile import compile
from cutex.device.attention.kept_rows import KeptRows
from cutex.device.attention.row_stats import log2_of_ratio, log2_terms
from cutex.device.kept_sums import KeptSums
from cutex.kernels.attention.forward.config import COUNTER
from cutex.kernels.attention.forward.sm90 import parts
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.forward import Forward
from cutex.kernels.attention.forward.sm90.load import Load
from cutex.kernels.attention.spec import Shape
from cutex.problem.attention.case import AttentionCase
from cutex.sim import SimError, simulate
from cutex.sim.isa import floating

# three tiles for one CTA each, and one that is cut into three parts
CONFIG = Sm90ForwardConfig(head_dim=64, head_dim_v=64, tile_n=64, num_ctas=3, spread=True)
CASE = AttentionCase(
    seqlen_q=200, seqlen_k=700, heads_q=2, heads_kv=2, head_dim=64, head_dim_v=64, causal=False
)
ORDERS = ({}, {"order": "random", "seed": 1}, {"order": "random", "seed": 2}, {"order": "starved"})
OTHERS = {
    "a part of two tiles": (CONFIG, replace(CASE, batch=2, heads_q=1, heads_kv=1, seqlen_q=400)),
    "one tile": (CONFIG, replace(CASE, heads_q=1, heads_kv=1, seqlen_q=70)),
    "pairs": (replace(CONFIG, share=True, tile_m=256, num_ctas=6), replace(CASE, seqlen_q=400)),
    "three warpgroups": (replace(CONFIG, tile_m=192, num_stages=4), replace(CASE, seqlen_q=300)),
    "both ends": (replace(CONFIG, both_ends=True), CASE),
    "head dim 256": (
        replace(CONFIG, head_dim=256, head_dim_v=256, q_stages=1, o_parts=2, guards_all=True),
        replace(CASE, head_dim=256, head_dim_v=256),
    ),
}


@pytest.fixture(autouse=True)
def short_shares(monkeypatch):
    """Cuts where they would not pay, so that few keys have several parts."""
    monkeypatch.setattr(parts, "LEAST", 1)
    monkeypatch.setattr(parts, "COST", dict.fromkeys(parts.COST, 0))


def sizes(case: AttentionCase) -> Shape:
    heads = case.heads_q, case.heads_kv
    return Shape(case.batch, *heads, case.seqlen_q, case.seqlen_k, case.seqlen_q)


def wrong(config, case, orders, inputs=None, dtype="bf16") -> str | None:
    """The error of the kernel of `config`, under the first order that shows one."""
    case = replace(case, dtype=dtype)
    inputs = case.inputs() if inputs is None else inputs
    kernel = compile(Forward(config), dtype, "sm_90a", cache=False)
    needs = config.workspace(sizes(case))
    assert needs.flags > COUNTER
    for order in orders:
        out, lse = case.outputs()
        counter = torch.zeros(needs.flags, dtype=torch.int32)
        kept = torch.full((needs.sums,), torch.nan)
        try:
            simulate(kernel, *inputs[:3], out, lse, counter, kept, case.softmax_scale, **order)
        except SimError as error:
            return str(error)
        found = case.check(inputs, out, lse)
        if not found.ok:
            return found.message
        if counter.any():
            return f"the counter is {counter.tolist()}, not zero as before"
    return None


def with_huge_keys(case: AttentionCase):
    """Inputs of which some parts of the cut tile fail, at either end of it."""
    inputs = case.inputs()
    inputs.k[:, 37] *= 64
    inputs.k[:, 401] *= 32
    return inputs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("init", ["normal", "falling", "sink", "huge"])
def test_a_cut_tile_is_right_whatever_its_values(init, dtype):
    case = replace(CASE, dtype=dtype, init="normal" if init == "huge" else init)
    inputs = with_huge_keys(case) if init == "huge" else None
    assert wrong(CONFIG, case, ORDERS, inputs, dtype) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_tiles_of_every_kind_are_cut(name):
    assert wrong(*OTHERS[name], ORDERS[:2]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["no wait", "no reset", "not added", "other keys", "other weights"]
)
def test_parts_that_are_passed_on_wrongly_are_found(monkeypatch, fault):
    if fault == "no wait":
        monkeypatch.setattr(KeptSums, "await_kept", lambda self: None)
    elif fault == "no reset":
        say = KeptSums.say
        monkeypatch.setattr(KeptSums, "say", lambda self, kept: say(self, kept or 1))
    elif fault == "not added":
        monkeypatch.setattr(KeptRows, "_add", lambda self, kept: None)
    elif fault == "other keys":
        monkeypatch.setattr(Load, "behind", staticmethod(lambda n_block, part: n_block))
    else:
        monkeypatch.setattr(KeptRows, "_weigh", halves)
    assert wrong(CONFIG, CASE, ORDERS[:2]) is not None


@cute.jit
def halves(self, others: cute.Tensor, shares: cute.Tensor) -> None:
    shares.fill(0.5)


@cute.kernel
def sum_up(mSums: cute.Tensor, mOne: cute.Tensor, mOfParts: cute.Tensor):
    """log2 of sums, and the same of what precedes each with what the rest adds to it."""
    i, _, _ = cute.arch.thread_idx()
    mOne[i] = sum_of(log2_terms(mSums[i + 1]))
    mOfParts[i] = sum_of(log2_terms(mSums[i])) + log2_of_ratio(mSums[i + 1], mSums[i])


def sum_of(terms):
    return terms[0] + terms[1]


@cute.jit
def sum_all_up(mSums: cute.Tensor, mOne: cute.Tensor, mOfParts: cute.Tensor):
    sum_up(mSums, mOne, mOfParts).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_an_error_of_log2_counts_once_however_many_parts_there_are(monkeypatch):
    monkeypatch.setitem(floating._UNARY, "lg2", lambda x: np.log2(x) + 0.01 * np.sin(40 * x))
    sums = torch.linspace(1, 4, 33)
    sums[20] = sums[19]
    one, of_parts = torch.full((32,), torch.nan), torch.full((32,), torch.nan)
    simulate(sum_all_up, sums, one, of_parts, arch="sm_90a")
    assert (one - sums[1:].log2()).abs().max() > 5e-3
    assert (of_parts - one).abs().max() < 1e-6
    assert of_parts[19] == one[18]
