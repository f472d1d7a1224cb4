"""Reductions over any dimensions: right against float64, with the same bits each time."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from row_calls import rows

import cutex
from cutex.kernels.row import choose
from cutex.kernels.row.reduce import WORDS
from cutex.ops.row.reduce import _config, few_lanes
from cutex.ops.row.rows import COLUMNS

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
OPS = ("sum", "mean", "max", "min", "argmax", "argmin")


def wanted_of(x, op, dim=None, keepdim=False):
    """torch's own, in float64."""
    x = x.double()
    if op in ("max", "min"):
        dim = () if dim is None else dim
        return (torch.amax if op == "max" else torch.amin)(x, dim, keepdim)
    if op.startswith("arg"):
        return getattr(torch, op)(x, dim, keepdim)
    return getattr(torch, op)(x, dim=dim, keepdim=keepdim)


def check(x, op, dim=None, keepdim=False, **options):
    found = cutex.reduce(x, op, dim, keepdim=keepdim, **options)
    wanted = wanted_of(x, op, dim, keepdim)
    assert found.shape == wanted.shape
    if op not in ("sum", "mean"):
        assert found.dtype == (torch.int64 if op.startswith("arg") else x.dtype)
        assert torch.equal(found.to(wanted.dtype), wanted)
        return
    terms = wanted_of(x.abs(), op, dim, keepdim)
    error = (found.double() - wanted).abs()
    assert bool((error <= ROUNDING[x.dtype] * wanted.abs() + 2**-20 * terms).all())


SHAPES = [
    ((7, 99), -1),
    ((7, 99), 0),
    ((5, 8200), 1),
    ((3, 500, 24), 1),
    ((3, 301, 5), 1),
    ((2, 3, 4, 40), (1, 2)),
    ((2, 3, 4, 40), (0, 2)),
    ((70_001,), None),
    ((), None),
]


@pytest.mark.sweep(576)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape, dim", SHAPES)
@pytest.mark.parametrize("keepdim", [False, True])
def test_ops_over_any_dimensions(device, shape, dim, op, keepdim, dtype):
    if op.startswith("arg") and isinstance(dim, tuple):
        dim = dim[0]
    check(rows(device, shape, dtype), op, dim, keepdim and shape != ())


@pytest.mark.slow
def test_equal_elements_and_zeros_of_both_signs(device):
    x = torch.tensor([[1.0, 3, 3, -5, -5, 0], [-0.0, 0.0, -0.0, -1, -1, -2]], device=device)
    assert cutex.reduce(x, "argmax", 1).tolist() == [1, 0]
    assert cutex.reduce(x, "argmin", 1).tolist() == [3, 5]
    assert cutex.reduce(x, "argmax", 0).tolist() == [0, 0, 0, 1, 1, 0]
    large = torch.zeros(70_001, device=device)
    assert cutex.reduce(large, "argmax") == 0 and cutex.reduce(large, "argmin") == 0


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_infinities_and_nans(device, dim):
    inf, nan = torch.inf, torch.nan
    x = rows(device, (6, 6))
    x[:, 1], x[1, 2], x[4, 4], x[2, 3], x[5] = -inf, inf, nan, -inf, -inf
    x = x if dim else x.mT.contiguous()
    for op in ("max", "min", "sum"):
        wanted = wanted_of(x, op, dim).float()
        torch.testing.assert_close(cutex.reduce(x, op, dim), wanted, equal_nan=True)
    for op in ("argmax", "argmin"):
        assert torch.equal(cutex.reduce(x, op, dim), wanted_of(x, op, dim))
    x.fill_(-inf)
    assert cutex.reduce(x, "argmax", dim).eq(0).all() and cutex.reduce(x, "max", dim).eq(-inf).all()


OVERFLOWS = [
    ((7, 99), 1, True), ((7, 99), 0, True), ((65_003,), None, True), ((5, 301), 1, True),
    ((9001,), None, False), ((3, 9001), 1, False), ((2, 500, 33), 1, False),
]  # fmt: skip


@pytest.mark.sweep(4)
@pytest.mark.parametrize("shape, dim, few", OVERFLOWS)
def test_sums_of_which_parts_overflow(device, shape, dim, few, monkeypatch):
    if not few:
        monkeypatch.setattr(choose, "FEW", 0)
    x = rows(device, shape).abs().clamp(0.2, 3) * 1e38
    half = x.shape[dim or 0] // 2
    x.narrow(dim or 0, half, half).copy_(-x.narrow(dim or 0, 0, half).flip(dim or 0))
    assert not x.cumsum(dim or 0).isfinite().all()
    check(x, "sum", dim)
    check(x.abs(), "mean", dim)
    x[(1,) * x.dim()] = torch.inf
    found, wanted = cutex.reduce(x, "sum", dim), wanted_of(x, "sum", dim)
    assert torch.equal(found.isfinite(), wanted.isfinite()) and found.amax() == torch.inf


@pytest.mark.sweep(8)
@pytest.mark.parametrize("shape, dim", [((7, 99), -1), ((70_001,), None)])
@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_first_places_among_infinities_and_nans(device, shape, dim, op):
    x = rows(device, shape).round()
    worst = torch.full_like(x, -torch.inf if op == "argmax" else torch.inf)
    worst[..., 3] = x[..., 3]
    x[..., 40::3], x[..., 41::5] = torch.nan, -torch.nan
    for y in (x, worst, worst.clone().fill_(worst.view(-1)[0])):
        assert torch.equal(cutex.reduce(y, op, dim), wanted_of(y, op, dim))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("op", ["sum", "argmax"])
@pytest.mark.parametrize(
    "shape, dim, ctas", [((65_003,), None, 8), ((3, 30_001), 1, 8), ((6, 9001), 1, 8)]
)
def test_one_cluster_takes_few_elements(device, asked, shape, dim, ctas, op):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters begin with sm_90")
    check(rows(device, shape), op, dim)
    ((kind, config, *_),) = asked
    assert kind.__name__ == "Reduce" and config.tile.ctas == ctas and not config.shared


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", ["sum", "argmax"])
@pytest.mark.parametrize("shape, dim", [((70_003,), None), ((3, 20_000), 1)])
def test_parts_of_few_elements_meet_in_words(device, asked, monkeypatch, shape, dim, op):
    # which each launch leaves zeroed for the next
    monkeypatch.setattr(choose, "ONE_CLUSTER", 0)
    x = rows(device, shape)
    one = cutex.reduce(x, op, dim)
    for _ in range(2):
        check(-x, op, dim)
        assert torch.equal(cutex.reduce(x, op, dim), one)
    assert {config.shared for _, config, *_ in asked} == {WORDS}


def test_transposed_squares(device):
    x = rows(device, (4, 4, 24)).transpose(0, 1)
    for dim in (0, 1):
        check(x, "sum", dim)
    check(rows(device, (33, 33)).mT, "sum", 0)


def test_lanes_of_few_rows_load_all_at_one_time():
    assert [few_lanes(n) for n in (1, 128, 129, 256, 257)] == [8, 8, 4, 4, 0]


@pytest.mark.slow
def test_strided_views(device):
    whole = rows(device, (6, 4, 50))
    for x in (whole.mT, whole.permute(2, 0, 1), whole[:, 1:, 3:40], whole[::2, :, ::3]):
        for dim in range(3):
            check(x, "sum", dim)
        check(x, "argmax")
        check(x, "max", (0, 2))
    check(rows(device, (6, 1)).expand(6, 33), "sum", 1)
    check(rows(device, (1, 33)).expand(6, 33), "max", 0)
    check(rows(device, (40, 1))[::2], "argmax", 1)


@pytest.mark.usefixtures("none_are_few")
def test_the_bits_are_the_same_each_time(device):
    x = rows(device, (70_003,))
    one = cutex.reduce(x)
    assert all(torch.equal(cutex.reduce(x), one) for _ in range(2))
    check(x, "sum", deterministic=False)
    check(rows(device, (2, 9000, 3), torch.bfloat16), "mean", 1, deterministic=False)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["sum", "mean", "max", "argmax", "argmin"])
def test_more_elements_than_a_launch_counts(device, monkeypatch, op):
    monkeypatch.setattr(import_module("cutex.ops.row.reduce"), "COLUMNS", 2999)
    monkeypatch.setattr(import_module("cutex.ops.row.reduce"), "PIECE", 1000)
    for keepdim in (False, True):
        check(rows(device, (5, 700)), op, None, keepdim)
    x = torch.zeros(3500, device=device)
    x[2500] = torch.nan
    if op.startswith("arg"):
        assert cutex.reduce(x, op) == 2500 and cutex.reduce(x[:2400].repeat(2), op) == 0


@pytest.mark.sweep(8)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_gradients(device, op):
    x = torch.randint(-3, 4, (4, 6, 5), device=device).float().requires_grad_()
    wide = x.detach().double().requires_grad_()
    for dim, keepdim in ((1, False), ((0, 2), True), (None, False)):
        x.grad = wide.grad = None
        y, wanted = cutex.reduce(x, op, dim, keepdim=keepdim), wanted_of(wide, op, dim, keepdim)
        dy = rows(device, y.shape)
        y.backward(dy)
        wanted.backward(dy.double())
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)
    assert not cutex.reduce(x, "argmax", 0).requires_grad
    if op == "max":  # of more equal elements than a float16 counts
        x = torch.zeros(65_537, dtype=torch.float16, device=device, requires_grad=True)
        cutex.reduce(x, op).backward(torch.tensor(128.0, dtype=torch.float16, device=device))
        assert x.grad.unique().tolist() == [2**-9]


def test_nothing_in_nothing_out(device):
    x = torch.empty(0, 5, device=device)
    assert cutex.reduce(x, "sum", 0).tolist() == [0] * 5
    assert cutex.reduce(x, "mean", 0).isnan().all()
    assert cutex.reduce(x, "max", 1).shape == (0,)
    assert cutex.reduce(x, "argmax", 1, keepdim=True).shape == (0, 1)
    with pytest.raises(ValueError, match="of no elements there is no max"):
        cutex.reduce(x, "max", 0)


@pytest.mark.slow
def test_torch_compile_takes_it_whole(device):
    x = rows(device, (4, 24)).requires_grad_()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        return cutex.reduce(x, "max", 1).sum() + cutex.reduce(x * x) + cutex.reduce(x, "argmax")

    step(x).backward()
    found, x.grad = x.grad, None
    (x.amax(1).sum() + (x * x).sum()).backward()
    torch.testing.assert_close(found, x.grad)


def test_the_command_of_that_name_hides_nothing(device):
    import_module("cutex.reduce")  # python -m cutex.reduce, the ladder
    assert cutex.reduce(torch.ones(3, device=device)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_100a", "sm_120a"])
def test_on_any_arch(name):
    with cutex.ops.simulated(name):
        for op in OPS:
            check(rows("cpu", (5, 999)), op, 0)
            check(rows("cpu", (20_001,), torch.bfloat16), op)


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("random", 1), ("random", 2), ("starved", 0)])
def test_in_every_order_of_events(order, seed):
    with cutex.ops.simulated("sm_90a", order=order, seed=seed):
        for op in ("sum", "argmax"):
            check(rows("cpu", (20_001,)), op)
            check(rows("cpu", (2, 4000, 8)), op, 1)
        check(rows("cpu", (20_001,)), "sum", deterministic=False)


BAD = [
    ({"x": 3}, TypeError, "x must be a torch.Tensor, got int"),
    ({"x": torch.zeros(3).long()}, TypeError, "x must be of bfloat16, float16, float32"),
    ({"op": "prod"}, ValueError, "op='prod' is not one of sum, mean, max, min, argmax, argmin"),
    ({"dim": 2}, ValueError, "dim=2: x has 2 dimensions"),
    ({"dim": 1.0}, TypeError, "dim must be an int, several or None, got 1.0"),
    ({"dim": (0, -2)}, ValueError, "takes different dimensions"),
    ({"dim": (0, 1), "op": "argmax"}, ValueError, "argmax takes one dimension, or None"),
    ({"keepdim": 1}, TypeError, "keepdim must be a bool, got int"),
]


@pytest.mark.parametrize("given, error, said", BAD)
def test_bad_input_is_one_sentence(given, error, said):
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=said) as found:
        cutex.reduce(**({"x": torch.zeros(2, 8)} | given))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("n", [4097, 1 << 20, 99_999_989, COLUMNS - 3, COLUMNS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_part_of_a_row_begins_in_it(n, dtype):
    # columns behind the last part's are not counted by 32 bits
    x = torch.empty((1, n), dtype=dtype, device="meta")
    _, config, splits, _ = _config("sum", x, dtype, "sm_90a", 132, True)
    tile = config.tile
    parts = -(-(n + tile.lead) // (tile.columns + tile.lead))
    assert (splits - 1) * -(-parts // splits) < parts
