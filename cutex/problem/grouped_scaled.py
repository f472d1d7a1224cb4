"""Randomized cases of `cutex.scaled_grouped_mm`: groups, factors, data, reference and tolerance.

Rows of no group, and their factors, are NaN in the inputs, and the output is NaN before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cutex.problem.grouped import EDGES
from cutex.problem.matmul import ACTIVATIONS
from cutex.problem.scaled import KEPT, PROMOTED_K, layouts
from cutex.problem.scaled.formats import RECIPES
from cutex.problem.scaled.quantization import Quantized, dequantize, quantize

KINDS = {
    "fp8_tensor": ("TensorWise", "TensorWise"),
    "fp8_row": ("RowWise", "RowWise"),
    "fp8_block": ("BlockWise1x128", "BlockWise128x128"),
}
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class ScaledGroupedProblem:
    """activation((a * factors)[rows of e] @ (b * factors)[e] + bias[e]) for each group e."""

    rows: tuple[int, ...]  # of each group
    n: int
    k: int
    recipe: str = "fp8_block"
    padded: bool = False  # rows are those of (E, M, K), with counts
    rest: int = 0  # rows behind those of all groups, or behind the longest group's
    bias: bool = False
    activation: str | None = None
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def gated(self) -> bool:
        return (self.activation or "").startswith("gated")

    @property
    def length(self) -> int:
        """The rows of a, or with `padded` those of each group."""
        return max(1, max(self.rows) if self.padded else sum(self.rows)) + self.rest

    @property
    def edges(self) -> Tensor:
        rows = torch.tensor(self.rows)
        return (rows if self.padded else rows.cumsum(0)).int()

    def spans(self) -> list[tuple[int, int]]:
        """Where the rows of each group begin and end, among all rows."""
        ends = torch.tensor(self.rows).cumsum(0).tolist()
        pairs = enumerate(zip(ends, self.rows, strict=True))
        begins = [e * self.length if self.padded else end - n for e, (end, n) in pairs]
        return [(b, b + n) for b, n in zip(begins, self.rows, strict=True)]

    def operands(self) -> tuple[list[Quantized], list[Quantized]]:
        """The rows and the matrix (N, K) of each group, quantized. Rows, and eighths of K, differ
        in size, so that neighbouring factors do."""
        g = torch.Generator().manual_seed(self.seed)
        of_rows, of_matrices = RECIPES[self.recipe]

        def drawn(rows: int) -> Tensor:
            x = torch.randn((rows, self.k), generator=g)
            sizes = [torch.randint(-4, 5, (n,), generator=g).float().exp2() for n in x.shape]
            return (x * sizes[0][:, None] * sizes[1]).bfloat16()

        rows = [quantize(drawn(n), of_rows) for n in self.rows]
        return rows, [quantize(drawn(self.n), of_matrices) for _ in self.rows]

    def inputs(self) -> dict[str, Tensor]:
        """The arguments of `cutex.scaled_grouped_mm`."""
        rows, matrices = self.operands()
        total = self.length * (len(self.rows) if self.padded else 1)
        a = torch.full((total, self.k), math.nan).to(torch.float8_e4m3fn)
        scale = torch.full((total, max(1, -(-self.k // 128))), math.nan)
        tensorwise = self.recipe == "fp8_tensor"
        for (begin, end), q in zip(self.spans(), rows, strict=True):
            a[begin:end] = q.data
            if not tensorwise:
                scale[begin:end, : q.scale.shape[1]] = q.scale
        b = torch.stack([q.data for q in matrices]).mT
        of_b = torch.stack([q.scale for q in matrices])
        if self.recipe == "fp8_block":
            of_a, of_b = layouts.rows_contiguous(scale), of_b.mT
        else:
            of_a, of_b = scale[:, 0], of_b[:, :, 0]
            if tensorwise:  # one of all rows
                of_a, of_b = torch.tensor([0.5]), of_b[:, 0]
        if self.padded:
            a = a.unflatten(0, (len(self.rows), self.length))
            of_a = of_a if tensorwise else of_a.unflatten(0, (len(self.rows), self.length))
        given = {"a": a, "b": b, "scale_a": of_a, "scale_b": of_b}
        if self.bias:
            g = torch.Generator().manual_seed(self.seed + 1)
            given["bias"] = torch.randn((len(self.rows), self.n), generator=g).bfloat16()
        return given

    def run(self, device: str, function: Callable[..., Tensor]) -> str | None:
        """Call `function`, which is `cutex.scaled_grouped_mm` or a substitute; return a sentence on
        the first error of the result, or None."""
        given = {name: x.to(device) for name, x in self.inputs().items()}
        given["counts" if self.padded else "offs"] = self.edges.to(device)
        kinds = KINDS[self.recipe]
        recipes = {"scale_recipe_a": kinds[0], "scale_recipe_b": kinds[1]}
        options = {"activation": self.activation, "output_dtype": self.dtype}
        return self.error(function(**given, **recipes, **options).cpu())

    def error(self, out: Tensor) -> str | None:
        """A sentence on the first element of `out` that is off by more than what rounding it and
        Hopper's sums of fp8 (ScaledProblem.tolerance) can explain, or None."""
        rows, matrices = self.operands()
        biases = self.inputs().get("bias")
        flat = out.flatten(0, -2)
        for e, (begin, end) in enumerate(self.spans()):
            a, b = (dequantize(q, torch.float64) for q in (rows[e], matrices[e]))
            if self.recipe == "fp8_tensor":
                a = rows[e].data.double() * 0.5
            want = a @ b.mT + (0 if biases is None else biases[e].double())
            steps = -(-(min(self.k, PROMOTED_K) if self.recipe == "fp8_block" else self.k) // 32)
            deviation = (a.square() @ b.square().mT).sqrt()
            lost = 2.0 ** -KEPT["gemm_fp8"] * 6 * deviation * (34 / 3 * steps) ** 0.5 + 1e-30
            y = ACTIVATIONS[self.activation](want)
            if self.gated:  # the gate's slope is at most 1.1
                gate = torch.nn.functional.silu(want[:, 0::2]).abs()
                lost = (
                    1.2 * lost[:, 0::2] * want[:, 1::2].abs()
                    + (gate + lost[:, 0::2]) * lost[:, 1::2]
                )
            elif self.activation:
                lost = 1.2 * lost
            limit = UNIT[self.dtype] * (y.abs() + lost) + lost + 2.0**-20 * (y.abs() + 1e-3)
            found = flat[begin:end].double()
            bad = ~((found - y).abs() <= limit)
            if bad.any():
                where = tuple(int(i) for i in bad.nonzero()[0])
                is_, due = float(found[where]), float(y[where])
                return f"group {e}, {where} is {is_:.6g}, not {due:.6g}, {int(bad.sum())} in all"
        return None


def draw(seed: int, largest: int = 150, most_groups: int = 5) -> ScaledGroupedProblem:
    """A case drawn from `seed`: groups of up to `largest` rows, every kind of factors."""
    r = random.Random(seed)
    sizes = [n for n in EDGES if n <= largest]
    rows = [r.choice((*sizes, r.randint(0, largest))) for _ in range(r.randint(1, most_groups))]
    recipe = r.choice(("fp8_block", "fp8_block", *KINDS))
    activation = r.choice((None, None, "relu", "gated_silu"))
    k = r.choice((128, 256, 384)) if recipe == "fp8_block" else r.choice((16, 72, 200, 256))
    n = r.choice((8, 64, 72, 136, 2 * r.randint(1, 130)))
    return ScaledGroupedProblem(
        tuple(rows),
        n,
        k,
        recipe,
        padded=r.random() < 0.3,
        rest=r.choice((0, 0, 5, 70)),
        bias=r.random() < 0.3,
        activation=activation,
        dtype=r.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
        seed=seed,
    )
