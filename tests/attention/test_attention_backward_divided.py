"""The work of a head of K and V, divided among CTAs: right, and a fault is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_attention_backward_mutations import (
    CONFIG,
    IN_ORDER,
    IN_ORDER_64,
    OWN,
    OWN_64,
    OWN_CASE,
    PACKED_CASE,
    ROTATED,
    wrong,
)

from cutex.device.kept_sums import KeptSums
from cutex.kernels.attention.backward.choose import fitted
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.tiles import HeadParts, Tile
from cutex.kernels.attention.spec import HEAD_DIMS


def divided(config: BackwardConfig) -> BackwardConfig:
    """Query heads that share keys are divided among CTAs, one head each."""
    return replace(config, head_parts=True, late_zeros=False, spread=False)


DIVIDED = {
    "causal": OWN,
    "head dim 64": OWN_64,
    "one order": IN_ORDER,
    "head dim 64, one order": IN_ORDER_64,
    "begun apart": replace(ROTATED, rotated=True),
    "dQ by its own warps": CONFIG,
    **{f"{d} with {dv} of v": fitted(BackwardConfig(head_dim=d, head_dim_v=dv, causal=True))
       for d, dv in HEAD_DIMS[1:] if (d, dv) != (128, 128)},
    "256, one order": fitted(BackwardConfig(head_dim=256, head_dim_v=256, deterministic=True)),
}  # fmt: skip


LAST = {
    f"{d} with {dv} of v": fitted(BackwardConfig(head_dim=d, head_dim_v=dv))
    for d, dv in HEAD_DIMS[1:]
    if (d, dv) != (128, 128)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAST)
def test_tiles_of_the_last_round_that_are_divided_are_right(name):
    """A round of two tiles, and four more in three parts each."""
    config = LAST[name]
    config = replace(config, last_parts=True, num_ctas=2 * config.key_ctas)
    keys = config.key_ctas * config.tile_n
    case = replace(OWN_CASE, seqlen_q=210, seqlen_k=2 * keys + 9, heads_q=4, heads_kv=2)
    case = replace(case, causal=False, head_dim=config.head_dim, head_dim_v=config.head_dim_v)
    assert config.why_not() is None and wrong(config, case=case, ranges=3) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_heads_that_are_divided_are_right(name):
    config = divided(DIVIDED[name])
    case = replace(OWN_CASE, seqlen_q=150, batch=2, heads_q=6, heads_kv=2)
    case = replace(case, head_dim=config.head_dim, head_dim_v=config.head_dim_v)
    case = replace(case, causal=config.causal)
    if config.window[0]:
        case = replace(case, window=(150, None))
    assert config.why_not() is None and wrong(config, case=case) is None


@pytest.mark.slow
@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("name", [n for n in DIVIDED if not DIVIDED[n].deterministic])
def test_queries_that_are_divided_are_right(name, heads_kv):
    """Three blocks of queries or more in two, and in seven ranges, some of which are empty."""
    config = divided(DIVIDED[name])
    case = replace(OWN_CASE, seqlen_q=210, seqlen_k=300, heads_q=2, heads_kv=heads_kv)
    case = replace(case, head_dim=config.head_dim, head_dim_v=config.head_dim_v)
    case = replace(case, causal=config.causal)
    if config.window[0]:
        case = replace(case, window=(150, None))
    assert wrong(config, case=case, ranges=2 if heads_kv == 1 else 7) is None


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_queries_of_packed_sequences_that_are_divided_are_right(dim):
    config = BackwardConfig(head_dim=dim, head_dim_v=dim, causal=True, varlen_q=True, varlen_k=True)
    config = replace(divided(fitted(config)), num_ctas=3)
    case = replace(PACKED_CASE, heads_q=2, head_dim=dim, head_dim_v=dim)
    assert wrong(config, case=case, ranges=3) is None


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["the first again", "one left out"])
def test_queries_that_are_divided_wrongly_are_found(monkeypatch, fault):
    own, more = Tile.own, fault == "the first again"

    def wrongly(self, blocks):
        right = own(self, blocks)
        return right._replace(first=blocks.first) if more else right._replace(end=right.end - 1)

    monkeypatch.setattr(Tile, "own", wrongly)
    case = replace(OWN_CASE, seqlen_q=260, seqlen_k=300)
    assert wrong(divided(OWN), case=case, ranges=2) is not None


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_heads_of_packed_sequences_that_are_divided_are_right(dim):
    config = BackwardConfig(head_dim=dim, head_dim_v=dim, causal=True, varlen_q=True, varlen_k=True)
    config = replace(divided(fitted(config)), num_ctas=3)
    case = replace(PACKED_CASE, heads_q=6, head_dim=dim, head_dim_v=dim)
    assert wrong(config, case=case) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "256 with 256 of v"])
@pytest.mark.parametrize("fault", ["no wait", "no reset", "not added", "others' place"])
def test_sums_of_a_part_that_are_passed_on_wrongly_are_found(monkeypatch, fault, name):
    if fault == "no wait":
        monkeypatch.setattr(KeptSums, "await_kept", lambda self: None)
    elif fault == "no reset":
        say = KeptSums.say
        monkeypatch.setattr(KeptSums, "say", lambda self, kept: say(self, 1))
    elif fault == "not added":
        monkeypatch.setattr(KeptSums, "add", lambda self, *of: self.say(0))
    else:
        share = HeadParts.share
        monkeypatch.setattr(HeadParts, "share", lambda *of: share(*of[:-1], of[-1] * 0))
    config = replace(divided(DIVIDED[name]), num_ctas=4)
    case = replace(OWN_CASE, heads_q=3, head_dim=config.head_dim, head_dim_v=config.head_dim_v)
    assert wrong(config, case=case) is not None
