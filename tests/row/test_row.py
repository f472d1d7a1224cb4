"""Functions of rows: right against float64, whatever the lengths, the strides and the values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from row_calls import DTYPES, ORDERS, near, rows

import cutex
from cutex import ops
from cutex.arch import arch
from cutex.device.row.tile import RowTile
from cutex.kernels.row import choose, choose_gradient
from cutex.kernels.row.kernel import ARCHS
from cutex.ops.row import launches
from cutex.ops.row.launches import Calls, Launch
from cutex.ops.row.norm import groups_of, most_clusters
from cutex.ops.row.rows import arch_of, loads_of, tile_of

LENGTHS = (1, 7, 64, 99, 264, 1000, 1024)


@pytest.mark.sweep(60)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_softmax_and_its_gradient(device, n, dtype):
    x = rows(device, (3, 2, n), dtype, scale=4.0).requires_grad_()
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
@pytest.mark.parametrize(
    "n",
    [*LENGTHS, *(pytest.param(n, marks=pytest.mark.slow) for n in (3077, 20_001, 47_720, 50_257))],
)
@pytest.mark.parametrize("centred", [False, True])
def test_norms_and_their_gradients(device, n, dtype, centred):
    x, r = (rows(device, (5, n), dtype, seed=i).requires_grad_() for i in range(2))
    weight = (1 + rows(device, (n,), torch.float32, scale=0.1, seed=2)).requires_grad_()
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
        x = rows(device, (2, n), dtype, scale=4.0)
        near(cutex.softmax(x), x.double().softmax(-1), dtype, 2**-6)
        y = cutex.layer_norm(x + 100, eps=1e-5)
        near(y, F.layer_norm((x + 100).double(), (n,), eps=1e-5), dtype, 8)


def test_special_values_are_those_of_torch(device):
    inf, nan = torch.inf, torch.nan
    x = torch.zeros(7, 200, device=device)
    x[0] = -inf
    x[1, 5], x[2, 70], x[3, 199] = inf, nan, -inf
    x[6], x[6, :4] = -inf, -3000  # far below the -inf of a thread that has nothing else
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


def test_one_element_may_have_any_stride():
    """Where torch leaves a stride that a kernel, which is told that it is 1, refuses."""
    launch = Launch(torch.device("cpu"))
    given = torch.zeros(9, 7)[:, ::3][:, :1], torch.zeros(3, 5)[::2, 1][:1]
    for x, pass_ in zip(given, (launch.rows, launch.flat), strict=True):
        (made,) = pass_(x=x)
        assert x.stride(-1) != 1 == made.stride(-1) and made.data_ptr() == x.data_ptr()
        assert launch.passed[-1] == (made.shape, made.stride())


def test_rows_that_begin_anywhere_are_copied_where_no_tile_holds_them():
    def plan(options, x, w):
        if x.data_ptr() % 16 or x.stride(0) != 3:
            raise choose.TooLong("too long")
        return lambda x, w: (x, w)

    x, w = torch.rand(9)[1:7].view(2, 3), torch.rand(3)
    for long in (x, torch.rand(3, 2).mT):
        calls = Calls(plan)
        for _ in range(2):  # the second one finds the plan
            y, kept = calls((), long, w)
            assert torch.equal(y, long) and y.data_ptr() % 16 == 0 and kept is w
    with pytest.raises(ValueError, match="too long"):
        Calls(plan)((), torch.rand(2, 4), w)


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
    with pytest.raises(ValueError, match="is not differentiable"):
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
    with pytest.raises(ValueError, match="is not differentiable"):
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
    except choose.TooLong as error:
        assert "does not fit" in str(error)
        assert n * bits // 8 > 1024 * 2 * choose.MOST * bits // 8 * min(unit, 128 // bits) - 16
        return
    assert tile.why_not(clusters=arch(name).capability >= (9, 0)) is None
    assert tile.least_columns <= n <= tile.columns
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


def test_a_row_whose_parts_32_bits_do_not_count_is_refused():
    x = torch.empty(1).expand(1, 2**31 - 100)
    with pytest.raises(ValueError, match="a row has 2147483548 elements: at most 2147352576"):
        loads_of([x], (), True)


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


def test_a_tile_of_few_rows_holds_them():
    for n in (*range(1, 1300), *range(1300, 40_000, 97)):
        for name, bits in (("sm_90a", 16), ("sm_90a", 32), ("sm_80", 16)):
            unit = min(n & -n, 128 // bits)
            tile = choose.few(8, n, unit, bits, name)
            if tile is None:
                assert n > 1024 * choose.MOST or unit == 128 // bits
                continue
            assert tile.why_not(name != "sm_80") is None and tile.width == unit
            assert n <= tile.columns < n + tile.threads * tile.ctas * tile.width
    assert choose.few(1 << 10, 1023, 1, 16, "sm_90a") is None  # not few


def test_threads_that_keep_sums_have_the_tiles_that_were_the_fastest():
    """Threads and CTAs by the columns of bf16, on an H200."""
    fastest = {3077: (256, 1), 7577: (128, 8), 20_001: (512, 2), 50_257: (256, 8),
               32_768: (128, 8), 47_720: (256, 8), 65_536: (256, 8), 131_072: (256, 8)}  # fmt: skip
    for n, threads in fastest.items():
        x = torch.empty(3, n, dtype=torch.bfloat16)
        tile = choose_gradient.with_sums(n, tile_of([x, x, x], [x[0]], "sm_90a", shifts=False))
        assert (tile.threads, tile.ctas) == threads
        assert tile.threads * tile.ctas * tile.vectors * tile.width >= n


@pytest.mark.sweep(8)
@pytest.mark.parametrize("order, seed", ORDERS)
def test_in_every_order_of_events(order, seed):
    if torch.cuda.is_available():
        pytest.skip("of the simulator")
    with cutex.ops.simulated("sm_90a", order=order, seed=seed):
        x = rows("cpu", (2, 4100), torch.float32).requires_grad_()
        w = torch.ones(4100, requires_grad=True)
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
