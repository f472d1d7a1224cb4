"""Running sums: right against float64, in every order of CTAs; a fault is found."""

from __future__ import annotations

import re

import pytest
import torch
from mutations import Mutant
from row_calls import rows

import cutex
from cutex.compile import compile
from cutex.device.row.tile import RowTile
from cutex.kernels.row.fold import Fold
from cutex.kernels.row.scan import Scan, ScanConfig
from cutex.kernels.row.scan_in_cluster import InClusterConfig, ScanInCluster
from cutex.sim import SimError, simulate

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


def wanted_of(x, op="sum", dim=-1, reverse=False, exclusive=False):
    """In float64, by torch."""
    x = x.double().movedim(dim, -1)
    x = x.flip(-1) if reverse else x
    y = x.cumsum(-1) if op == "sum" else getattr(x, f"cum{op}")(-1)[0]
    if exclusive:
        first = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[op]
        y = torch.cat([torch.full_like(y[..., :1], first), y[..., :-1]], -1)
    return (y.flip(-1) if reverse else y).movedim(-1, dim)


def near(found, wanted, x, dim=-1):
    assert found.shape == wanted.shape
    terms = x.double().abs().cumsum(dim) + x.double().abs().sum(dim, keepdim=True) * 2**-3
    bound = ROUNDING[found.dtype] * wanted.abs() + 2**-20 * terms
    same = found.double() == wanted
    assert (same | ((found.double() - wanted).abs() <= bound)).all()


SHAPES = [(3, 1), (5, 99), (2, 3, 264), (2, 1000), (1, 33_000), (2, 40_001)]


@pytest.mark.sweep(240)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_lengths_ops_and_ways(device, shape, op, reverse, exclusive, dtype):
    x = rows(device, shape, dtype)
    found = cutex.scan(x, op, reverse=reverse, exclusive=exclusive)
    assert found.dtype == dtype
    near(found, wanted_of(x, op, -1, reverse, exclusive), x)


def test_another_dim_strided_views_and_a_wider_result(device):
    whole = rows(device, (4, 50, 30), torch.bfloat16)
    for x in (whole, whole.mT, whole[:, 1:, 3:20], whole[::2, ::3]):
        for dim in (0, 1):
            near(cutex.scan(x, dim=dim), wanted_of(x, dim=dim), x, dim)
        near(cutex.scan(x, out_dtype=torch.float32), wanted_of(x), x)


def test_infinities_and_nans(device):
    x = rows(device, (4, 40))
    x[0, 7], x[1, 9], x[2, 3], x[2, 20] = torch.inf, torch.nan, torch.inf, -torch.inf
    x[3] = -torch.inf
    for op in ("sum", "max", "min"):
        found, wanted = cutex.scan(x, op), wanted_of(x, op).float()
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_the_gradient_is_the_sum_the_other_way(device):
    x = rows(device, (2, 70)).requires_grad_()
    wide = x.detach().double().requires_grad_()
    dy = rows(device, (2, 70), seed=1)
    for reverse in (False, True):
        x.grad = wide.grad = None
        cutex.scan(x, reverse=reverse).backward(dy)
        wanted_of(wide, reverse=reverse).backward(dy.double())
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    x.grad = wide.grad = None
    cutex.scan(x, dim=0, exclusive=True).backward(dy)
    wanted_of(wide, dim=0, exclusive=True).backward(dy.double())
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)


def test_nothing_in_nothing_out_and_torch_compile(device):
    assert cutex.scan(torch.empty(0, 5, device=device)).shape == (0, 5)
    assert cutex.scan(torch.empty(3, 0, device=device)).shape == (3, 0)
    x = rows(device, (2, 40)).requires_grad_()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        return cutex.scan(x * x).sum()

    step(x).backward()
    found, x.grad = x.grad, None
    (x * x).cumsum(-1).sum().backward()
    torch.testing.assert_close(found, x.grad)


# ---- the look-back, by CTAs with small parts, so that there are several groups of 32


def small(reverse=False, exclusive=False):
    config = ScanConfig(RowTile(1, 64, 1, 2, 4), Fold("sum"), "fp32", True, reverse, exclusive)
    return compile(Scan(config), "fp32", "sm_90a")


def scanned(kernel, x, **order):
    parts = -(-x.shape[1] // 512)
    words = torch.zeros(1 + x.shape[0] * (parts + -(-parts // 32)), dtype=torch.int64)
    y = torch.full_like(x, torch.nan)
    simulate(kernel, x, y, words, parts, max_instructions=3_000_000, **order)
    return y


ORDERS = ({}, {"order": "random", "seed": 1}, {"order": "random", "seed": 2}, {"order": "starved"})


@pytest.mark.sweep(6)
@pytest.mark.parametrize("order", (*ORDERS[:2], ORDERS[3]), ids=str)
def test_the_look_back_is_right_in_any_order_and_has_the_same_bits(order):
    x = rows("cpu", (2, 512 * 67))
    kernel = small()
    found = scanned(kernel, x, **order)
    near(found, wanted_of(x), x)
    assert torch.equal(found, scanned(kernel, x))


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("reverse, exclusive", [(True, False), (True, True)])
def test_the_look_back_in_reverse(order, reverse, exclusive):
    x = rows("cpu", (3, 512 * 35 - 4))
    found = scanned(small(reverse, exclusive), x, **order)
    near(found, wanted_of(x, "sum", -1, reverse, exclusive), x)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("reverse, exclusive", [(False, True), (True, False)])
def test_the_ctas_of_a_cluster_are_right_in_any_order(order, reverse, exclusive):
    tile, way = RowTile(1, 64, 1, 2, 4, aligned=False), (False, reverse, exclusive)
    kernel = compile(
        ScanInCluster(InClusterConfig(tile, Fold("sum"), "fp32", *way, ctas=4)), "fp32", "sm_90a"
    )
    x = rows("cpu", (3, 1203))  # the last of four parts has nothing
    y = torch.full_like(x, torch.nan)
    simulate(kernel, x, y, 4, **order)
    near(y, wanted_of(x, "sum", -1, reverse, exclusive), x)


# each drops one thing that orders accesses: which of equal ones, its pattern, and what is instead
SYNC = r"^\s*bar(rier)?\.(cta\.)?sync\s[^;]*;"
WAIT = r"(setp\.\w+\.s64\s+%p\d+, %rd\d+), 429496729\d;"
FAULTS = {
    "the ticket is read before it is there": (0, SYNC, ""),
    "totals are read before they are there": (1, SYNC, ""),
    "the carry is read before it is there": (2, SYNC, ""),
    "a part's word is never left": (0, r"st\.relaxed\.gpu[^;]*;", ""),
    "a group's word is never left": (1, r"st\.relaxed\.gpu[^;]*;", ""),
    "a part's word is not waited for": (0, WAIT, r"\1, -1;"),
    "a group's word is not waited for": (2, WAIT, r"\1, -1;"),
    "all have the first ticket": (0, r"atom\.[\w.]*add\.u64\s+(%rd\d+), [^;]*;", r"mov.b64 \1, 0;"),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_look_back_is_found(fault):
    kernel, (which, pattern, instead) = small(), FAULTS[fault]
    at = [*re.finditer(pattern, kernel.ptx, flags=re.M)][which]
    ptx = kernel.ptx[: at.start()] + at.expand(instead) + kernel.ptx[at.end() :]
    mutant = Mutant(kernel.object_path, kernel.symbol, ptx)
    x = rows("cpu", (1, 512 * 35))
    for order in ORDERS:
        try:
            found = scanned(mutant, x, **order)
        except SimError:
            return
        if not torch.allclose(found.double(), wanted_of(x), atol=1e-3):
            return
    raise AssertionError(f"{fault}: nothing was found")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_100a", "sm_120a"])
def test_on_any_arch(name):
    with cutex.ops.simulated(name):
        x = rows("cpu", (2, 40_001), torch.bfloat16)
        near(cutex.scan(x, reverse=True), wanted_of(x, reverse=True), x)


BAD = [
    ({"x": 3}, TypeError, "x must be a torch.Tensor, got int"),
    ({"op": "prod"}, ValueError, "op='prod' is not one of sum, max, min"),
    ({"dim": 2}, ValueError, "dim=2: x has 2 dimensions"),
    ({"dim": None}, TypeError, "dim must be an int, got NoneType"),
    ({"reverse": 1}, TypeError, "reverse must be a bool, got int"),
    ({"out_dtype": torch.int32}, TypeError, "out_dtype=torch.int32 is not bfloat16"),
    ({"op": "max", "x": torch.zeros(2, requires_grad=True)}, ValueError, "x wants a gradient"),
]


@pytest.mark.parametrize("given, error, said", BAD)
def test_bad_input_is_one_sentence(given, error, said):
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=said) as found:
        cutex.scan(**({"x": torch.zeros(2, 8)} | given))
    assert "\n" not in str(found.value)
