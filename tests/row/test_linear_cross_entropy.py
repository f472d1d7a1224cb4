"""The last linear layer and its cross-entropy: right against float64, by chunks of any size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from row_calls import near as near_rounded
from row_calls import rows

import cutex
from cutex.kernels.row import choose_losses
from cutex.kernels.row.cross_entropy_in_place_bulk import InPlaceByTickets
from cutex.ops.row.linear_cross_entropy import LEAST_ROWS, LOGITS, Loss, _in_place, chunks

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-10}  # tf32
OPTIONS = [(0.0, 0.0), (0.1, 1e-2)]


def problem(device, m, n, k, dtype, seed=0):
    """x, w and target of small numbers, so that logits are exact before they are rounded."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (m, k), generator=g).to(dtype).to(device)
    w = (torch.randint(-4, 5, (n, k), generator=g) / 16).to(dtype).to(device)
    target = torch.randint(0, n, (m,), generator=g)
    target[1::4] = -100
    return x.requires_grad_(), w.requires_grad_(), target.to(device)


def losses_of(logits, target, smoothing, z_loss):
    plain = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    return plain + z_loss * logits.logsumexp(1) ** 2 * (target != -100)


def wanted_of(x, w, target, weights, smoothing=0.0, z_loss=0.0):
    """The losses of rows in float64, and the gradients of x and w where the losses have these
    weights: through logits, and their gradient, each as it is rounded."""
    dtype, x, w = x.dtype, x.detach().double(), w.detach().double()
    logits = (x @ w.T).to(dtype).double().requires_grad_()
    losses = losses_of(logits, target, smoothing, z_loss)
    (losses * weights.double()).sum().backward()
    g = logits.grad.to(dtype).double()
    return losses.detach(), g @ w, g.T @ x


def near(found, wanted, dtype, terms):
    error = (found.double() - wanted).abs()
    bound = ROUNDING[dtype] * (wanted.abs() + terms)
    assert bool((error <= bound).all()), float((error / bound).max())


@pytest.mark.sweep(144)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("smoothing, z_loss", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("m, n, k, chunk", [(10, 99, 40, 5), (13, 99, 40, 5), (9, 264, 16, None)])
def test_loss_and_gradients(device, m, n, k, chunk, reduction, smoothing, z_loss, dtype):
    x, w, target = problem(device, m, n, k, dtype)
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    loss = cutex.linear_cross_entropy(
        x, w, target, reduction=reduction, chunk_rows=chunk, **options
    )
    weights = torch.linspace(-1, 2, m, device=device)
    if reduction == "mean":
        weights = 1.0 / (target != -100).sum().expand(m)
    elif reduction == "sum":
        weights = torch.ones(m, device=device)
    losses, dx, dw = wanted_of(x, w, target, weights, smoothing, z_loss)
    if reduction == "none":
        torch.testing.assert_close(loss.double(), losses, rtol=1e-5, atol=1e-5)
        loss.backward(weights)
    else:
        total = (losses * weights.double()).sum()
        torch.testing.assert_close(loss.double(), total, rtol=1e-5, atol=1e-5)
        (3 * loss).backward()  # which the gradients are multiplied by in the end
        dx, dw = 3 * dx, 3 * dw
    near(x.grad, dx, dtype, float(dx.abs().max()))
    near(w.grad, dw, dtype, float(dw.abs().max()))


IN_PLACE = [
    (9, 2000, torch.bfloat16, "mean", 0.0, 1),
    (5, 20_008, torch.float16, "sum", 0.1, 2),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("m, n, dtype, reduction, smoothing, ctas", IN_PLACE)
def test_gradients_take_the_place_of_logits_by_bulk_copies(
    device, monkeypatch, asked, m, n, dtype, reduction, smoothing, ctas
):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies need a Hopper GPU")
    monkeypatch.setattr(choose_losses, "BULK_LEAST", 0)
    monkeypatch.setattr(choose_losses, "IN_PLACE", 1)
    x = rows(device, (m, n), dtype, scale=3.0)
    target = torch.arange(m, device=device) * 777 % n
    target[1], target[2], target[3] = n - 1, -100, n  # the last does not count, or is no class
    x[2, 5], x[4, : n // 2] = torch.inf, -torch.inf
    target[4] = n - 2
    wide, counts = x.double(), target != -100
    lse, places = wide.logsumexp(1), target.clamp(0, n - 1)
    wanted = (wide - lse[:, None]).exp() - smoothing / n
    wanted[torch.arange(m), places] -= 1 - smoothing
    loss = lse - (1 - smoothing) * wide[torch.arange(m), places]
    loss -= smoothing * wide.mean(1) if smoothing else 0
    count = counts.sum(dtype=torch.float32)[None]
    wanted /= count if reduction == "mean" else 1
    wanted[2], loss[2] = 0, 0
    found = torch.full((m,), torch.nan, device=device)
    _in_place(Loss(-100, smoothing, 0.0, reduction), x, target, found, count)
    assert asked[-1][0] is InPlaceByTickets and asked[-1][1].tile.ctas == ctas
    assert found[3].isnan() and x[3].isnan().all()
    right = [i for i in range(m) if i != 3]
    near_rounded(x[right], wanted[right], dtype)
    finite = [i for i in right if loss[i].isfinite()]
    assert len(finite) == m - 1 - (smoothing > 0)  # a mean of logits of which some are -inf
    near_rounded(found[finite], loss[finite], torch.float32, 64)


@pytest.mark.slow
def test_without_gradients_it_is_the_same_loss(device):
    x, w, target = problem(device, 7, 50, 24, torch.bfloat16)
    with torch.no_grad():
        alone = cutex.linear_cross_entropy(x, w, target, chunk_rows=4)
    torch.testing.assert_close(alone, cutex.linear_cross_entropy(x, w, target).detach())
    loss = cutex.linear_cross_entropy(x.detach(), w, target)
    loss.backward()
    assert x.grad is None and w.grad.isfinite().all()


@pytest.mark.slow
def test_strided_views_and_targets_of_int32(device):
    x, w, target = problem(device, 12, 64, 32, torch.bfloat16)
    tall = x.detach().mT.contiguous().mT.requires_grad_()
    wide = w.detach().repeat(2, 1)[::2].requires_grad_()
    every = target.int().repeat_interleave(2)[::2]
    cutex.linear_cross_entropy(tall, wide, every).backward()
    cutex.linear_cross_entropy(x, wide.detach(), target).backward()
    assert torch.equal(tall.grad, x.grad)


@pytest.mark.slow
def test_rows_that_are_ignored_give_nothing_whatever_they_hold(device):
    x, w, target = problem(device, 5, 40, 16, torch.bfloat16)
    with torch.no_grad():
        x[1] = 3e38  # of which the logits are infinite, or NaN
    cutex.linear_cross_entropy(x, w, target).backward()
    assert x.grad[1].eq(0).all() and w.grad.isfinite().all()
    x.grad = None
    loss = cutex.linear_cross_entropy(x, w, torch.full_like(target, -100))
    assert loss.isnan()  # as torch's mean of nothing
    loss.backward()
    assert cutex.linear_cross_entropy(x, w, torch.full_like(target, -100), reduction="sum") == 0


@pytest.mark.slow
def test_a_target_that_is_no_class_gives_nan(device):
    x, w, target = problem(device, 5, 40, 16, torch.bfloat16)
    target[0] = 40
    losses = cutex.linear_cross_entropy(x, w, target, reduction="none")
    assert losses.isnan().tolist() == [True, False, False, False, False]
    cutex.linear_cross_entropy(x, w, target).backward()
    assert x.grad.isnan().all(1).tolist() == [True, False, False, False, False]


@pytest.mark.slow
def test_a_graph_that_is_kept_is_gone_through_twice(device):
    x, w, target = problem(device, 5, 40, 16, torch.bfloat16)
    loss = cutex.linear_cross_entropy(x, w, target)
    (2 * loss).backward(retain_graph=True)
    first, x.grad = x.grad.clone(), None
    (2 * loss).backward()
    assert torch.equal(x.grad, first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
def test_torch_compile_takes_it_whole(device, reduction):
    x, w, target = problem(device, 6, 40, 16, torch.bfloat16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, w):
        return cutex.linear_cross_entropy(2 * x, w, target, reduction=reduction).sum()

    step(x, w).backward()
    found, x.grad = x.grad, None
    cutex.linear_cross_entropy(2 * x, w, target, reduction=reduction).sum().backward()
    assert torch.equal(found, x.grad)


def test_nothing_in_nothing_out(device):
    x, w, target = problem(device, 0, 40, 16, torch.bfloat16)
    assert cutex.linear_cross_entropy(x, w, target).isnan()
    loss = cutex.linear_cross_entropy(x, w, target, reduction="sum")
    loss.backward()
    assert loss == 0 and w.grad.eq(0).all() and x.grad.shape == (0, 16)
    losses = cutex.linear_cross_entropy(x, w, target, reduction="none")
    losses.sum().backward()
    assert losses.shape == (0,)


def test_gradients_are_given_without_a_copy_and_have_none_themselves(device):
    x, w, target = problem(device, 10, 99, 40, torch.bfloat16)  # by kernels of others here
    loss = cutex.linear_cross_entropy(x, w, target, chunk_rows=5)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(ValueError, match="is not differentiable"):
        g.float().sum().backward()
    made = []
    w.register_hook(lambda g: made.append(g.data_ptr()))
    loss.backward()
    assert made == [w.grad.data_ptr()]


@pytest.mark.slow
def test_sums_in_the_dtype_of_w_are_rounded_once_a_chunk(device):
    x, w, target = problem(device, 12, 40, 16, torch.bfloat16)
    options = {"reduction": "sum", "chunk_rows": 4}
    cutex.linear_cross_entropy(x, w, target, accum_dtype=w.dtype, **options).backward()
    narrow, w.grad = w.grad, None
    cutex.linear_cross_entropy(x, w, target, **options).backward()
    error = (narrow.float() - w.grad.float()).abs()
    assert 0 < error.max() <= 3 * 2**-8 * w.grad.abs().max()


@given(m=st.integers(1, 70_000), n=st.integers(1, 300_000), size=st.sampled_from([2, 4]))
@settings(max_examples=200, deadline=None)
@example(m=2817, n=45_591, size=4)  # just more than one chunk, which would be no smaller
def test_chunks_are_the_rows_and_their_logits_fit(m, n, size):
    dtype = torch.bfloat16 if size == 2 else torch.float32
    x, w = (torch.empty(rows, 8, dtype=dtype, device="meta") for rows in (m, n))
    parts = [*chunks(x, w, 0)]
    assert [i for p in parts for i in (p.start, p.stop)] == [
        0, *[p.stop for p in parts[:-1] for _ in range(2)], m,
    ]  # fmt: skip
    rows = max(p.stop - p.start for p in parts)
    assert rows <= LEAST_ROWS or rows * n * size <= LOGITS
    if [*chunks(x, w, 0, sums=True)] != parts:  # all at once takes no more memory
        assert m * size <= rows * size + 4 * w.shape[1]
    assert len({p.stop - p.start for p in parts[:-1]}) <= 1


@pytest.mark.slow
def test_on_a_blackwell_gpu_too():
    with cutex.ops.simulated("sm_100a"):
        x, w, target = problem("cpu", 10, 72, 32, torch.bfloat16)
        cutex.linear_cross_entropy(x, w, target, chunk_rows=6).backward()
        weights = 1.0 / (target != -100).sum().expand(10)
        _, dx, dw = wanted_of(x, w, target, weights)
        near(x.grad, dx, x.dtype, float(dx.abs().max()))
        near(w.grad, dw, x.dtype, float(dw.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("random", 1), ("starved", 0), ("peer-late", 0)])
def test_in_every_order_of_events(order, seed):
    with cutex.ops.simulated("sm_90a", order=order, seed=seed):
        x, w, target = problem("cpu", 5, 8300, 16, torch.bfloat16)  # CTAs share a row
        cutex.linear_cross_entropy(x, w, target, label_smoothing=0.1).backward()
        weights = 1.0 / (target != -100).sum().expand(5)
        _, dx, _ = wanted_of(x, w, target, weights, 0.1)
        near(x.grad, dx, x.dtype, float(dx.abs().max()))


class Stopped(torch.autograd.Function):
    """x, for which the backward pass has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return None


@pytest.mark.parametrize("linear", [False, True])
def test_a_loss_without_a_gradient_gives_none(device, linear):
    x, w, target = problem(device, 4, 24, 16, torch.float32)
    given = (x, w, target) if linear else (x @ w.T, target)
    loss = (cutex.linear_cross_entropy if linear else cutex.cross_entropy)(*given)
    other = torch.ones((), device=device, requires_grad=True)
    (Stopped.apply(loss) + other).backward()
    assert x.grad is None and w.grad is None and other.grad == 1


BAD = [
    ({"x": "x"}, TypeError, "x must be a torch.Tensor, got str"),
    ({"w": torch.zeros(3, 8).half()}, TypeError, "w is torch.float16, but x is torch.float32"),
    ({"w": torch.zeros(3, 9)}, ValueError, "w has K=9, but x has K=8"),
    ({"w": torch.zeros(0, 8)}, ValueError, "w has no rows"),
    ({"x": torch.zeros(2, 1, 8)}, ValueError, "x must be a matrix, got 3 dimensions"),
    ({"target": torch.zeros(3).long()}, ValueError, r"target must have shape \(2,\)"),
    ({"reduction": "x"}, ValueError, "is not one of mean, sum, none"),
    ({"label_smoothing": 2}, ValueError, "label_smoothing=2 must be from 0 to 1"),
    ({"accum_dtype": torch.float16}, ValueError, "accum_dtype=torch.float16 is not float32 or"),
    ({"chunk_rows": 0}, ValueError, "chunk_rows=0 must be at least 1"),
    ({"chunk_rows": 1.5}, TypeError, "chunk_rows must be an int or None, got float"),
]


@pytest.mark.parametrize("given, error, said", BAD)
def test_bad_input_is_one_sentence(given, error, said):
    fits = {"x": torch.zeros(2, 8), "w": torch.zeros(3, 8), "target": torch.zeros(2).long()}
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=said) as found:
        cutex.linear_cross_entropy(**(fits | given))
    assert "\n" not in str(found.value)


def test_without_such_a_gpu_it_says_what_to_do():
    with pytest.raises(ValueError, match=r"cutex\.linear_cross_entropy runs on a Hopper or Black"):
        cutex.linear_cross_entropy(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(2).long())
