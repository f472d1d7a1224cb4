"""Rows of grouped products stored, or added, to rows of out by an index: right against float64, and
the other rows and the memory around as they were."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import cutex
from cutex import ops
from cutex.problem.grouped import UNIT, GroupedProblem, draw

ARCHS = ["sm_90a", "sm_100a"]
bf16 = torch.bfloat16
ORDERS = ("fifo", "eager", "starved", "peer-late", "random")


@dataclass
class Scatter:
    """A product of groups, and where its rows go."""

    problem: GroupedProblem
    memory: Tensor  # NaN, but for
    out: Tensor  # (S, N), a view of it
    given: dict[str, Any]  # the arguments of grouped_mm beside x, w and offs

    @property
    def x(self) -> Tensor:
        return self.problem.inputs(self.out.device)[0].nan_to_num(0)

    def expected(self) -> tuple[Tensor, Tensor]:
        """out in float64, and how far each element may be from it."""
        p, given, before = self.problem, self.given, self.out.double()
        index, x = given.get("index"), self.x
        _, w, *bias = p.inputs(self.out.device)
        terms = p.reference(x if index is None else x[index.long()], w, *bias)
        if (scale := given.get("row_scale")) is not None:
            terms = terms * scale[:, None].double()
        unit = 2.0**-24 if self.out.dtype is torch.float32 else UNIT[p.dtype]
        scales = 1.0 if scale is None else scale[: sum(p.rows), None].double().abs() + 1
        sums = 2.0**-22 * max(1, p.k) * (8 if p.gated else 2)
        want, size = before.clone(), before.abs()
        times = torch.ones(before.shape[0], device=before.device)
        error = torch.zeros_like(before)
        for r, to in enumerate(given["out_index"][: sum(p.rows)].tolist()):
            if not 0 <= to < len(want):
                continue
            of_row = sums * (terms[r].abs() + 1) * (scales if scale is None else scales[r])
            if given["add"]:
                want[to] += terms[r]
                size[to] += terms[r].abs()
                error[to] += of_row
                # NOTE: a term is rounded to out's dtype before it is added, and the sum after it
                times[to] += 2
            else:
                want[to], size[to], error[to] = terms[r], terms[r].abs(), of_row
        return want, error + 2 * times[:, None] * unit * size + 1e-30


def scatter(seed: int, device: str, largest: int = 150) -> Scatter:
    """A case sampled from `seed`."""
    r = random.Random(f"scatter {seed}")
    number = next(n for n in range(1000 * seed, 1000 * seed + 1000)
                  if draw(n, largest).form == "rows" and sum(draw(n, largest).rows))  # fmt: skip
    p = draw(number, largest)
    g = torch.Generator().manual_seed(seed)
    rows, n, add = p.length, p.shape[1], r.random() < 0.6
    dtype = torch.float32 if not p.gated and r.random() < 0.4 else p.dtype
    size = rows + r.choice((0, 1, 30))
    pitch, first = n + r.choice((0, 0, -n % 8 + 8, 3)), r.choice((0, 0, 8, 1))
    memory = torch.full((size + 2, pitch + first), math.nan, dtype=dtype)
    out = memory[1:-1, first : first + n]
    out.copy_(torch.randn(size, n, generator=g))
    if add:
        where = torch.randint(0, max(1, size // r.choice((1, 8))), (rows,), generator=g)
    else:
        where = torch.randperm(size, generator=g)[:rows]
    for bad in (-1, size, -(2**31), 2**31 - 1):
        if rows > 9 and r.random() < 0.5:
            where[r.randrange(rows)] = bad
    where[sum(p.rows) :] = 0  # rows of no group go nowhere, whatever the index says
    given: dict[str, Any] = {"activation": p.activation, "add": add, "out_index": where.int()}
    if p.bias:
        given["bias"] = p.inputs()[2]
    if r.random() < 0.5:
        given["row_scale"] = torch.randn(rows, generator=g)
    if r.random() < 0.4:
        given["index"] = torch.randint(0, rows, (rows,), generator=g).int()
    memory = memory.to(device)
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    return Scatter(p, memory, memory[1:-1, first : first + n], given)


def wrong(case: Scatter) -> str:
    """What is wrong with cutex.grouped_mm of a case; "" if nothing is."""
    p, out = case.problem, case.out
    want, error = case.expected()
    device = out.device
    edges, w = p.edges.to(device), p.inputs(device)[1]
    version = out._version
    y = cutex.grouped_mm(case.x, w, edges, out=out, **case.given)
    if y is not out or out._version == version:
        return "it is not out that is returned and counted as written"
    far = ~((out.double() - want).abs() <= error)
    if far.any():
        at = tuple(int(i) for i in far.nonzero()[0])
        return f"{at} is {float(out[at])}, not {float(want[at])} within {float(error[at]):.3g}"
    out.fill_(math.nan)
    return "" if case.memory.isnan().all() else "memory beside out was written"


@pytest.mark.parametrize("arch", ARCHS[:1])
def test_rows_are_added_to_rows_of_out(arch: str, device: str) -> None:
    with ops.simulated(arch) if device == "sim" else nullcontext():
        case = scatter(32, "cpu" if device == "sim" else "cuda", 70)
        assert case.given["add"]
        assert not (message := wrong(case)), f"{message}: {case.problem}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("arch", ARCHS)
def test_randomized_scatters_are_right(arch: str, device: str, seed: int) -> None:
    orders: dict[str, Any] = {"order": ORDERS[seed % len(ORDERS)], "seed": seed}
    with ops.simulated(arch, **orders) if device == "sim" else nullcontext():
        case = scatter(seed, "cpu" if device == "sim" else "cuda")
        assert not (message := wrong(case)), f"{message}: {case.problem} {case.given}"


@pytest.mark.gpu
@pytest.mark.parametrize("tenth", range(10))
def test_large_randomized_scatters_are_right(tenth: int) -> None:
    for seed in range(100 + 10 * tenth, 110 + 10 * tenth):
        case = scatter(seed, "cuda", 1000)
        assert not (message := wrong(case)), f"{message}: {case.problem}"


@pytest.mark.parametrize("fault", ["a row left out", "a row too many"])
def test_a_fault_of_one_row_is_told(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of these tests, on a stand-in for the product."""
    case = scatter(6, "cpu", 70)
    right, _ = case.expected()
    where = [int(i) for i in case.given["out_index"][: sum(case.problem.rows)]]
    to = next(i for i in where if 0 <= i < len(right))

    def faulty(*_: Any, out: Tensor, **__: Any) -> Tensor:
        before = out[to].clone()
        out.copy_(right)
        if fault == "a row left out":
            out[to] = before
        else:
            out[to] += right[to] - before
        return out

    monkeypatch.setattr(cutex, "grouped_mm", faulty)
    assert f"({to}, " in wrong(case)


X, W, OFFS = torch.zeros(6, 8, dtype=bf16), torch.zeros(2, 8, 16, dtype=bf16), [2, 6]
OUT, TO = torch.zeros(9, 16, dtype=bf16), torch.arange(6, dtype=torch.int32)
GATED = {"activation": "gated_silu"}
BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no index": (ValueError, "out and out_index are given together", {"out_index": None}),
    "no out": (ValueError, "out and out_index are given together", {"out": None}),
    "a list": (TypeError, "out must be a torch.Tensor, got list", {"out": [1]}),
    "int64": (TypeError, "out_index must be int32, got torch.int64", {"out_index": TO.long()}),
    "short": (ValueError, r"out_index must be \(6,\), one for each row, got \(5,\)", {
        "out_index": TO[:5]}),
    "dtype": (TypeError, "out must be bfloat16 or float32", {"out": OUT.half()}),
    "gated fp32": (TypeError, "out must be bfloat16 with this x and activation", {
        "out": OUT[:, :8].float(), **GATED}),
    "columns": (ValueError, r"out must be \(S, 16\), got \(9, 15\)", {"out": OUT[:, :15]}),
    "expanded": (ValueError, "rows or columns that share memory", {
        "out": OUT[:1].expand(9, 16)}),
    "apart": (ValueError, "out shares memory with an argument", {
        "x": OUT[:6, :8], "out": OUT}),
    "gradient": (ValueError, "out cannot be given where a gradient is wanted", {
        "x": X.clone().requires_grad_()}),
    "padded": (ValueError, "index, row_scale and out take x", {
        "x": X[None].expand(2, 6, 8), "offs": None,
        "counts": torch.tensor(OFFS, dtype=torch.int32)}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence(name: str) -> None:
    error, sentence, given = BAD[name]
    usual: dict[str, Any] = {"x": X, "w": W, "offs": torch.tensor(OFFS, dtype=torch.int32)}
    arguments = {**usual, "out": OUT, "out_index": TO, **given}
    with ops.simulated("sm_90a"), pytest.raises(error, match=sentence):
        cutex.grouped_mm(arguments.pop("x"), arguments.pop("w"), **arguments)


def test_nothing_is_written_for_no_rows() -> None:
    out = torch.ones(4, 16, dtype=bf16)
    with ops.simulated("sm_90a"):
        none = torch.zeros(2, dtype=torch.int32)
        y = cutex.grouped_mm(X[:0], W, none, out=out, out_index=TO[:0])
    assert y is out and bool((out == 1).all())


def test_a_compiled_call_refuses_what_it_would_read_and_write() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def layer(x: Tensor, w: Tensor, offs: Tensor, out: Tensor, to: Tensor) -> Tensor:
        return cutex.grouped_mm(x, w, offs, out=out, out_index=to)

    whole = torch.ones(8, 16, dtype=bf16)
    w = torch.ones(2, 16, 16, dtype=bf16)
    offs, to = torch.tensor([2, 4], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    with ops.simulated("sm_90a"), pytest.raises(Exception, match="out shares memory"):
        layer(whole[:4], w, offs, whole[2:], to)


@pytest.mark.slow
def test_torch_compile_sees_the_write() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: Tensor, w: Tensor, offs: Tensor, out: Tensor, to: Tensor) -> Tensor:
        return cutex.grouped_mm(x, w, offs, out=out, out_index=to, add=True) * 2

    case = scatter(6, "cpu", 70)
    p, out = case.problem, case.out
    terms = p.inputs()[1]
    with ops.simulated("sm_90a"):
        once = cutex.grouped_mm(
            case.x, terms, p.edges, out=out.clone(), out_index=case.given["out_index"], add=True
        )
        kept = out.clone()
        y = layer(case.x, terms, p.edges, kept, case.given["out_index"])
    assert torch.equal(y, 2 * kept) and torch.allclose(kept, once, atol=0.1, rtol=0.02)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_another_index() -> None:
    problem = GroupedProblem((100, 0, 300, 5), 264, 136, rest=95)
    x, w = problem.inputs("cuda")
    x, offs = x.nan_to_num(1.0), problem.edges.cuda()
    out = torch.zeros(500, 264, dtype=bf16, device="cuda")
    index = torch.arange(500, dtype=torch.int32, device="cuda")
    cutex.grouped_mm(x, w, offs, out=out, out_index=index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cutex.grouped_mm(x, w, offs, out=out, out_index=index)
    rows = cutex.grouped_mm(x, w, offs)[:405]
    for _ in range(3):
        index.copy_(torch.randperm(500))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out[index[:405].long()], rows)
        assert bool(out[index[405:].long()].isnan().all())
