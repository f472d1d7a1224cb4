"""ALiBi slopes, as flash-attn 2 has them: forward and backward, per head and per batch entry."""

from __future__ import annotations

import pytest
import torch

import cutex
from cutex.arch import local_arch
from cutex.ops.attention import definition, eager, planned
from cutex.ops.attention.own_backward import why_not

SLOW = pytest.mark.slow


@pytest.fixture(params=["sm_90a", pytest.param("sm_100a", marks=SLOW)])
def device(request):
    here = local_arch()
    if here is not None and here.name == request.param:
        yield "cuda"
        return
    with cutex.ops.simulated(request.param):
        yield "cpu"


def normal(device, *shape, seed=0, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(dtype).to(device)


def slopes_of(batch, heads, device):
    """Slopes from nothing to what hides all but the nearest keys."""
    g = torch.Generator().manual_seed(9)
    return (torch.rand(batch, heads, generator=g) ** 3 * 2).to(device)


def by_definition(q, k, v, slopes, causal=False, window=(None, None), softcap=0.0):
    """O (rows, heads, D) and LSE (heads, rows) of one sequence, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    place = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - k.shape[1] + q.shape[1]
    place = place.to(q.device)
    scores = scores - slopes.double()[:, None, None] * place.abs()
    left, right = window[0], 0 if causal else window[1]
    if left is not None:
        scores = scores.masked_fill(place < -left, -torch.inf)
    if right is not None:
        scores = scores.masked_fill(place > right, -torch.inf)
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen, 0.0)
    return (p @ v).transpose(0, 1), scores.logsumexp(-1)


CASES = {
    "full": {"rows": (70, 200)},
    "causal": {"rows": (150, 150), "causal": True},
    "decode": {"rows": (1, 300), "causal": True},
    "more queries than keys": {"rows": (140, 60), "causal": True},
    "window": {"rows": (130, 260), "window": (40, 9)},
    "softcap": {"rows": (64, 190), "softcap": 5.0},
    "hd128": {"rows": (129, 257), "dims": (128, 128)},
    "hd192/128": {"rows": (129, 129), "dims": (192, 128), "causal": True},
    "hd256": {"rows": (129, 129), "dims": (256, 256)},
    "hd80": {"rows": (40, 90), "dims": (80, 40), "dtype": torch.float16},
}


@pytest.mark.parametrize("device", ["sm_90a", "sm_100a"], indirect=True)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_scores_fall_with_the_distance_from_the_diagonal(device, name):
    options = dict(CASES[name])
    rows, (d, dv) = options.pop("rows"), options.pop("dims", (64, 64))
    kind = {"dtype": options.pop("dtype", torch.bfloat16)}
    q, k, v = (
        normal(device, 2, n, h, x, seed=i, **kind)
        for i, (n, h, x) in enumerate(((rows[0], 4, d), (rows[1], 2, d), (rows[1], 2, dv)))
    )
    slopes = slopes_of(2, 4, device)
    given = dict(options)
    if "window" in given:
        given["window_size"] = given.pop("window")
    out, lse = cutex.flash_attn_func(q, k, v, alibi_slopes=slopes, return_lse=True, **given)
    for b in range(2):
        want, want_lse = by_definition(q[b], k[b], v[b], slopes[b], **options)
        torch.testing.assert_close(out[b].double(), want, rtol=0.02, atol=0.01)
        torch.testing.assert_close(lse[b].double(), want_lse, rtol=1e-4, atol=2e-3)


@pytest.mark.slow
def test_packed_sequences_have_slopes_each_or_for_all(device):
    lengths = (30, 0, 101)
    ends = torch.tensor([0, 30, 30, 131], dtype=torch.int32, device=device)
    q, k, v = (normal(device, 131, h, 64, seed=h) for h in (4, 4, 4))
    of_each = slopes_of(3, 4, device)
    for slopes in (of_each, of_each[0]):
        out = cutex.flash_attn_varlen_func(
            q, k, v, ends, ends, 101, 101, causal=True, alibi_slopes=slopes
        )
        first = 0
        for b, n in enumerate(lengths):
            rows = slice(first, first + n)
            mine = slopes[b] if slopes.dim() == 2 else slopes
            want, _ = by_definition(q[rows], k[rows], v[rows], mine, causal=True)
            torch.testing.assert_close(out[rows].double(), want, rtol=0.02, atol=0.01)
            first += n


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("chunk", [2**26, pytest.param(3000, marks=SLOW)])
def test_gradients_are_those_of_float64(device, causal, chunk, monkeypatch):
    monkeypatch.setattr(definition, "CHUNK", chunk)
    q, k, v = (normal(device, 1, n, h, 64, seed=h) for n, h in ((50, 4), (90, 2), (90, 2)))
    slopes, g = slopes_of(1, 4, device), normal(device, 1, 50, 4, 64, seed=7)
    graded = [x.clone().requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(
        cutex.flash_attn_func(*graded, causal=causal, alibi_slopes=slopes[0]), graded, g
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = by_definition(*(x[0] for x in exact), slopes[0], causal=causal)
    for x, y in zip(found, torch.autograd.grad(out, exact, g[0].double()), strict=True):
        assert (x.double() - y).norm() < 0.01 * y.norm()


@pytest.mark.slow
def test_a_later_call_has_its_own_slopes():
    """The plan that a call leaves is of any slopes of that shape."""
    with cutex.ops.simulated("sm_90a"):
        planned.forget()
        shapes = ((70, 4), (200, 2), (200, 2))  # those of "full", for its kernel
        q, k, v = (normal("cpu", 1, *x, 64, seed=i) for i, x in enumerate(shapes))
        for slopes in torch.tensor([[0.0, 1.0, 0.2, 0.0], [0.5, 0.0, 0.0, 2.0]]):
            out, _ = cutex.flash_attn_func(q, k, v, alibi_slopes=slopes, return_lse=True)
            want, _ = by_definition(q[0], k[0], v[0], slopes)
            torch.testing.assert_close(out[0].double(), want, rtol=0.02, atol=0.01)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("slopes", "error", "says"),
    [
        ([0.1, 0.2], TypeError, "alibi_slopes must be a torch.Tensor, got list"),
        (torch.ones(2).bfloat16(), TypeError, "alibi_slopes has dtype torch.bfloat16"),
        (torch.ones(3), ValueError, r"alibi_slopes has shape \(1, 3\), it must be \(heads,\)"),
        (torch.ones(2, 2), ValueError, r"alibi_slopes has shape \(2, 2\)"),
        (torch.ones(()), ValueError, r"alibi_slopes has shape \(\)"),
        (torch.ones(2, requires_grad=True), ValueError, "alibi_slopes requires a gradient"),
    ],
    ids=str,
)
def test_other_slopes_are_one_sentence(slopes, error, says):
    q = normal("cpu", 1, 8, 2, 64)
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=f"^{says}") as found:
        cutex.flash_attn_func(q, q, q, alibi_slopes=slopes)
    assert "\n" not in str(found.value)
    with pytest.raises(ValueError, match=r"^alibi_slopes is a tensor"):
        cutex.flash_attn_with_kvcache(q, q, q, alibi_slopes=torch.ones(2))


def test_no_kernel_of_gradients_is_asked_for_them():
    q = normal("cpu", 1, 8, 2, 64)
    call = eager.AttentionCall(q, q, q, alibi_slopes=torch.ones(1, 2))
    with cutex.ops.simulated("sm_90a"):
        assert "alibi_slopes" in str(why_not(call))
