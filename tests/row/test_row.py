"""Functions of rows: right against float64, whatever the lengths, the strides and the values."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from cutlass import Int32, cute
from hypothesis import given, settings
from hypothesis import strategies as st

import cutex
from cutex import ops
from cutex.arch import arch
from cutex.compile import Compiled, compile
from cutex.device.row.bulk import BulkRing, Run
from cutex.device.row.tile import RowTile
from cutex.device.row.words import Words
from cutex.dtypes import of_torch
from cutex.kernels.row import choose
from cutex.kernels.row.cross_entropy import CrossEntropy, CrossEntropyConfig
from cutex.kernels.row.kernel import ARCHS
from cutex.kernels.row.norm_bulk import BulkConfig, NormBulk
from cutex.kernels.row.norm_dense import DenseConfig, NormDense
from cutex.ops.device import launcher
from cutex.ops.row import launches
from cutex.ops.row.norm import NORM, groups_of, most_clusters
from cutex.ops.row.rows import arch_of, tile_of
from cutex.sim import simulate
from cutex.sim.errors import SimError

cross_entropy_module = import_module("cutex.ops.row.cross_entropy")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# half an ulp of the result, with what float32 sums of a row lose
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
LENGTHS = (1, 7, 64, 99, 264, 1000, 1024)


@pytest.fixture
def device():
    """The device: a GPU, or the simulator."""
    if torch.cuda.is_available():
        yield "cuda"
    else:
        with cutex.ops.simulated("sm_90a"):
            yield "cpu"


@pytest.fixture
def asked(monkeypatch):
    """The kernels that are asked for: kind, config, dtype, arch."""
    found = []
    kernel_for = launches.kernel_for
    monkeypatch.setattr(launches, "kernel_for", lambda *a: found.append(a) or kernel_for(*a))
    return found


def rows(device, shape, dtype, scale=1.0, seed=0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=g)).to(dtype).to(device)


def launched(kernel: Compiled, device: str, *arguments) -> None:
    """Run a kernel on the device; in the simulator, without a finding."""
    if device == "cuda":
        launcher(kernel, arguments)(*arguments)
    else:
        assert not simulate(kernel, *arguments).findings


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, terms: float = 1.0) -> None:
    """Check that found is wanted, rounded; `terms` is the size of what was added up for it."""
    bound = ROUNDING[dtype] * (wanted.abs() + terms * 2**-3) + 1e-30
    error = (found.double().cpu() - wanted.cpu()).abs()
    assert bool((error <= bound.cpu()).all()), float((error / bound.cpu()).max())


@pytest.mark.sweep(60)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_softmax_and_its_gradient(device, n, dtype):
    x = rows(device, (3, 2, n), dtype, 4.0).requires_grad_()
    y = cutex.softmax(x)
    wide = x.detach().double().requires_grad_()
    wanted = wide.softmax(-1)
    near(y.detach(), wanted.detach(), dtype, 2**-6)
    dy = rows(device, x.shape, dtype, seed=1)
    y.backward(dy)
    own = y.detach().double()  # the gradient is that of the rounded result
    near(x.grad, own * (dy.double() - (own * dy.double()).sum(-1, keepdim=True)), dtype)


@pytest.mark.sweep(96)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("centred", [False, True])
def test_norms_and_their_gradients(device, n, dtype, centred):
    x, r = (rows(device, (5, n), dtype, seed=i).requires_grad_() for i in range(2))
    weight = (1 + rows(device, (n,), torch.float32, 0.1, 2)).requires_grad_()
    bias = rows(device, (n,), torch.float32, seed=3).requires_grad_()
    function = cutex.layer_norm if centred else cutex.rms_norm
    given = (weight, bias) if centred else (weight,)
    y, summed = function(x, *given, eps=1e-5, residual=r)
    near(summed.detach(), x.detach().double() + r.detach().double(), dtype)
    # the norm is that of the rounded sum
    h, *wide = (t.detach().double().requires_grad_() for t in (summed, *given))
    norm = F.layer_norm if centred else F.rms_norm
    wanted = norm(h, (n,), *wide, eps=1e-5)
    near(y.detach(), wanted.detach(), dtype, 8)
    dy, ds = (rows(device, x.shape, dtype, seed=i) for i in (4, 5))
    torch.autograd.backward((y, summed), (dy, ds))
    wanted.backward(dy.double())
    scale = float(h.grad.abs().max()) + 8
    for t in (x, r):
        near(t.grad, h.grad + ds.double(), dtype, scale)
    for t, w in zip(given, wide, strict=True):
        near(t.grad, w.grad, torch.float32, 64)


@pytest.mark.sweep(48)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 99, 1000])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 1e-2)])
def test_cross_entropy_and_its_gradient(device, n, dtype, smoothing, z_loss):
    x = rows(device, (6, n), dtype, 3.0).requires_grad_()
    target = torch.tensor([0, n - 1, -100, n // 2, 1, 0], device=device)
    wide = x.detach().double().requires_grad_()
    plain = F.cross_entropy(wide, target, reduction="none", label_smoothing=smoothing)
    wanted = plain + z_loss * wide.logsumexp(1) ** 2 * (target != -100)
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    loss = cutex.cross_entropy(x, target, reduction="none", **options)
    near(loss.detach(), wanted.detach(), torch.float32, 64)
    total = cutex.cross_entropy(x, target.int(), **options)
    near(total.detach(), wanted.detach().sum() / 5, torch.float32, 64)
    total.backward()
    (wanted.sum() / 5).backward()
    near(x.grad, wide.grad, dtype)


def test_views_that_begin_anywhere_and_what_lies_around_them(device):
    whole = torch.full((7, 131), torch.nan, dtype=torch.bfloat16, device=device)
    for start, end in ((1, 100), (3, 131), (8, 72), (5, 6)):
        x = whole[1:6, start:end]
        x.copy_(rows(device, x.shape, torch.bfloat16))
        near(cutex.softmax(x), x.double().softmax(-1), torch.bfloat16, 2**-6)
        y = cutex.rms_norm(x, None, eps=1e-6)
        near(y, F.rms_norm(x.double(), x.shape[-1:], eps=1e-6), torch.bfloat16, 8)
        x.fill_(torch.nan)


@pytest.mark.parametrize("between", [8, 16])
def test_nothing_between_the_rows_of_a_view_is_read(device, between):
    # a step from row to row that is the result's up to whole vectors
    x = torch.full((5, 137 + between), torch.nan, dtype=torch.bfloat16, device=device)[:, :137]
    x.copy_(rows(device, x.shape, torch.bfloat16))
    near(cutex.softmax(x), x.double().softmax(-1), torch.bfloat16, 2**-6)
    near(cutex.rms_norm(x), F.rms_norm(x.double(), (137,)), torch.bfloat16, 8)


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_softmax_over_another_dim(device, dim):
    x = rows(device, (9, 4, 5), torch.float32)
    near(cutex.softmax(x, dim), x.double().softmax(dim), torch.float32)


def test_expanded_and_transposed_inputs(device):
    x = rows(device, (40, 3), torch.float16).mT
    near(cutex.softmax(x), x.double().softmax(-1), torch.float16, 2**-6)
    x = rows(device, (40,), torch.float16).expand(3, 40)
    near(cutex.layer_norm(x), F.layer_norm(x.double(), (40,)), torch.float16, 8)


@pytest.mark.slow
def test_rows_that_several_ctas_share(device):
    for n, dtype in ((33_000, torch.bfloat16), (20_001, torch.float32)):
        x = rows(device, (2, n), dtype, 4.0)
        near(cutex.softmax(x), x.double().softmax(-1), dtype, 2**-6)
        y = cutex.layer_norm(x + 100, eps=1e-5)
        near(y, F.layer_norm((x + 100).double(), (n,), eps=1e-5), dtype, 8)


@pytest.mark.parametrize("centred", [False, True], ids=["rms norm", "layer norm"])
@pytest.mark.parametrize("saves", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_long_rows_of_a_norm_come_by_smem(device, monkeypatch, saves, centred):
    asked = []
    kernel_for = launches.kernel_for
    monkeypatch.setattr(launches, "kernel_for", lambda *a: asked.append(a) or kernel_for(*a))
    whole = torch.full((3, 47_728), torch.nan, dtype=torch.bfloat16, device=device)
    x = whole[1:2, :47_720].copy_(rows(device, (1, 47_720), torch.bfloat16))
    if centred:  # far from 0, and the parts of the row, which meet, differ
        x[:, :20_000] += 64
    w = rows(device, (47_720,), torch.float32, seed=1)
    wide = x.double()
    mean = wide.mean(-1) if centred else torch.zeros(1, dtype=torch.float64, device=device)
    apart = wide - mean
    rstd = (apart.square().mean(-1) + 1e-6).rsqrt()
    if saves:
        found, _, mean_kept, kept = NORM(x, w, None, None, 1e-6, centred)
        near(kept, rstd, torch.float32, 4)
        if centred:
            near(mean_kept, mean, torch.float32, 4)
    else:
        found = (cutex.layer_norm if centred else cutex.rms_norm)(x, w, eps=1e-6)
    near(found, apart * rstd[:, None] * w.double(), torch.bfloat16, 8)
    assert [kind.__name__ for kind, *_ in asked] == ["NormStaged"]


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    "n, dtype, ctas",
    [(n, torch.float16, 1) for n in (5520, 2056, 4104, 10_240, 20_472)]  # three tiles of one CTA
    + [(n, torch.float32, 1) for n in (2184, 5520, 10_240, 16_384)]
    + [(20_000, torch.float32, 4), (28_672, torch.float32, 4)],
)
def test_a_layer_norm_of_whole_vectors_comes_by_smem(device, asked, n, dtype, ctas):
    x = rows(device, (3, n), dtype, 4.0)
    x[1, : n // 3] += 64  # the parts of the row, which meet, differ
    x[2, n // 2] = 6e4
    w, b = (rows(device, (n,), torch.float16, seed=seed) for seed in (1, 2))
    y = cutex.layer_norm(x, w, b, eps=1e-5)
    want = F.layer_norm(x.double(), (n,), w.double(), b.double(), 1e-5)
    if dtype == torch.float32:
        near(y, want, dtype, 8)
    else:
        bound = 2**-11 * (2 * want.abs() + b.double().abs())  # y and what b is added to, rounded
        assert ((y.double() - want).abs() <= bound + 2**-14).all()
    ((kind, config, *_),) = asked
    assert kind.__name__ == "NormStaged" and config.tile.ctas == ctas


@pytest.mark.parametrize("n", [4096, 5520, 20_000])
def test_rows_by_half_a_vector_come_to_registers(device, monkeypatch, n):
    """Of bf16 whose rows begin in the middle of 16 bytes, by smem they would be half as wide."""
    whole = torch.zeros(2 * n + 8, dtype=torch.bfloat16, device=device)
    made = []

    def run(launch, kernel, *_):
        made.append(kernel)
        return lambda *_: None

    monkeypatch.setattr(launches.Launch, "run", run)
    cutex.layer_norm(whole[4 : 4 + 2 * n].view(2, n))
    ((kind, config, _),) = made
    assert not config.by_smem and kind.__name__ != "NormStaged"


def test_special_values_are_those_of_torch(device):
    inf, nan = torch.inf, torch.nan
    x = torch.zeros(6, 200, device=device)
    x[0] = -inf
    x[1, 5], x[2, 70], x[3, 199] = inf, nan, -inf
    x[4, :100], x[4, 100:] = 1e30, -1e30
    x[5] = torch.linspace(-1e-38, 1e-38, 200)
    close = partial(torch.testing.assert_close, equal_nan=True, rtol=1e-5, atol=1e-7)
    close(cutex.softmax(x), x.softmax(-1))
    y, wanted = cutex.rms_norm(x, eps=1e-6), F.rms_norm(x, (200,), eps=1e-6)
    keep = [0, 1, 2, 3, 5]  # of 1e30 the squares overflow
    close(y[keep], wanted[keep])


def test_a_row_far_from_zero_keeps_its_variance(device):
    x = rows(device, (3, 700), torch.float32) + 10_000
    wanted = F.layer_norm(x.double(), (700,))
    error = (cutex.layer_norm(x).double() - wanted).abs().max()
    assert float(error) < 4 * 2**-24 * 10_000  # the mean's rounding


@pytest.mark.sweep(4)
@pytest.mark.parametrize("n, aligned", [(1000, True), (1001, False)])
@pytest.mark.parametrize("smoothed", [False, True])
def test_cross_entropy_that_walks_along_a_row(n, aligned, smoothed):
    tile = RowTile(1, 32, 1, 1, 8, aligned)
    kernel = CrossEntropy(CrossEntropyConfig(tile, smoothed, walks=True))
    x, target = rows("cpu", (3, n), torch.bfloat16, 3.0), torch.tensor([0, n - 1, -100]).int()
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


def test_nothing_in_nothing_out(device):
    for shape in ((0, 5), (3, 0), (0,)):
        x = torch.empty(shape, device=device, requires_grad=True)
        for y in (cutex.softmax(x), cutex.rms_norm(x), cutex.layer_norm(x)):
            assert y.shape == x.shape
            y.sum().backward()
    target = torch.empty(0, dtype=torch.int64, device=device)
    assert cutex.cross_entropy(torch.empty(0, 7, device=device), target, reduction="sum") == 0


@pytest.mark.slow
def test_torch_compile_takes_them_whole(device):
    x = rows(device, (4, 96), torch.bfloat16)
    w = rows(device, (96,), torch.bfloat16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, w):
        return cutex.softmax(cutex.rms_norm(x, w)).float().square().sum()

    one, two = (w.clone().requires_grad_() for _ in range(2))
    step(x, one).backward()
    cutex.softmax(cutex.rms_norm(x, two)).float().square().sum().backward()
    torch.testing.assert_close(one.grad, two.grad)


def test_a_second_derivative_is_refused(device):
    x = rows(device, (2, 8), torch.float32).requires_grad_()
    (g,) = torch.autograd.grad(cutex.softmax(x)[0, 0], x, create_graph=False)
    (again,) = torch.autograd.grad(cutex.softmax(x)[0, 0], x, create_graph=True)
    assert torch.equal(g, again)
    with pytest.raises(ValueError, match="cannot be differentiated again"):
        again.sum().backward()


def test_torch_func_takes_first_derivatives(device):
    x = rows(device, (2, 8), torch.float32)

    def loss(function, x):
        return function(x).square().sum()

    def of_torch(x):
        return x.softmax(-1)

    got = torch.func.grad(loss, 1)(cutex.softmax, x)
    want = torch.func.grad(loss, 1)(of_torch, x.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="cannot be differentiated again"):
        torch.func.grad(lambda x: torch.func.grad(loss, 1)(cutex.softmax, x).sum())(x)


@pytest.mark.slow
def test_a_call_like_another_decides_nothing(device, monkeypatch):
    """Only a first call looks for its kernel, also where a gradient is wanted."""
    asked = []
    kernel_for = launches.kernel_for
    monkeypatch.setattr(launches, "kernel_for", lambda *a: asked.append(a) or kernel_for(*a))
    x, w = rows(device, (2, 3, 40), torch.bfloat16), rows(device, (40,), torch.float32)
    target = torch.tensor([3, -100, 9, 39, 0, 1], device=device)
    wanted = F.cross_entropy(x.double().view(6, 40), target)
    with_gradient, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    F.rms_norm(wide, (40,), w.double(), eps=1e-6).sum().backward()
    for call in (
        lambda: cutex.softmax(x),
        lambda: cutex.rms_norm(x, w),
        lambda: cutex.layer_norm(x, residual=x.clone()),
        lambda: near(cutex.cross_entropy(x.view(6, 40), target), wanted, torch.float32, 64),
        lambda: near(
            torch.autograd.grad(cutex.rms_norm(with_gradient, w).sum(), with_gradient)[0],
            wide.grad,
            torch.bfloat16,
            8,
        ),
    ):
        call()
        found = len(asked)
        for _ in range(2):
            call()
        assert len(asked) == found > 0


def test_a_call_with_one_tensor_twice_finds_its_plan_too(device, monkeypatch):
    asked = []
    kernel_for = launches.kernel_for
    monkeypatch.setattr(launches, "kernel_for", lambda *a: asked.append(a) or kernel_for(*a))
    x, other = (rows(device, (3, 40), torch.float32, seed=i) for i in range(2))
    w = rows(device, (40,), torch.float32, seed=2)

    def norm_of(residual):
        y, summed = cutex.layer_norm(x, w, w, residual=residual)
        near(summed, x.double() + residual.double(), torch.float32)
        wide = x.double() + residual.double()
        near(y, F.layer_norm(wide, (40,), w.double(), w.double(), 1e-5), torch.float32, 8)

    for residual, plans in ((x, 1), (x, 1), (other, 2), (x, 2), (other, 2)):
        norm_of(residual)  # x given twice, and w, has another plan than x beside another tensor
        assert len(asked) == plans


def test_a_plan_is_of_tensors_that_begin_alike(device):
    whole = rows(device, (5, 100), torch.bfloat16)
    for start in (0, 1, 0, 8, 3, 1):
        x = whole[:, start : start + 64]
        near(cutex.softmax(x), x.double().softmax(-1), torch.bfloat16, 2**-6)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "dtype, of_weight",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_weights_begin_anywhere(device, dtype, of_weight):
    whole = rows(device, (9, 700), dtype)
    for start, n in ((0, 99), (1, 99), (3, 96), (5, 603), (7, 41)):
        x = whole[:, :n] if start % 2 else whole[:, :n].contiguous()
        weight = rows(device, (8 + n,), of_weight, seed=start)[start : start + n]
        found = cutex.rms_norm(x, weight)
        wanted = F.rms_norm(x.double(), (n,), weight.double(), 1e-6)
        near(found, wanted, dtype, 8)


def test_what_lies_beside_a_row_does_not_count(device):
    # rows that begin anywhere load their neighbours' ends, too
    x = rows(device, (6, 101), torch.bfloat16)
    x[::2] = torch.nan
    x[3] = torch.inf
    softmax, norm = cutex.softmax(x), cutex.rms_norm(x)
    for row in (1, 5):
        near(softmax[row], x[row].double().softmax(-1), torch.bfloat16, 2**-6)
        near(norm[row], F.rms_norm(x[row].double(), (101,), None, 1e-6), torch.bfloat16, 8)
    assert softmax[::2].isnan().all() and norm[::2].isnan().all()


def test_few_losses_are_added_up_by_the_cta_that_ends_last(device, monkeypatch):
    # a captured launch counts in words that lie anywhere, and leaves them zeroed
    words = torch.zeros(5, dtype=torch.int32, device=device)
    monkeypatch.setattr(launches, "flags_of", lambda *_: lambda: words[1:2])
    x, target = rows(device, (300, 40), torch.bfloat16), torch.arange(300, device=device) % 40
    target[7] = -100
    for reduction in ("mean", "sum", "mean"):
        found = cutex.cross_entropy(x, target, z_loss=0.0, reduction=reduction)
        wanted = F.cross_entropy(x.double(), target, reduction=reduction)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
        assert not words.any()


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


BAD = [
    (lambda x: cutex.softmax("x"), TypeError, "x must be a torch.Tensor, got str"),
    (lambda x: cutex.softmax(x.long()), TypeError, "x must be of bfloat16, float16, float32"),
    (lambda x: cutex.softmax(x, 2), ValueError, "dim=2: x has 2 dimensions"),
    (lambda x: cutex.softmax(x[0, 0]), ValueError, "at least one dimension"),
    (lambda x: cutex.rms_norm(x, x[0, :3]), ValueError, r"weight must have shape \(8,\)"),
    (lambda x: cutex.rms_norm(x, residual=x.half()), TypeError, "residual is torch.float16"),
    (lambda x: cutex.layer_norm(x, residual=x[:1]), ValueError, r"residual has shape \(1, 8\)"),
    (lambda x: cutex.rms_norm(x, eps=None), TypeError, "eps must be a number"),
    (lambda x: cutex.cross_entropy(x, x), TypeError, "target must be a tensor of int32 or int64"),
    (lambda x: cutex.cross_entropy(x, torch.zeros(3).long()), ValueError, r"shape \(2,\)"),
    (lambda x: cutex.cross_entropy(x, torch.zeros(2).long(), reduction="x"), ValueError, "one of"),
    (lambda x: cutex.softmax(torch.empty(1, 1 << 21)), ValueError, "does not fit into the regis"),
]


@pytest.mark.parametrize("call, error, said", BAD)
def test_bad_input_is_one_sentence(call, error, said):
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=said) as found:
        call(torch.zeros(2, 8))
    assert "\n" not in str(found.value)


def test_without_a_gpu_it_says_what_to_do():
    with pytest.raises(ValueError, match=r"cutex\.softmax runs on an NVIDIA GPU from Ampere on"):
        cutex.softmax(torch.zeros(2, 2))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", [x for x in ARCHS if x != "sm_90a"])
def test_they_run_on_any_arch(name):
    with cutex.ops.simulated(name):
        x = rows("cpu", (3, 2999), torch.bfloat16).requires_grad_()
        h = cutex.layer_norm(x)
        near(h.detach(), F.layer_norm(x.detach().double(), (2999,)), torch.bfloat16, 8)
        y = cutex.softmax(h)
        near(y.detach(), h.detach().double().softmax(-1), torch.bfloat16, 2**-6)
        y.backward(torch.ones_like(y) * torch.linspace(0, 1, 2999).bfloat16())
        assert x.grad.isfinite().all()


# ---- tiles


@given(
    n=st.integers(1, 200_000),
    bits=st.sampled_from([16, 32]),
    name=st.sampled_from(["sm_80", "sm_90a", "sm_100a", "sm_120a"]),
    unit=st.sampled_from([1, 2, 4, 8]),
    shifted=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_a_tile_holds_its_row_and_wastes_little(n, bits, name, unit, shifted):
    try:
        tile = choose.tile(n, bits, name, unit, shifted)
    except ValueError as error:
        assert "does not fit" in str(error)
        assert n * bits // 8 > 1024 * 2 * choose.MOST * bits // 8 * min(unit, 128 // bits) - 16
        return
    assert tile.why_not(clusters=arch(name).capability >= (9, 0)) is None
    assert n <= tile.columns
    assert tile.columns - n < tile.threads * tile.ctas * tile.width + tile.width
    assert tile.vectors <= 2 * choose.MOST


@pytest.mark.parametrize(
    "start, stride, n, wanted",
    [
        (0, 64, 64, (8, True)),
        (0, 99, 99, (8, False)),  # all begin anywhere, alike
        (8, 64, 40, (8, True)),
        (4, 64, 60, (8, False)),
    ],
)
def test_rows_are_loaded_by_the_widest_vectors(start, stride, n, wanted):
    x = torch.zeros(4 * stride + 64, dtype=torch.bfloat16)[start:].as_strided((3, n), (stride, 1))
    tile = tile_of([x], [], "sm_90a")
    assert (tile.width, tile.aligned) == wanted
    assert tile_of([x], [], "sm_90a", shifts=False).aligned


def test_rows_that_begin_anywhere_take_a_vector_more_before_they_take_more_threads():
    """The tiles that were the fastest on an H200: (rows, threads, CTAs, vectors of a thread)."""
    for n, wanted in {1023: (4, 32, 1, 5), 2049: (2, 64, 1, 5), 4097: (1, 128, 1, 5)}.items():
        tile = choose.tile(n, 16, "sm_90a", 8, shifted=True)
        assert (tile.rows, tile.threads, tile.ctas, tile.vectors) == wanted


def test_rows_that_begin_within_a_line_take_more_threads_before_six_vectors():
    """The tiles that were the fastest on an H100, of rows of a norm."""
    fastest = {36888: (128, 8), 50264: (512, 4), 104352: (512, 8), 75016: (256, 8)}
    for n, threads in fastest.items():
        tile = choose.tile(n, 16, "sm_90a", 8, lines=False)
        assert (tile.threads, tile.ctas) == threads
    x = torch.empty(3, 50264, dtype=torch.bfloat16)
    assert tile_of([x], [x[0]], "sm_90a").threads == 512
    assert tile_of([x], [], "sm_90a").threads == 128


def test_as_many_groups_share_a_gradient_as_an_sm_holds():
    """Those that were the fastest on an H100, by threads, CTAs and vectors."""
    fastest = {(128, 1, 4): 2, (128, 2, 3): 3, (128, 2, 2): 4, (256, 1, 2): 2, (256, 1, 3): 1,
               (512, 1, 1): 2, (128, 4, 4): 3, (128, 8, 4): 3, (256, 8, 8): 3}  # fmt: skip
    for (threads, ctas, vectors), groups in fastest.items():
        tile = RowTile(1, threads, ctas, vectors)
        assert groups_of(tile) == groups
        assert most_clusters(tile, 132) * tile.ctas <= groups * 132


def test_a_long_row_is_walked_along_where_there_are_many(device, monkeypatch):
    monkeypatch.setattr(cross_entropy_module, "WALKERS", 0)
    x = rows(device, (2, 8300), torch.bfloat16, 3.0)
    target = torch.tensor([8299, 4], device=device)
    wanted = F.cross_entropy(x.double(), target)
    near(cutex.cross_entropy(x, target), wanted, torch.float32, 64)


ORDERS = [("random", 1), ("random", 2), ("starved", 0), ("peer-late", 0)]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("order, seed", ORDERS)
def test_in_every_order_of_events(order, seed):
    if torch.cuda.is_available():
        pytest.skip("of the simulator")
    with cutex.ops.simulated("sm_90a", order=order, seed=seed):
        x = rows("cpu", (3, 17_000), torch.float32).requires_grad_()
        w = torch.ones(17_000, requires_grad=True)
        y = cutex.layer_norm(cutex.softmax(x), w)
        y.square().sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9)])
def test_every_gpu_of_compute_capability_8_runs_the_kernels_of_8_0(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert arch_of(torch.device("cuda"), "cutex.softmax") == "sm_80"


def test_an_arch_without_kernels_of_its_own_is_simulated_by_those_of_8_0():
    x = torch.randn(3, 40)
    with ops.simulated("sm_89"):
        assert torch.allclose(cutex.softmax(x), x.softmax(-1), atol=1e-6)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("n, centred", [(137, True), (1023, False), (1023, True)])
def test_columns_of_rows_that_begin_anywhere_go_round_the_threads(device, asked, n, saves, centred):
    # rows beside others, a first and a last one in the middle of a vector, NaN around them; every
    # third row is NaN, which stays there though vectors lie across two rows
    whole = torch.full((23 * n + 16,), torch.nan, dtype=torch.bfloat16, device=device)
    x = whole[8 : 8 + 23 * n].view(23, n).copy_(rows(device, (23, n), torch.bfloat16))
    x[1, : n // 3] += 64  # the parts of the row, which meet, differ
    x[2::3] = torch.nan
    w, b = (rows(device, (n + 1,), torch.bfloat16, seed=seed)[1:] for seed in (1, 2))
    bias = b if centred else None
    if saves:
        y, _, mean, rstd = NORM(x, w, bias, None, 1e-5, centred)
    elif centred:
        y = cutex.layer_norm(x, w, b, eps=1e-5)
    else:
        y = cutex.rms_norm(x, w, eps=1e-5)
    wide = x.double()
    apart = wide - wide.mean(-1, keepdim=True) if centred else wide
    inverse = (apart.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = apart * inverse * w.double() + (b.double() if centred else 0)
    right = [i for i in range(23) if i % 3 != 2]
    near(y[right], want[right], torch.bfloat16, 8)
    assert y[2::3].isnan().all()
    if saves:
        near(rstd[right], inverse[right, 0], torch.float32, 4)
        near(mean[right], wide.mean(-1)[right], torch.float32, 4) if centred else None
    ((kind, *_),) = asked
    assert kind.__name__ == "NormByElement"


@pytest.mark.sweep(64)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "n, centred", [(33, True), (137, False), (137, True), (250, True), (3, True)]
)
@pytest.mark.parametrize("m", [203, 64])
def test_norms_of_dense_rows(device, asked, monkeypatch, n, centred, dtype, saves, m):
    # rows that begin in the middle of a vector or of a word, with NaN around them; every third
    # row is NaN, which stays there though words lie in two rows
    monkeypatch.setattr(choose.dense, "__defaults__", (0,))
    whole = torch.full((m * n + 16,), torch.nan, dtype=dtype, device=device)
    x = whole[8 : 8 + m * n].view(m, n).copy_(rows(device, (m, n), dtype))
    x[1, : n // 3] += 64  # the parts of the row, which meet, differ
    x[2::3] = torch.nan
    w, b = (rows(device, (n + 1,), torch.bfloat16, seed=seed)[1:] for seed in (1, 2))
    if saves:
        y, _, mean, rstd = NORM(x, w, b if centred else None, None, 1e-5, centred)
    else:
        y = cutex.layer_norm(x, w, b, eps=1e-5) if centred else cutex.rms_norm(x, w, eps=1e-5)
    wide = x.double()
    apart = wide - wide.mean(-1, keepdim=True) if centred else wide
    inverse = (apart.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = apart * inverse * w.double() + (b.double() if centred else 0)
    right = [i for i in range(m) if i % 3 != 2]
    near(y[right], want[right], dtype, 8)
    assert y[2::3].isnan().all()
    if saves:
        near(rstd[right], inverse[right, 0], torch.float32, 4)
        near(mean[right], wide.mean(-1)[right], torch.float32, 4) if centred else None
    ((kind, *_),) = asked
    assert kind.__name__ == "NormDense"


BULK = {  # rows, threads, CTAs; columns
    "four rows of a warp each": ((4, 32, 1), 137),
    "rows of half a warp": ((8, 16, 1), 75),
    "a row of two warps": ((1, 64, 1), 301),
    "parts of a row": ((1, 64, 4), 785),
    "whole vectors": ((2, 32, 1), 144),
}


@pytest.mark.sweep(120)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms norm", "layer norm"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", BULK.values(), ids=BULK)
@pytest.mark.parametrize("m", [37, 3])
@pytest.mark.parametrize("apart", [0, 3])
def test_norms_by_bulk_copies(device, how, m, apart, ahead, centred, dtype):
    # fewer CTAs than rows, slots that come round again, a first and a last row in the middle of 16
    # bytes, NaN around them; every third row is NaN, which stays there though words lie in two rows
    tile, n = RowTile(*how[0], 1, 16 // dtype.itemsize, False), how[1]
    if ahead and (tile.rows > 1 or tile.threads <= 32):
        pytest.skip("rows of one warp are not begun ahead")
    config = BulkConfig(
        tile, centred, weight="bf16", bias="bf16" * centred, saves=True, ahead=ahead,
        words=choose.words_of(n, tile),
    )  # fmt: skip
    x, y = (
        torch.full((m * n + 32,), torch.nan, dtype=dtype, device=device)[8 + apart :][: m * n]
        for _ in range(2)
    )
    x, y = (z.view(m, n) for z in (x, y))
    x.copy_(rows(device, (m, n), dtype))
    x[1, : n // 3] += 64  # the parts of the row, which meet, differ
    x[2::3] = torch.nan
    w, b = (rows(device, (n + 1,), torch.bfloat16, seed=seed)[1:] for seed in (1, 2))
    mean, rstd = torch.full((2, m), torch.nan, device=device)
    optional = (w, b, mean, rstd) if centred else (w, rstd)
    kernel = compile(
        NormBulk(config),
        of_torch(dtype).name,
        "sm_90a" if device == "cpu" else arch_of(x.device, "a norm"),
    )
    launched(kernel, device, x, y, *optional, 1e-5, 4)
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    inverse = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = wide * inverse * w.double() + (b.double() if centred else 0)
    right = [i for i in range(m) if i % 3 != 2]
    near(y[right], want[right], dtype, 8)
    near(rstd[right], inverse[right, 0], torch.float32, 4)
    if centred:
        near(mean[right], x.double().mean(-1)[right], torch.float32, 4)
    assert y[2::3].isnan().all()
    whole = y.as_strided((m * n + 32,), (1,), 0)
    assert whole[: 8 + apart].isnan().all() and whole[8 + apart + m * n :].isnan().all()


@pytest.mark.sweep(8)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("n, centred", [(1601, True), (1203, False), (192, True), (20_489, True)])
def test_rows_come_by_bulk_copies(device, asked, monkeypatch, n, centred, saves):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies begin with sm_90")
    monkeypatch.setattr(choose.bulk, "__defaults__", (0,))
    x = rows(device, (5, n), torch.bfloat16)
    w, b = (rows(device, (n,), torch.float32, seed=seed) for seed in (1, 2))
    if saves:
        y, _, _, rstd = NORM(x, w, b if centred else None, None, 1e-5, centred)
    else:
        y = cutex.layer_norm(x, w, b, eps=1e-5) if centred else cutex.rms_norm(x, w, eps=1e-5)
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    inverse = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    near(y, wide * inverse * w.double() + (b.double() if centred else 0), torch.bfloat16, 8)
    if saves:
        near(rstd, inverse[:, 0], torch.float32, 4)
    assert {kind.__name__ for kind, *_ in asked} == {"NormBulk"}


def test_every_tile_by_bulk_copies_holds_its_rows():
    smem = arch("sm_90a").smem_per_cta
    for n in range(100, 160_000, 211):
        for width, centred in ((8, True), (8, False), (4, True)):
            other = choose.tile(n, 128 // width, "sm_90a", width, n % width > 0)
            found = choose.bulk(1 << 22, n, other, centred, "sm_90a")
            if found is None:
                continue
            tile, per = found.tile, width // 4
            assert tile.why_not() is None and (tile.rows == 1 or tile.rows % 2 == 0)
            part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
            last, open_words = n - part * (tile.ctas - 1), 1 + (tile.ctas > 1)
            assert found.words * per * tile.threads >= part + (per - 1) * (not other.aligned)
            assert (found.words - open_words) * per * tile.threads <= last  # but these are whole
            slot = tile.num_threads * found.words * 4 + 32
            assert found.stages * found.resident * slot <= smem - choose.BULK_SPARE


FAULTS = {
    "none": None,
    "words from the row's beginning": (Words, "column", lambda w, i: w.number(i) * w.per),
    "a column too many": (Words, "is_whole", lambda w, i: w.column(i) >= 0),
    "an edge taken whole": (Words, "is_edge", lambda w, i: i == 0),
    "stored before all are done": (cute.arch, "sync_threads", lambda: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_dense_rows_is_found(fault, monkeypatch):
    n, tile = 75, RowTile(32, 4, 1, 10, 8, False)
    if fault is not None:
        monkeypatch.setattr(*fault)
    config = DenseConfig(tile, True, words=10, turns=4)
    kernel = compile(NormDense(config), "bf16", "sm_90a", cache=False)
    x, y = rows("cpu", (70, n), torch.bfloat16), torch.full((70, n), torch.nan).bfloat16()
    try:
        assert not simulate(kernel, x, y, 1e-5).findings
        near(y, F.layer_norm(x.double(), (n,), eps=1e-5), torch.bfloat16, 8)
        found = False
    except (AssertionError, SimError):
        found = True
    assert found == (fault is not None)


BULK_FAULTS = {
    "none": None,
    "rows not waited for": (BulkRing, "wait", lambda *_: None),
    "stored before all are done": (cute.arch, "sync_threads", lambda: None),
    "the async proxy is not told": (cute.arch, "fence_view_async_shared", lambda: None),
    "a slot filled before it is read": (cute.arch, "cp_async_bulk_wait_group", lambda *_, **__: 0),
    "ends stored that others share": (Run, "inner", lambda r: (Int32(0), (r.end + 7) & -8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("fifo", 0), *ORDERS, ("eager", 0)])
@pytest.mark.parametrize("fault", BULK_FAULTS.values(), ids=BULK_FAULTS)
@pytest.mark.parametrize("how, n", [((4, 32, 1), 75), ((1, 64, 2), 301)], ids=["rows", "parts"])
def test_a_fault_of_bulk_copies_is_found(how, n, fault, order, seed, monkeypatch):
    if fault is not None and order != "fifo":
        pytest.skip("a fault is found in the default order")
    if fault is not None:
        monkeypatch.setattr(*fault)
    tile = RowTile(*how, 1, 8, False)
    config = BulkConfig(tile, True, words=choose.words_of(n, tile), ahead=tile.ctas > 1)
    kernel = compile(NormBulk(config), "bf16", "sm_90a", cache=False)
    x, y = rows("cpu", (43, n), torch.bfloat16), torch.full((43, n), torch.nan).bfloat16()
    try:
        assert not simulate(kernel, x, y, 1e-5, 2, order=order, seed=seed).findings
        near(y, F.layer_norm(x.double(), (n,), eps=1e-5), torch.bfloat16, 8)
        found = False
    except (AssertionError, SimError):
        found = True
    assert found == (fault is not None)


def test_every_tile_of_dense_rows_holds_them():
    for n in range(1, 1200):
        for width, centred in ((8, True), (8, False), (4, True), (4, False)):
            other = RowTile(1, 128, 1, 1, width, False)
            found = choose.dense(1 << 22, n, other, centred)
            if found is None:
                continue
            tile, words, turns = found
            assert tile.why_not() is None and tile.rows % 2 == 0
            per = width // 4
            assert words * per * tile.threads >= n + per - 1
            assert words == 1 or (words - 1) * per * tile.threads <= n  # but the last one is whole
            chunk = tile.num_threads * tile.vectors * width
            assert chunk >= tile.rows * turns * n + tile.lead
            assert chunk * 32 // per // 8 <= 48 * 1024


def test_every_tile_by_the_element_holds_its_rows():
    for n in range(1, 24_000):
        for width, centred in ((8, True), (8, False), (4, True)):
            other = RowTile(1, 128, 1, 1, width, False)
            found = choose.by_element(n, other, centred)
            if found is None:
                continue
            tile, elements, _ = found
            assert tile.columns >= n and tile.why_not() is None
            assert (elements - 1) * tile.threads < n <= elements * tile.threads
