"""Sums of rows by an index: in fp32, in one order, whatever the index is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import cutex
from cutex import ops
from cutex.compile import compile
from cutex.kernels.mixture.counting import CTAS
from cutex.kernels.mixture.listed import BITS, BUCKETS, Listed, ListedConfig
from cutex.ops.grouped.gathered import gathered_rows

bf16 = torch.bfloat16


@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [
        (600, 80, 40),
        (1, 8, 1),
        pytest.param(90, 12, 300, marks=pytest.mark.slow),
        pytest.param(700, 1032, 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_gradients_of_gathered_rows_are_added_up_in_fp32(
    device: str, arch: str, rows: int, columns: int, count: int
) -> None:
    """In bfloat16 a sum of ones ends at 256; to the second order, and in the same bits again."""
    place = "cuda" if device == "cuda" else "cpu"
    g = torch.Generator().manual_seed(rows)
    x = torch.randn((count, columns), generator=g).bfloat16().to(place).requires_grad_()
    index = torch.randint(0, count, (rows,), generator=g).int().to(place)
    index[: rows // 2] = count - 1
    dy = torch.randn((rows, columns), generator=g).bfloat16().to(place)
    dy[: rows // 2] = 1.0
    dy.requires_grad_()
    with ops.simulated(arch) if device == "sim" else nullcontext():
        y = gathered_rows(x, index)
        assert torch.equal(y, x[index])
        first = torch.autograd.grad(y, x, dy, create_graph=True)[0]
        (second,) = torch.autograd.grad(first, dy, x.detach())
        assert not gathered_rows(x[:0], index[:0]).numel()
    with ops.simulated(arch, order="random", seed=rows) if device == "sim" else nullcontext():
        (again,) = torch.autograd.grad(gathered_rows(x, index), x, dy)
    want = torch.zeros(count, columns, dtype=torch.float64, device=place)
    want.index_add_(0, index, dy.detach().double())
    assert torch.equal(first, again) and first.dtype == bf16
    assert bool(((first.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-4).all())
    assert torch.equal(second, x.detach()[index])


@pytest.mark.parametrize("order", ["fifo", pytest.param("random", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rows", "count"), [(5000, 300), (70, 256), (600, 90_000)])
def test_rows_are_listed_by_their_index_in_their_own_order(
    rows: int, count: int, order: str
) -> None:
    """Passes of 8 bits of an index: one, two and three; values that no row has."""
    g = torch.Generator().manual_seed(count)
    index = torch.randint(0, count, (rows,), generator=g).int()
    index[rows // 3 : rows // 2] = count - 1
    lists, spans = torch.full((2, rows), -7).int(), torch.full((count, 2), -7).int()
    totals = torch.full((CTAS, BUCKETS), -7).int()
    kernel = Listed(ListedConfig(-(-(count - 1).bit_length() // BITS)))
    compiled = compile(kernel, "int32", "sm_90a")
    given = index, lists[0], spans, lists[1], totals
    assert not cutex.simulate(compiled, *given, order=order, seed=rows).findings
    assert torch.equal(lists[0].long(), index.sort(stable=True).indices)
    known = index.sort().values
    for value in {0, int(known[0]), int(known[rows // 2]), count - 2, count - 1}:
        begin, end = (int(torch.searchsorted(known, value, right=r)) for r in (False, True))
        assert spans[value].tolist() == ([begin, end] if begin < end else [0, 0])
