"""Dense rows of any length that come as one run of memory: losses and softmax are right, whatever
lies beside them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from row_calls import DTYPES, ORDERS, launched, near, rows

import cutex
from cutex.compile import compile
from cutex.device.row.tile import RowTile
from cutex.kernels.row import choose
from cutex.kernels.row.cross_entropy_dense import CrossEntropyDense, DenseLossesConfig
from cutex.kernels.row.softmax_dense import DenseRowsConfig, SoftmaxDense
from cutex.sim import simulate

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
HOW = {  # threads of a row, rows of a CTA; columns
    "lanes": ((4, 16), 77),
    "a warp": ((32, 2), 301),
    "two warps": ((64, 2), 333),
    "whole vectors": ((8, 8), 64),
    "a CTA": ((512, 1), 20_001),
}
TURNS = {  # threads of a row, rows of a CTA at one time; columns; turns, whether rows are apart
    "rows of a thread": ((1, 64), 7, 4, False),
    "pairs": ((1, 32), 2, 3, False),
    "whole vectors": ((1, 64), 24, 1, False),
    "rows apart": ((4, 16), 129, 2, True),
    "two threads, apart": ((2, 64), 33, 1, True),
}


def tile_of(how, n, dtype, turns=1) -> tuple[RowTile, int]:
    """The tile of all rows of a CTA, and the words of a thread."""
    (threads, many), width = how, 16 // dtype.itemsize
    vectors = -(-(many * turns * n + width - 1) // (many * threads * width))
    per = width // 4
    return RowTile(many, threads, 1, vectors, width, False), -(-(n + per - 1) // (threads * per))


def dense(m, n, first, dtype, device) -> torch.Tensor:
    """Rows that begin `first` elements behind a vector, NaN around them."""
    whole = torch.full((m * n + 32,), torch.nan, dtype=dtype, device=device)
    return whole[first:][: m * n].view(m, n)


def logits(m, n, first, dtype, device) -> torch.Tensor:
    x = dense(m, n, first, dtype, device)
    x.copy_(rows(device, (m, n), dtype, scale=4.0))
    x[0] -= 3000
    x[0, : n // 2] = x[1, ::2] = -torch.inf  # threads that have nothing else
    x[::3][1:] = torch.nan  # rows that stay alone with it
    return x


def losses_of(device, kernel, x, smoothing=0.0, given=(), last=()) -> None:
    """Check a kernel's losses of x."""
    m, n = x.shape
    target = (torch.arange(m, device=device) * 7 + n - 1) % n
    target[2], target[4 % m] = -100, n
    lse, losses = torch.full((2, m), torch.nan, device=device)
    launched(kernel, device, x, target, lse, losses, *given, smoothing, 0.0, -100, *last)
    right = torch.ones(m, dtype=torch.bool, device=device)
    right[::3], right[4 % m], right[0] = False, False, True
    options = {"reduction": "none", "label_smoothing": smoothing}
    wanted = F.cross_entropy(x[right].double(), target[right], **options)
    found, finite = losses[right], wanted.isfinite()
    assert torch.equal(found[~finite].double(), wanted[~finite])
    near(found[finite], wanted[finite], torch.float32, 64)
    assert losses[~right & (target != -100)].isnan().all()
    near(lse[right], x[right].double().logsumexp(1), torch.float32, 64)


@pytest.mark.sweep(1000)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("m", [37, 5])
@pytest.mark.parametrize("apart", [3, 0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_dense_rows(device, how, m, apart, smoothing, dtype):
    tile, words = tile_of(*how, dtype)
    config = DenseLossesConfig(tile, smoothing > 0, "int64", words=words)
    kernel = compile(CrossEntropyDense(config), NAMES[dtype], "sm_90a")
    losses_of(device, kernel, logits(m, how[1], apart, dtype, device), smoothing)


@pytest.mark.sweep(200)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("m", [597, 5])
@pytest.mark.parametrize("apart", [3, 0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_dense_rows_in_turns(device, how, m, apart, smoothing, dtype):
    threads, n, turns, spread = how
    tile, words = tile_of(threads, n, dtype, turns)
    config = DenseLossesConfig(tile, smoothing > 0, "int64", words=words, turns=turns, apart=spread)
    kernel = compile(CrossEntropyDense(config), NAMES[dtype], "sm_90a")
    losses_of(device, kernel, logits(m, n, apart, dtype, device), smoothing)


@pytest.mark.parametrize("n", [7, 33, 129])
def test_rows_apart_are_all_rows(n):
    # of each CTA, every row is of one thread, or of neighbours
    for threads, rows_, turns in ((1, 64, 4), (2, 64, 2), (4, 32, 2), (4, 64, 1)):
        num = threads * rows_
        each = num // 32 * turns
        own = [t % 32 // threads * each + t // 32 * turns + turn
               for turn in range(turns) for t in range(0, num, threads)]  # fmt: skip
        assert sorted(own) == [*range(rows_ * turns)]


@pytest.mark.sweep(1000)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("m", [37, 3])
@pytest.mark.parametrize("apart", [3, 0])
def test_softmax_of_dense_rows(device, how, m, apart, dtype):
    n, (tile, words) = how[1], tile_of(*how, dtype)
    x, y = logits(m, n, apart, dtype, device), dense(m, n, apart, dtype, device)
    spread = tile.threads <= 32 and m > 3
    config = DenseRowsConfig(tile, words, 1, spread)
    kernel = compile(SoftmaxDense(config), NAMES[dtype], "sm_90a")
    launched(kernel, device, x, y)
    wanted = x.double().softmax(1)
    assert torch.equal(y.isnan(), wanted.isnan())
    near(y.nan_to_num(), wanted.nan_to_num(), dtype)


@pytest.mark.sweep(60)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("m", [597, 5])
@pytest.mark.parametrize("apart", [3, 0])
def test_softmax_of_dense_rows_in_turns(device, how, m, apart, dtype):
    threads, n, turns, spread = how
    tile, words = tile_of(threads, n, dtype, turns)
    x, y = logits(m, n, apart, dtype, device), dense(m, n, apart, dtype, device)
    config = DenseRowsConfig(tile, words, turns, spread)
    launched(compile(SoftmaxDense(config), NAMES[dtype], "sm_90a"), device, x, y)
    wanted = x.double().softmax(1)
    assert torch.equal(y.isnan(), wanted.isnan())
    near(y.nan_to_num(), wanted.nan_to_num(), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("n, dtype", [(333, torch.bfloat16), (77, torch.float32)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("function", ["losses", "softmax"])
def test_functions_of_dense_rows(
    device, none_are_few, asked, monkeypatch, function, reduction, n, dtype
):
    monkeypatch.setattr(choose, "DENSE_LEAST", 0)
    x = rows(device, (37, n), dtype, scale=4.0)
    if function == "softmax":
        near(cutex.softmax(x), x.double().softmax(1), dtype)
    else:
        target = torch.arange(37, device=device)
        wanted = F.cross_entropy(x.double(), target, reduction=reduction)
        near(cutex.cross_entropy(x, target, reduction=reduction), wanted, torch.float32, 64)
    ((kind, *_),) = asked
    assert kind in (CrossEntropyDense, SoftmaxDense)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_100a", "sm_120a"])
def test_on_any_arch(name, none_are_few, monkeypatch):
    monkeypatch.setattr(choose, "DENSE_LEAST", 0)
    with cutex.ops.simulated(name):
        x, target = rows("cpu", (9, 333), torch.bfloat16), torch.arange(9)
        near(cutex.softmax(x), x.double().softmax(1), torch.bfloat16)
        wanted = F.cross_entropy(x.double(), target, label_smoothing=0.1)
        near(cutex.cross_entropy(x, target, label_smoothing=0.1), wanted, torch.float32, 64)


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", ORDERS)
def test_in_every_order_of_events(order, seed):
    how, n = HOW["two warps"]
    tile, words = tile_of(how, n, torch.bfloat16)
    x = logits(5, n, 3, torch.bfloat16, "cpu")
    y, z = dense(5, n, 3, torch.bfloat16, "cpu"), dense(5, n, 3, torch.bfloat16, "cpu")
    kernel = compile(SoftmaxDense(DenseRowsConfig(tile, words)), "bf16", "sm_90a")
    simulate(kernel, x, y)
    assert not simulate(kernel, x, z, order=order, seed=seed).findings
    torch.testing.assert_close(y, z, rtol=0, atol=0, equal_nan=True)
