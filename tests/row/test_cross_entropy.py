"""Cross-entropy: right against float64, whatever the lengths, the targets and the grid."""

from __future__ import annotations

import random
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from row_calls import DTYPES, near, rows

import cutex
from cutex.compile import compile
from cutex.device.row.tile import RowTile
from cutex.kernels.row import choose
from cutex.kernels.row.cross_entropy import CrossEntropy, CrossEntropyConfig
from cutex.kernels.row.cross_entropy_in_turns import CrossEntropyInTurns
from cutex.ops.row import launches
from cutex.sim import simulate

cross_entropy_module = import_module("cutex.ops.row.cross_entropy")


@pytest.mark.sweep(48)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 99, 1000])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 1e-2)])
def test_cross_entropy_and_its_gradient(device, n, dtype, smoothing, z_loss):
    x = rows(device, (6, n), dtype, scale=3.0).requires_grad_()
    target = torch.tensor([0, n - 1, -100, n // 2, 1, 0], device=device)
    wide = x.detach().double().requires_grad_()
    plain = F.cross_entropy(wide, target, reduction="none", label_smoothing=smoothing)
    wanted = plain + z_loss * wide.logsumexp(1) ** 2 * (target != -100)
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    loss = cutex.cross_entropy(x, target, reduction="none", **options)
    near(loss.detach(), wanted.detach(), torch.float32, 64)
    total = cutex.cross_entropy(x, target.int(), **options)
    near(total.detach(), wanted.detach().sum() / 5, torch.float32, 64)
    total += 1  # as torch's own loss, in place
    total.backward()
    (wanted.sum() / 5).backward()
    near(x.grad, wide.grad, dtype)


@pytest.mark.parametrize("scale", [2e37, -2e37])
def test_smoothed_losses_of_logits_whose_sum_overflows(device, scale):
    x = rows(device, (6, 99), torch.float32).abs().clamp(0.5, 2) * scale
    assert x.sum(1).isinf().all()
    x[1, 7] = -torch.inf
    target = torch.tensor([0, 98, -100, 50, 1, 0], device=device)
    options = {"reduction": "none", "label_smoothing": 0.1}
    wanted = F.cross_entropy(x.double(), target, **options)
    found, finite = cutex.cross_entropy(x, target, **options), wanted.isfinite()
    assert finite.tolist() == [True, False, *[True] * 4] and found[1] == wanted[1] == torch.inf
    near(found[finite], wanted[finite], torch.float32, 64)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("far", [3e3, -1e5, 1e7, 2e9, 3e38])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_logits_far_from_zero(device, smoothing, far):
    x = far + (rows(device, (6, 99)) * 8).round() * max(1, abs(far) * 2**-23)
    target = torch.tensor([0, 98, -100, 50, 1, 0], device=device)
    options = {"reduction": "none", "label_smoothing": smoothing}
    wanted = F.cross_entropy(x.double(), target, **options)
    # what the logarithm of a sum would lose if it was added to a maximum of 3000 is 1.2e-4
    terms = 64 + abs(far) * smoothing
    near(cutex.cross_entropy(x, target, **options), wanted, torch.float32, terms)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("n, aligned", [(1000, True), (1001, False)])
@pytest.mark.parametrize("smoothed", [False, True])
def test_cross_entropy_that_walks_along_a_row(n, aligned, smoothed):
    tile = RowTile(1, 32, 1, 1, 8, aligned)
    kernel = CrossEntropy(CrossEntropyConfig(tile, smoothed, walks=True))
    x, target = rows("cpu", (3, n), torch.bfloat16, scale=3.0), torch.tensor([0, n - 1, -100]).int()
    x[0, 700], x[1, :600] = 50, -torch.inf  # maxima that come late
    x[1] = x[1] if not smoothed else 1
    lse, losses = torch.full((2, 3), torch.nan)
    simulate(compile(kernel, "bf16", "sm_90a"), x, target, lse, losses, 0.1 * smoothed, 0.0, -100)
    options = {"reduction": "none", "label_smoothing": 0.1 * smoothed}
    near(losses, F.cross_entropy(x.double(), target.long(), **options), torch.float32, 64)
    near(lse, x.double().logsumexp(1), torch.float32, 64)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_many_losses_are_added_up_by_many_ctas(device, monkeypatch, reduction):
    monkeypatch.setattr(cross_entropy_module, "MANY", 4)
    x = rows(device, (5003, 7), torch.float32)
    target = torch.arange(5003, device=device) % 7
    target[::3] = -100
    found = cutex.cross_entropy(x, target, reduction=reduction)
    near(found, F.cross_entropy(x.double(), target, reduction=reduction), torch.float32, 64)


def test_a_target_that_is_no_class_gives_nan(device):
    x = rows(device, (3, 50), torch.float32).requires_grad_()
    target = torch.tensor([50, 3, 2**40], device=device)
    loss = cutex.cross_entropy(x, target, reduction="none")
    assert loss.isnan().tolist() == [True, False, True]
    loss.nansum().backward()
    assert not x.grad[1].isnan().any()


def test_few_losses_are_added_up_by_the_cta_that_ends_last(device, monkeypatch):
    # a captured launch counts in words that lie anywhere, and leaves them zeroed
    words = torch.zeros(5, dtype=torch.int32, device=device)
    monkeypatch.setattr(launches, "flags_of", lambda *_: lambda: words[1:2])
    monkeypatch.setattr(choose, "losses_in_cluster", lambda *_: None)
    x, target = rows(device, (300, 40), torch.bfloat16), torch.arange(300, device=device) % 40
    target[7] = -100
    for reduction in ("mean", "sum", "mean"):
        found = cutex.cross_entropy(x, target, z_loss=0.0, reduction=reduction)
        wanted = F.cross_entropy(x.double(), target, reduction=reduction)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
        assert not words.any()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("m, n", [(1, 40), (19, 333), (70, 64)])
def test_few_losses_are_added_up_by_a_cluster(device, asked, m, n, smoothing):
    x, target = rows(device, (m, n), torch.bfloat16), torch.arange(m, device=device) % n
    target[1::3] = -100
    options = {"label_smoothing": smoothing}
    for reduction in ("mean", "sum"):
        found = cutex.cross_entropy(x, target, reduction=reduction, **options)
        wanted = F.cross_entropy(x.double(), target, reduction=reduction, **options)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    assert {kind.__name__ for kind, *_ in asked} == {"LossInCluster"}


def test_a_cluster_has_all_rows_of_losses_whole():
    rng, taken = random.Random(0), 0
    for _ in range(4000):
        m, n = (round(2 ** rng.uniform(0, 18)) for _ in range(2))
        unit, largest = rng.choice((1, 2, 4, 8)), rng.choice((8, 16))
        if (found := choose.losses_in_cluster(m, n, unit, "sm_90a", largest)) is not None:
            tile, ctas = found
            assert tile.why_not() is None and ctas <= largest
            assert tile.rows * ctas >= m and tile.columns >= n, (m, n, unit, found)
            taken += 1
    assert taken > 400


@pytest.mark.sweep(9)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("n, aligned", [(1000, True), (1001, False), (100, False)])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_ctas_that_stay_draw_the_rows_along_which_they_walk(groups, n, aligned, reduction):
    tile = RowTile(1, 32, 1, 1, 8, aligned)
    config = CrossEntropyConfig(tile, reduction == "mean", "int32", reduction, True)
    x, target = rows("cpu", (5, n), torch.bfloat16, scale=3.0), torch.tensor([0, n - 1, -100, 2, 9])
    x[0, 70], x[1, :60] = 50, -torch.inf  # maxima that come late
    x[1] = x[1] if reduction == "none" else 1
    lse, losses = torch.full((2, 5), torch.nan)
    totals, drawn = torch.full((2, 1), torch.nan), torch.zeros(1, dtype=torch.int32)
    s = 0.1 * (reduction == "mean")
    given = x, target.int(), lse, losses, *(totals if reduction == "mean" else ()), drawn
    compiled = compile(CrossEntropyInTurns(config), "bf16", "sm_90a")
    for _ in range(2):
        simulate(compiled, *given, groups, s, 0.0, -100)
        assert not drawn.any()
    wanted = F.cross_entropy(x.double(), target, reduction="none", label_smoothing=s)
    near(losses, wanted, torch.float32, 64)
    near(lse, x.double().logsumexp(1), torch.float32, 64)
    if reduction == "mean":
        near(totals[0], wanted.sum().view(1) / 4, torch.float32, 64)


@pytest.mark.gpu
def test_a_graph_of_cross_entropies_is_replayed():
    x = torch.randn(64, 1000, device="cuda").bfloat16()
    target = torch.randint(0, 1000, (64,), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cutex.cross_entropy(x, target)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = [cutex.cross_entropy(x, target) for _ in range(9)]
    for seed in range(3):
        x.copy_(torch.randn(64, 1000, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        wanted = F.cross_entropy(x.double(), target)
        for y in found:
            torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_cross_entropy_of_more_rows_than_a_grid_has_in_y():
    x = torch.randn(70_000, 4200, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(0, 4200, (70_000,), device="cuda")
    cutex.cross_entropy(x, target, reduction="sum").backward()
    wanted = x.detach()[-9:].float().softmax(-1) - F.one_hot(target[-9:], 4200)
    near(x.grad[-9:], wanted.double(), torch.bfloat16)


def test_a_long_row_is_walked_along_where_there_are_many(device, monkeypatch):
    monkeypatch.setattr(cross_entropy_module, "WALKERS", 0)
    x = rows(device, (2, 8300), torch.bfloat16, scale=3.0)
    target = torch.tensor([8299, 4], device=device)
    wanted = F.cross_entropy(x.double(), target)
    near(cutex.cross_entropy(x, target), wanted, torch.float32, 64)
