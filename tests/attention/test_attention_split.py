"""Hopper's forward where tiles are few, and each is split along its keys for several CTAs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cutlass import Boolean, Int32

from cutex.arch import arch
from cutex.compile import compile
from cutex.device.attention import merged_rows
from cutex.device.attention.merged_rows import MergedRows
from cutex.device.attention.row_stats import RowStats
from cutex.device.attention.split_row import PartPlace, within
from cutex.kernels.attention.forward.choose import fitted
from cutex.kernels.attention.forward.sm90 import split_out
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.forward import Forward
from cutex.kernels.attention.forward.sm90.load import Load
from cutex.kernels.attention.spec import AttentionSpec, Shape
from cutex.problem.attention.case import AttentionCase
from cutex.sim import SimError, simulate

# two tiles, of three parts each
CONFIG = Sm90ForwardConfig(
    head_dim=64, head_dim_v=64, tile_n=64, num_ctas=7, split=True, dispatch="one"
)
CASE = AttentionCase(
    seqlen_q=100, seqlen_k=700, heads_q=2, heads_kv=2, head_dim=64, head_dim_v=64, causal=False
)
CAUSAL = replace(CONFIG, causal=True), replace(CASE, causal=True)
ORDERS = ({}, {"order": "random", "seed": 1}, {"order": "random", "seed": 2}, {"order": "starved"})
# more tiles than CTAs, whose shares end anywhere
SHARES = replace(CONFIG, num_ctas=3), replace(CASE, heads_q=5, heads_kv=5)
OTHERS = {
    "shares": SHARES,
    "shares, causal": (replace(SHARES[0], causal=True), replace(SHARES[1], causal=True)),
    "shares of lengths": (
        replace(SHARES[0], causal=True, varlen_q=True, used_k=True),
        replace(SHARES[1], causal=True, batch=4, heads_q=2, heads_kv=1, lengths_q=(130, 0, 70, 5),
                used_k=(600, 700, 0, 90), tail=3),
    ),
    "causal": CAUSAL,
    "causal, parts without keys": (CAUSAL[0], replace(CAUSAL[1], seqlen_k=150)),
    "causal, rows without keys": (CAUSAL[0], replace(CAUSAL[1], seqlen_k=70)),
    "more parts than columns": (
        replace(CONFIG, num_ctas=23),
        replace(CASE, heads_q=1, heads_kv=1, seqlen_k=1500),
    ),
    "three warpgroups": (replace(CONFIG, tile_m=192, num_stages=4), replace(CASE, seqlen_q=150)),
    "both ends": (replace(CAUSAL[0], both_ends=True), CAUSAL[1]),
    "packed heads": (replace(CAUSAL[0], pack=2), replace(CAUSAL[1], heads_kv=1, seqlen_q=33)),
    "soft cap": (replace(CONFIG, softcap=True), replace(CASE, softcap=5.0)),
    "lengths": (
        replace(CONFIG, causal=True, varlen_q=True, varlen_k=True),
        replace(CASE, causal=True, batch=3, heads_q=1, heads_kv=1, lengths_q=(9, 0, 70),
                lengths_k=(300, 200, 90), tail=3),
    ),
    "keys that are used": (
        replace(CONFIG, used_k=True),
        replace(CASE, batch=2, heads_q=1, heads_kv=1, used_k=(500, 0)),
    ),
    "a smaller head dim": (CONFIG, replace(CASE, head_dim=40, head_dim_v=24)),
    "head dim 256": (
        replace(CONFIG, head_dim=256, head_dim_v=256, q_stages=1, o_parts=2, guards_all=True),
        replace(CASE, head_dim=256, head_dim_v=256),
    ),
}  # fmt: skip


def wrong(config, case, orders, inputs=None, dtype="bf16") -> str | None:
    """The error of the kernel of `config`, under the first order that shows one."""
    case = replace(case, dtype=dtype)
    inputs = case.inputs() if inputs is None else inputs
    forward = Forward(config)
    kernel = compile(forward, dtype, "sm_90a", cache=False)
    longest = (max(x) if x else y for x, y in (
        (case.lengths_q, case.seqlen_q), (case.lengths_k, case.seqlen_k)
    ))  # fmt: skip
    shape = Shape(case.batch, case.heads_q, case.heads_kv, *longest, case.seqlen_q)
    needs = config.workspace(shape)
    for order in orders:
        out, lse = case.outputs()
        given = {
            **dict(zip("qkv", inputs[:3], strict=True)),
            "o": out, "lse": lse, "parts": torch.full((needs.sums,), torch.nan),
            "counter": torch.zeros(needs.flags, dtype=torch.int32), "scale": case.softmax_scale,
            "softcap": case.softcap, "max_seqlen_q": shape.longest_q,
            **{x: getattr(inputs, x) for x in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")},
        }  # fmt: skip
        try:
            simulate(kernel, *(given[x.name] for x in forward.operands(dtype)), **order)
        except SimError as error:
            return str(error)
        found = case.check(inputs, out, lse)
        if not found.ok:
            return found.message
        if given["counter"].any():
            return f"the counters are {given['counter'].tolist()}, not zero as before"
    return None


def with_huge_keys(case: AttentionCase):
    """Inputs of which some parts fail at first, in other warps of each."""
    inputs = case.inputs()
    inputs.k[:, 37] *= 64
    inputs.k[:, 401] *= 32
    inputs.q[:, 20:40] *= 0.01
    return inputs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("init", ["normal", "falling", "sink", "huge"])
def test_a_split_tile_is_right_whatever_its_values(init, dtype):
    case = replace(CASE, dtype=dtype, init="normal" if init == "huge" else init)
    inputs = with_huge_keys(case) if init == "huge" else None
    assert wrong(CONFIG, case, ORDERS[:2] if inputs is None else ORDERS, inputs, dtype) is None


@pytest.mark.slow
def test_shares_whose_pieces_fail_at_first_are_right():
    assert wrong(*SHARES, ORDERS, with_huge_keys(SHARES[1])) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_tiles_of_every_kind_are_split(name):
    assert wrong(*OTHERS[name], ORDERS[:2]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["no wait", "no count", "other keys", "other weights", "alone", "all blocks", "one slot"],
)
def test_parts_that_are_merged_wrongly_are_found(monkeypatch, fault):
    (config, case), inputs, orders = (CONFIG, CASE), None, ORDERS[:2]
    if fault == "no wait":
        monkeypatch.setattr(MergedRows, "_await", lambda self: None)
    elif fault == "no count":
        monkeypatch.setattr(merged_rows, "is_last_arrival", lambda count, arrivals: Boolean(True))
    elif fault == "other keys":
        monkeypatch.setattr(Load, "behind", staticmethod(lambda n_block, part: n_block))
    elif fault == "other weights":
        monkeypatch.setattr(RowStats, "above", lambda self, other: self.r - other.r)
    elif fault == "alone":  # each warp goes on although others of its CTA have failed
        inputs, orders = with_huge_keys(CASE), ORDERS
        monkeypatch.setattr(split_out, "threads_where", lambda failed, *rest: Int32(failed))
    elif fault == "one slot":  # of a CTA that ends one tile and begins another
        config, case = SHARES
        monkeypatch.setattr(PartPlace, "slot", property(lambda self: self.first))
        monkeypatch.setattr(merged_rows, "slots_after", lambda part: part)
    else:
        monkeypatch.setattr(
            "cutex.kernels.attention.forward.sm90.compute.within", lambda blocks, word: blocks
        )
    assert wrong(config, case, orders, inputs) is not None


# ---- the choice


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "is_split"),
    [
        (Shape(1, 8, 8, 128, 16384, 128), True),
        (Shape(1, 32, 8, 32, 16384, 32), True),  # heads are packed
        (Shape(1, 8, 8, 128, 512, 128), False),  # too few keys
        (Shape(4, 32, 32, 128, 16384, 128), False),  # enough tiles
        (Shape(0, 8, 8, 128, 16384, 128), False),
    ],
)
def test_few_tiles_of_many_keys_are_split(shape, is_split, causal):
    card = arch("sm_90a")
    config = fitted(AttentionSpec(causal=causal), shape, card)
    assert config.split == is_split
    if is_split:
        assert config.why_not(None, card) is None


def test_many_dense_tiles_are_split_where_causal_rounds_leave_sms_idle():
    card = arch("sm_90a")
    for queries, is_split in ((640, True), (1024, False)):  # 1.2 rounds, and 1.9
        shape = Shape(1, 32, 8, queries, 12000, queries)
        for spec in (
            AttentionSpec(causal=True), AttentionSpec(), AttentionSpec(causal=True, varlen_q=True)
        ):  # fmt: skip
            alone = spec.causal and not spec.varlen_q
            assert fitted(spec, shape, card).split == (is_split and alone)


def test_heads_are_packed_where_tiles_would_be_partly_empty():
    card = arch("sm_90a")
    for queries, packed in ((304, 2), (690, 1), (1024, 1)):  # of 128 rows 5 tiles of 6, 11 of 12
        shape = Shape(1, 16, 8, queries, 9423, queries)
        for spec in (AttentionSpec(causal=True), AttentionSpec()):
            assert fitted(spec, shape, card).pack == packed
        # only the card knows how long these are
        assert fitted(AttentionSpec(causal=True, varlen_q=True), shape, card).pack == 1


def test_what_is_not_split():
    shape = Shape(1, 8, 8, 128, 16384, 128)
    for spec in (
        AttentionSpec(window=(True, False)), AttentionSpec(sink=True), AttentionSpec(alibi=True)
    ):  # fmt: skip
        assert not fitted(spec, shape, arch("sm_90a")).split


def test_within_is_a_part_of_the_blocks():
    from cutex.device.attention.block_info import ordered

    blocks = ordered(0, 9, 0, 7)
    for count in range(10):
        found = within(blocks, count)
        assert found == ordered(0, count, 0, min(count, 7))
