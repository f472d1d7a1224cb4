"""Histograms: exact counts, whatever the data, in any order of CTAs."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from row_calls import rows

import cutex


def wanted_of(x, bins, low, high):
    """By its definition, in float32."""
    x = x.float().flatten()
    x = x[(x >= low) & (x <= high)]
    scale = torch.tensor(bins / (high - low), dtype=torch.float32, device=x.device)
    at = ((x - torch.tensor(low, dtype=torch.float32, device=x.device)) * scale).long()
    return torch.bincount(at.clamp(max=bins - 1), minlength=bins)


@pytest.mark.sweep(18)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape, bins", [((7, 999), 10), ((20_003,), 256)])
def test_counts_are_exact(device, shape, bins, dtype):
    x = rows(device, shape, dtype)
    found = cutex.histogram(x, bins, low=-2.0, high=3.0)
    assert found.dtype == torch.int64 and torch.equal(found, wanted_of(x, bins, -2.0, 3.0))


@pytest.mark.usefixtures("none_are_few")
def test_ctas_of_a_grid_add_up_their_counts(device):
    x = rows(device, (20_007,), torch.bfloat16)
    assert torch.equal(cutex.histogram(x, 256, low=-2, high=3), wanted_of(x, 256, -2.0, 3.0))


def test_ends_nans_and_one_bin_for_all(device):
    nan, inf = torch.nan, torch.inf
    x = torch.tensor([0.0, 1.0, 2.0, 2.5, 4.0, 4.1, -0.1, nan, inf, -inf], device=device)
    assert cutex.histogram(x, 4, low=0, high=4).tolist() == [1, 1, 2, 1]
    hot = torch.full((9001,), 1.5, device=device)
    assert cutex.histogram(hot, 3, low=0, high=3).tolist() == [0, 9001, 0]
    assert cutex.histogram(hot[:0], 3, low=0, high=3).tolist() == [0, 0, 0]


def test_vectors_with_gaps_and_of_one_element_again(device):
    x = torch.linspace(0, 1, 90, device=device)
    for view in (x[::3], x[:1].expand(50), x[5:80:2]):
        assert torch.equal(cutex.histogram(view, 4, low=0, high=1), wanted_of(view, 4, 0, 1))


def test_more_elements_than_a_launch_counts(device, monkeypatch):
    monkeypatch.setattr(import_module("cutex.ops.row.histogram"), "COLUMNS", 80)
    monkeypatch.setattr(import_module("cutex.ops.row.histogram"), "PIECE", 40)
    x = torch.linspace(0, 1, 90, device=device)
    assert torch.equal(cutex.histogram(x, 4, low=0, high=1), wanted_of(x, 4, 0, 1))


@pytest.mark.slow
def test_more_bins_than_smem_has_and_strided_views(device):
    x = rows(device, (40, 50))
    for view in (x.mT, x[:, 3:40], x[::2, ::3]):
        assert torch.equal(
            cutex.histogram(view, 9000, low=-3, high=3), wanted_of(view, 9000, -3, 3)
        )


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("random", 1), ("starved", 0)])
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_100a"])
def test_on_any_arch_in_any_order(name, order, seed):
    with cutex.ops.simulated(name, order=order, seed=seed):
        x = rows("cpu", (20_003,), torch.bfloat16)
        assert torch.equal(cutex.histogram(x, 64, low=-2, high=2), wanted_of(x, 64, -2, 2))


BAD = [
    ({"x": 3}, TypeError, "x must be a torch.Tensor, got int"),
    ({"bins": 2.0}, TypeError, "bins must be an int, got float"),
    ({"bins": 0}, ValueError, "bins=0 must be from 1 to"),
    ({"low": 1, "high": 1}, ValueError, "low=1, high=1: must be finite, the first the smaller"),
    ({"high": float("inf")}, ValueError, "must be finite"),
]


@pytest.mark.parametrize("given, error, said", BAD)
def test_bad_input_is_one_sentence(given, error, said):
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=said) as found:
        cutex.histogram(**({"x": torch.zeros(8), "bins": 4, "low": 0, "high": 4} | given))
    assert "\n" not in str(found.value)
