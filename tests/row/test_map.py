"""A user's own function over tensors: any number of them, of any strides."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from cutlass import Float32, cute
from row_calls import rows

import cutex
from cutex.ops.row import launches

map_module = import_module("cutex.ops.row.map")  # not the function of that name
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


def gated(a, b):
    return a / (1 + cute.math.exp(-a)) * b


def gated_in_torch(a, b):
    return torch.nn.functional.silu(a.double()) * b.double()


def twice(a):
    return 2 * a


@cute.jit
def clipped(a):
    found = a
    if a < 0:
        found = a / 8
    return found


def near(found, wanted, dtype):
    assert found.dtype == dtype and found.shape == wanted.shape
    assert ((found.double() - wanted).abs() <= ROUNDING[dtype] * (wanted.abs() + 2**-6)).all()


SHAPES = [
    ((5, 33), (5, 33)),
    ((2, 3, 40), (40,)),
    ((2, 3, 40), (3, 1)),
    ((3000,), ()),
    ((4, 1, 7), (3, 1)),
    ((1,), (1, 1)),
]


@pytest.mark.sweep(96)
@pytest.mark.parametrize("one", ROUNDING)
@pytest.mark.parametrize("other", ROUNDING)
@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes_broadcast_and_dtypes_mix(device, shapes, one, other):
    a, b = rows(device, shapes[0], one), rows(device, shapes[1], other, 1)
    near(cutex.map(gated, a, b), gated_in_torch(a, b), torch.promote_types(one, other))


@pytest.mark.slow
def test_strided_views_and_their_order(device):
    whole = rows(device, (6, 10, 24), torch.bfloat16)
    views = whole.mT, whole.permute(2, 0, 1), whole[:, 1::2, 3:19], whole[::2, :, ::3], whole[1, 1:]
    for x in views:
        found = cutex.map(twice, x)
        assert torch.equal(found, 2 * x)
    assert cutex.map(twice, whole.permute(2, 0, 1)).stride() == whole.permute(2, 0, 1).stride()
    left, right = rows(device, (24, 16)), rows(device, (16, 24), seed=1).mT
    near(cutex.map(gated, left, right), gated_in_torch(left, right), torch.float32)


def test_any_number_of_tensors(device):
    given = [rows(device, (3, 20), seed=i) for i in range(5)]
    found = cutex.map(lambda a, b, c, d, e: a + 2 * b + 4 * c + 8 * d + 16 * e, *given)
    wanted = sum(2**i * x.double() for i, x in enumerate(given))
    near(found, wanted, torch.float32)
    assert torch.equal(
        cutex.map(lambda a, b: a - b, given[0], given[0]), torch.zeros(3, 20, device=device)
    )


def test_a_function_that_branches_and_special_values(device):
    x = rows(device, (7, 9))
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    wanted = torch.where(x < 0, x / 8, x)
    torch.testing.assert_close(cutex.map(clipped, x), wanted, rtol=0, atol=0, equal_nan=True)


def test_the_dtype_of_the_result(device):
    x = rows(device, (5, 24), torch.bfloat16)
    near(cutex.map(twice, x, out_dtype=torch.float32), 2 * x.double(), torch.float32)
    near(cutex.map(lambda a: 1.5, x), torch.full_like(x, 1.5).double(), torch.bfloat16)


def test_what_a_function_closes_over_is_part_of_it(device, monkeypatch):
    x = rows(device, (4, 8))
    for factor in (2.0, 3.0, 2.0):
        assert torch.equal(cutex.map(lambda a, f=factor: a * f, x), x * factor)
    asked = []
    kernel_for = launches.kernel_for
    monkeypatch.setattr(launches, "kernel_for", lambda *a: asked.append(a) or kernel_for(*a))
    for _ in range(2):
        cutex.map(gated, x, x.clone())
    assert len(asked) == 1  # the second call finds its plan


def test_nothing_in_nothing_out(device):
    x = rows(device, (0, 5))
    assert cutex.map(twice, x).shape == (0, 5)
    assert cutex.map(gated, x, rows(device, (5,))).shape == (0, 5)


def test_transforms_without_a_rule_are_one_sentence(device):
    """torch would answer forward differentiation with zeros."""
    x = torch.randn(4, 8, device=device)
    with pytest.raises(NotImplementedError, match="no forward differentiation"):
        torch.func.jvp(lambda y: cutex.map(lambda a: a * 2, y), (x,), (x,))
    with pytest.raises(NotImplementedError, match=r"no rule for torch\.vmap"):
        torch.vmap(lambda y: cutex.map(lambda a: a * 2, y))(x)


def test_torch_compile_takes_it_whole(device):
    x = rows(device, (4, 24))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        return cutex.map(gated, x + 1, x) + cutex.map(lambda a: a * 3, x)

    near(step(x), gated_in_torch(x + 1, x) + 3 * x.double(), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_100a", "sm_120a"])
def test_on_any_arch(name):
    with cutex.ops.simulated(name):
        a, b = rows("cpu", (5, 999), torch.bfloat16), rows("cpu", (999,), seed=1)
        near(cutex.map(gated, a, b), gated_in_torch(a, b), torch.float32)


@pytest.mark.gpu
@pytest.mark.slow
def test_large_ones():
    for shape, view in (((40_000, 5000), (40_000, 5000)), ((1 << 27,), (1 << 27,))):
        x = torch.randn(shape, device="cuda").bfloat16()
        assert torch.equal(cutex.map(twice, x.view(view)), 2 * x.view(view))


BAD = [
    ((twice,), {}, TypeError, "map takes a function and at least one tensor"),
    ((twice, 3), {}, TypeError, "tensor 0 must be a torch.Tensor, got int"),
    ((twice, torch.zeros(3).long()), {}, TypeError, "tensor 0 must be of bfloat16, float16"),
    ((3, torch.zeros(3)), {}, TypeError, "fn=3 must be a Python function of 1 DSL Float32"),
    ((gated, torch.zeros(3)), {}, TypeError, "must be a Python function of 1 DSL Float32"),
    ((gated, torch.zeros(3), torch.zeros(4)), {}, ValueError, r"shapes \(3,\), \(4,\) do not"),
    ((twice, torch.zeros(3, requires_grad=True)), {}, ValueError, "tensor 0 wants a gradient"),
    ((twice, torch.zeros(3)), {"out_dtype": torch.int32}, TypeError, "out_dtype=torch.int32"),
    ((lambda a: None, torch.zeros(3)), {}, TypeError, "returns None, not a number"),
]


@pytest.mark.parametrize("given, options, error, said", BAD)
def test_bad_input_is_one_sentence(given, options, error, said):
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=said) as found:
        cutex.map(*given, **options)
    assert "\n" not in str(found.value)


def test_a_number_of_the_dsl_is_what_a_function_gets(device, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path))  # a kernel found there is not traced
    seen = []
    cutex.map(lambda a: seen.append(type(a)) or a, rows(device, (3,)))
    assert seen and all(issubclass(kind, Float32) for kind in seen)


def test_dimensions_are_merged_while_32_bits_count_them():
    x = torch.empty((1 << 20, 4096), device="meta")
    assert map_module._merged([x], x.shape) == [(1 << 20, (4096,)), (4096, (1,))]
    assert map_module._merged([x[:1000]], (1000, 4096)) == [(4_096_000, (1,))]
    long = torch.empty(1, dtype=torch.bfloat16).expand(1 << 31)
    with cutex.ops.simulated("sm_90a"), pytest.raises(ValueError, match="at most 2147483647"):
        cutex.map(twice, long)
