"""Preprocess, main and convert, each of which begins while the kernel before it ends: a wait that
is left out is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_attention_backward_mutations import OWN, OWN_CASE, PACKED, PACKED_CASE, wrong

from cutex.kernels.attention.backward import rows
from cutex.kernels.attention.backward.choose import fitted
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90 import backward, shared

ONE_TILE = fitted(BackwardConfig(head_dim=96, head_dim_v=96))
LEFT_OUT = {
    "convert": (rows, ONE_TILE),
    "convert, 192": (rows, fitted(BackwardConfig(head_dim=192, head_dim_v=192))),
    "main": (backward, OWN),
    "main, packed": (backward, PACKED),
    "main's loads": (shared, ONE_TILE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_kernel_that_does_not_wait_for_the_one_before_is_found(monkeypatch, name):
    module, config = LEFT_OUT[name]
    dims = {"head_dim": config.head_dim, "head_dim_v": config.head_dim_v}
    case = PACKED_CASE if config.ranked else replace(OWN_CASE, causal=config.causal, **dims)
    monkeypatch.setattr(module, "await_kernel_before", lambda: None)
    assert "launched before it" in (wrong(config, case=case) or "")


def test_main_loads_keys_before_it_waits_where_it_knows_its_first_tile():
    assert ONE_TILE.keys_first
    assert not OWN.keys_first  # zeros of its first tiles are another CTA's
    assert replace(OWN, late_zeros=False).keys_first
    assert not PACKED.keys_first
