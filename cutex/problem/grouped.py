"""Randomized cases of `cutex.grouped_mm`: groups, layouts, data, reference and tolerance.

Rows of no group hold NaN in the inputs, and the output is NaN before: what a kernel reads or writes
beside its groups shows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cutex.problem.matmul import ACTIVATIONS
from cutex.problem.protocol import Check, Computation

FORMS = ("rows", "padded", "sums")  # x (T, K), x (E, M, K) with counts, x (M, T) and w (T, N)
EDGES = (0, 0, 0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 129)  # rows of a group that find faults
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an ulp, relative


@dataclass(frozen=True)
class GroupedProblem(Computation):
    """activation(x[rows of e] @ w[e] + bias[e]) for each group e, or x[:, rows of e] @ w[rows of
    e]."""

    rows: tuple[int, ...]  # of each group
    n: int
    k: int  # or with "sums" M
    form: str = "rows"
    rest: int = 0  # rows after those of all groups; with "padded" after the longest group's
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = False  # w is a view of (E, N, K)
    before: int = 0  # elements in front of each row of x
    bias: bool = False
    activation: str | None = None
    seed: int = 0

    @property
    def length(self) -> int:
        """The rows of x, or with "padded" those of each group."""
        if self.form == "padded":
            return max(1, max(self.rows) + self.rest)
        return sum(self.rows) + self.rest

    @property
    def gated(self) -> bool:
        return (self.activation or "").startswith("gated")

    @property
    def shape(self) -> tuple[int, ...]:
        n = self.n // 2 if self.gated else self.n
        if self.form == "sums":
            return len(self.rows), self.k, n
        return (len(self.rows), self.length, n) if self.form == "padded" else (self.length, n)

    @property
    def flops(self) -> int:
        return 2 * sum(self.rows) * self.n * self.k

    @property
    def bytes(self) -> int:
        matrices = len(self.rows) * self.n * self.k
        return self.dtype.itemsize * (sum(self.rows) * (self.n + self.k) + matrices)

    @property
    def edges(self) -> Tensor:
        """The argument `offs`, or with "padded" `counts`."""
        rows = torch.tensor(self.rows)
        return (rows if self.form == "padded" else rows.cumsum(0)).int()

    def spans(self) -> list[tuple[int, int]]:
        """Where the rows of each group begin and end, among all rows."""
        ends = torch.tensor(self.rows).cumsum(0).tolist()
        if self.form == "padded":
            begins = [e * self.length for e in range(len(self.rows))]
        else:
            begins = [end - n for end, n in zip(ends, self.rows, strict=True)]
        return [(b, b + n) for b, n in zip(begins, self.rows, strict=True)]

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[Tensor, ...]:
        """x, w, and the bias if there is one."""
        g = torch.Generator().manual_seed(self.seed + 1_000_003 * copy)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g).to(self.dtype)

        groups, total = len(self.rows), self.length
        if self.form == "padded":
            total *= groups
        x = torch.full((total, self.before + self.k), math.nan, dtype=self.dtype)[:, self.before :]
        for begin, end in self.spans():
            x[begin:end] = normal(end - begin, self.k)
        if self.form == "sums":
            w = torch.full((total, self.n), math.nan, dtype=self.dtype)
            for begin, end in self.spans():
                w[begin:end] = normal(end - begin, self.n)
            return x.to(device).mT, w.to(device)
        matrices = (
            normal(groups, self.n, self.k) if self.transposed else normal(groups, self.k, self.n)
        )
        w = matrices.to(device).mT if self.transposed else matrices.to(device)
        given = x.to(device)
        if self.form == "padded":
            given = given.unflatten(0, (groups, self.length))
        return (given, w, normal(groups, self.n).to(device)) if self.bias else (given, w)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[Tensor]:
        return (torch.full(self.shape, math.nan, dtype=self.dtype, device=device),)

    def run(self, device: str, grouped_mm: Callable[..., Tensor]) -> str | None:
        """Call `grouped_mm`, which is `cutex.grouped_mm` or a substitute; return a sentence on the
        first error of the result, or None."""
        x, w, *bias = self.inputs(device)
        edges = {"counts" if self.form == "padded" else "offs": self.edges.to(device)}
        options = {"bias": bias[0]} if bias else {}
        if self.activation:
            options["activation"] = self.activation
        check = self.check(x, w, *bias, grouped_mm(x, w, **edges, **options))
        return None if check.ok else check.message

    def reference(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """The result in float64, NaN in the rows of no group."""
        out = torch.full(self.shape, math.nan, dtype=torch.float64, device=x.device)
        if self.form == "sums":
            for e, (begin, end) in enumerate(self.spans()):
                out[e] = x[:, begin:end].double() @ w[begin:end].double()
            return out
        flat, results = x.reshape(-1, x.shape[-1]).double(), out.view(-1, out.shape[-1])
        for e, (begin, end) in enumerate(self.spans()):
            y = flat[begin:end] @ w[e].double()
            y = y if bias is None else y + bias[e].double()
            results[begin:end] = ACTIVATIONS[self.activation](y)
        return out

    def check(self, *tensors: Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare the last of `tensors` with the reference: rounded once, and the sum of K products
        in fp32, whose terms are about 1 each.

        Rows of no group are not looked at: a caller that gives the output's memory does.
        """
        *inputs, out = tensors
        if out.shape != self.shape or out.dtype != self.dtype:
            message = f"the result has shape {tuple(out.shape)} and {out.dtype}"
            return Check(False, math.nan, 0.0, message)
        want = self.reference(*inputs)
        counts = want.isfinite()
        terms = max((1, *self.rows)) if self.form == "sums" else max(1, self.k)
        sums = 2.0**-22 * terms * (8 if self.gated else 2)
        error = (out.double() - want)[counts].abs() / (want[counts].abs() + 1)
        limit = 2 * UNIT[self.dtype] + sums
        worst = float(error.nan_to_num(math.inf).max()) if error.numel() else 0.0
        if worst <= limit:
            return Check(True, worst, limit, f"within {limit:.3g}")
        bad = ((out.double() - want).abs() / (want.abs() + 1)).nan_to_num(math.inf) > limit
        where = tuple(int(i) for i in (bad & counts).nonzero()[0])
        message = f"{where} is {float(out[where]):.6g}, not {float(want[where]):.6g}"
        return Check(False, worst, limit, message)


def draw(seed: int, largest: int = 150, most_groups: int = 6) -> GroupedProblem:
    """A case sampled from `seed`: groups of up to `largest` rows, and every layout and epilogue."""
    r = random.Random(seed)
    groups = r.randint(1, most_groups)
    sizes = [n for n in EDGES if n <= largest]
    rows = [r.choice((*sizes, r.randint(0, largest))) for _ in range(groups)]
    if r.random() < 0.2:  # one hot expert
        rows = [0] * groups
        rows[r.randrange(groups)] = r.randint(1, 2 * largest)
    form = r.choice(FORMS)
    activation = r.choice((None, None, None, "relu", "gelu", "gated_silu"))
    n, k = (r.choice((8, 64, 72, 136, r.randint(1, 170))) for _ in range(2))
    if form == "sums":
        rest, before = r.choice((0, 0, 5, 70)), r.choice((0, 0, 8, 3))
        dtype = r.choice(tuple(UNIT))
        return GroupedProblem(
            tuple(rows), n, k, form, rest=rest, dtype=dtype, before=before, seed=seed
        )
    if activation is not None and activation.startswith("gated"):
        n += n % 2
    return GroupedProblem(
        rows=tuple(rows),
        n=n,
        k=k,
        form=form,
        rest=r.choice((0, 0, 5, 70)),
        dtype=r.choice(tuple(UNIT)),
        transposed=r.random() < 0.5,
        before=r.choice((0, 0, 8, 3)),
        bias=r.random() < 0.3,
        activation=activation,
        seed=seed,
    )
