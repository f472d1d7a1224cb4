"""Softmax with a scale and masks: right against float64, whatever the mask's shape and strides."""

from __future__ import annotations

import pytest
import torch
from row_calls import rows

import cutex
from cutex.ops.row.softmax_masked import _as_rows_of

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-19}


def wanted_of(x, scale=1.0, mask=None, causal=False, dim=-1):
    """In float64; a row of which nothing is left is 0."""
    s = x.double() * scale
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.double()
    if causal:
        q, n = x.shape[-2:]
        s = s.masked_fill(
            ~torch.ones(q, n, dtype=torch.bool, device=x.device).tril(n - q), -torch.inf
        )
    empty = (s == -torch.inf).all(dim, keepdim=True)
    return s.masked_fill(empty, 0).softmax(dim).masked_fill(empty, 0)


def near(found, wanted, dtype):
    bound = ROUNDING[dtype] * (wanted.abs() + 2**-6)
    assert ((found.double() - wanted).abs() <= bound).all()


# the shapes of x, and of masks that broadcast to it in each way
SHAPES = [
    ((2, 3, 4, 40), (2, 3, 4, 40)),
    ((2, 3, 4, 40), (4, 40)),
    ((2, 3, 4, 40), (2, 1, 4, 40)),
    ((2, 3, 4, 41), (2, 1, 1, 41)),
    ((2, 3, 4, 41), (3, 4, 1)),
    ((6, 100), (100,)),
    ((6, 264), ()),
]


@pytest.mark.sweep(96)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape, of_mask", SHAPES)
def test_masks_of_any_shape_and_their_gradients(device, shape, of_mask, kind, dtype):
    x = rows(device, shape, dtype).requires_grad_()
    mask = rows(device, of_mask, torch.float32, 1)
    mask = mask > -0.5 if kind == torch.bool else mask.to(kind)
    if mask.numel() > 8 and kind != torch.bool:
        mask.view(-1)[::3] = -torch.inf
    y = cutex.softmax(x, scale=0.7, mask=mask)
    near(y.detach(), wanted_of(x.detach(), 0.7, mask), dtype)
    dy = rows(device, shape, dtype, 2)
    y.backward(dy)
    own = y.detach().double()
    dx = 0.7 * own * (dy.double() - (own * dy.double()).sum(-1, keepdim=True))
    near(x.grad, dx, dtype)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("q, n", [(5, 40), (40, 24), (1, 9)])
def test_causal_is_aligned_to_the_last_row(device, q, n):
    x = rows(device, (2, q, n)).requires_grad_()
    y = cutex.softmax(x, causal=True, scale=-2.0)
    near(y.detach(), wanted_of(x.detach(), -2.0, causal=True), torch.float32)
    y.backward(rows(device, y.shape, seed=1))
    assert x.grad.isfinite().all() and x.grad[wanted_of(x.detach(), causal=True) == 0].eq(0).all()


def test_what_is_masked_is_never_seen(device):
    x = rows(device, (4, 24))
    mask = torch.ones(4, 24, dtype=torch.bool, device=device)
    x[0, 3], x[1, 5], x[2, 7] = torch.nan, torch.inf, -torch.inf
    mask[0, 3] = mask[1, 5] = False
    mask[3] = False  # nothing is left of this row
    x.requires_grad_()
    y = cutex.softmax(x, mask=mask)
    near(y.detach(), wanted_of(x.detach(), mask=mask), torch.float32)
    y.sum().backward()
    assert x.grad.isfinite().all() and y[3].eq(0).all()
    x = rows(device, (3, 3))
    x[0, 1:], x[1, 2] = torch.nan, torch.nan
    near(cutex.softmax(x, causal=True), wanted_of(x, causal=True), torch.float32)


def test_special_scores(device):
    x = torch.zeros(3, 16, device=device)
    x[0, 2], x[1, 4] = torch.nan, torch.inf
    y = cutex.softmax(x, scale=0.5)
    torch.testing.assert_close(y, (0.5 * x).softmax(-1), equal_nan=True)
    assert cutex.softmax(x[2:], scale=0.0).eq(1 / 16).all()
    x[2] = -torch.inf
    assert cutex.softmax(x[2:], scale=0.5).isnan().all()  # without a mask as torch's
    mask = torch.zeros(16, device=device)
    assert cutex.softmax(x[2:], mask=mask).eq(0).all()
    # far below the -inf of threads that have nothing else
    x[2], mask[:3], mask[4:] = -9000, -torch.inf, -torch.inf
    assert cutex.softmax(x[2:], mask=mask).tolist() == [[0.0] * 3 + [1.0] + [0.0] * 12]


def test_an_added_mask_has_a_gradient(device):
    x, mask = rows(device, (2, 3, 5, 24)), rows(device, (3, 1, 24), seed=1)
    wide = [t.double().requires_grad_() for t in (x, mask)]
    x.requires_grad_(), mask.requires_grad_()
    dy = rows(device, x.shape, seed=2)
    cutex.softmax(x, mask=mask, scale=3.0).backward(dy)
    (wide[0] * 3 + wide[1]).softmax(-1).backward(dy.double())
    torch.testing.assert_close(mask.grad.double(), wide[1].grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(x.grad.double(), wide[0].grad, atol=1e-5, rtol=1e-4)


def test_another_dim_and_strided_masks(device):
    x = rows(device, (5, 24, 3))
    mask = rows(device, (3, 24), seed=1).mT > 0
    near(cutex.softmax(x, 1, mask=mask), wanted_of(x, mask=mask, dim=1), torch.float32)
    x = rows(device, (6, 40))
    for mask in (rows(device, (40, 6), seed=1).mT, rows(device, (6, 81), seed=1)[:, 1::2]):
        near(cutex.softmax(x, mask=mask), wanted_of(x, mask=mask), torch.float32)
    assert cutex.softmax(x[:0], mask=mask[:1]).shape == (0, 40)


def test_a_mask_of_more_ways_than_the_kernel_counts():
    shape = torch.Size((2, 3, 4, 5, 6, 8))
    mask = torch.randn(2, 1, 4, 1, 6, 8)
    found = _as_rows_of(mask, shape)
    assert found.dim() == 4 and torch.equal(found.reshape(shape), mask.expand(shape))


@pytest.mark.parametrize("with_mask", [True, False])
def test_torch_compile_takes_it_whole(device, with_mask):
    x = rows(device, (4, 24)).requires_grad_()
    mask = rows(device, (24,), seed=1) > 0 if with_mask else None

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        return cutex.softmax(x, scale=0.5, mask=mask, causal=not with_mask)

    step(x).square().sum().backward()
    found, x.grad = x.grad, None
    cutex.softmax(x, scale=0.5, mask=mask, causal=not with_mask).square().sum().backward()
    assert torch.equal(found, x.grad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_100a", "sm_120a"])
def test_on_any_arch(name):
    with cutex.ops.simulated(name):
        x, mask = rows("cpu", (3, 2, 1000), torch.bfloat16), rows("cpu", (2, 1000), seed=1) > 0
        y = cutex.softmax(x, mask=mask, scale=0.5, causal=True)
        near(y, wanted_of(x, 0.5, mask, True), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("random", 1), ("starved", 0), ("peer-late", 0)])
def test_in_every_order_of_events(order, seed):
    with cutex.ops.simulated("sm_90a", order=order, seed=seed):
        x = rows("cpu", (3, 8200)).requires_grad_()  # CTAs share a row
        mask = rows("cpu", (8200,), seed=1) > 0
        y = cutex.softmax(x, mask=mask, scale=0.5)
        near(y.detach(), wanted_of(x.detach(), 0.5, mask), torch.float32)
        y.sum().backward()


BAD = [
    ({"mask": "x"}, TypeError, "mask must be a torch.Tensor, got str"),
    ({"mask": torch.zeros(8).long()}, TypeError, "mask must be of bfloat16, float16, float32"),
    ({"mask": torch.zeros(7)}, ValueError, r"mask has shape \(7,\), which does not broadcast"),
    ({"mask": torch.zeros(3, 2, 8)}, ValueError, "does not broadcast"),
    ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    ({"causal": True, "dim": 0}, ValueError, "causal=True takes x of at least 2 dimensions"),
    ({"scale": "1"}, TypeError, "scale must be a number, got str"),
]


@pytest.mark.parametrize("given, error, said", BAD)
def test_bad_input_is_one_sentence(given, error, said):
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=said) as found:
        cutex.softmax(torch.zeros(2, 8), **given)
    assert "\n" not in str(found.value)
