"""Randomized cases of `cutex.scaled_grouped_mm`: groups, factors, data, reference and tolerance.

Rows of no group, and their factors, are NaN in the inputs, and the output is NaN before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutex.problem.grouped import EDGES
from cutex.problem.matmul import ACTIVATIONS
from cutex.problem.scaled import KEPT, PROMOTED_K, layouts
from cutex.problem.scaled.formats import RECIPES
from cutex.problem.scaled.quantization import Quantized, dequantize, quantize
from cutex.problem.truncation import largest_loss

KINDS = {
    "fp8_tensor": ("TensorWise", "TensorWise"),
    "fp8_row": ("RowWise", "RowWise"),
    "fp8_block": ("BlockWise1x128", "BlockWise128x128"),
    "mxfp8": ("BlockWise1x32", "BlockWise1x32"),
    "mxfp8_mxfp4": ("BlockWise1x32", "BlockWise1x32"),
    "mxfp4": ("BlockWise1x32", "BlockWise1x32"),
    "nvfp4": ("BlockWise1x16", "BlockWise1x16"),
}
FP32 = tuple(KINDS)[:3]  # whose factors are multiplied with in fp32
OWN = 2.0**-9  # of nvfp4, the own factor of all rows
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class ScaledGroupedProblem:
    """activation((a * factors)[rows of e] @ (b * factors)[e] + bias[e]) for each group e."""

    rows: tuple[int, ...]  # of each group
    n: int
    k: int
    recipe: str = "fp8_block"
    padded: bool = False  # rows are those of (E, M, K), with counts
    swizzled: bool = False  # factors that tensor cores read, each group's in chunks of its own
    rest: int = 0  # rows after those of all groups, or after the longest group's
    bias: bool = False
    activation: str | None = None
    dtype: torch.dtype = torch.bfloat16
    fast: bool = False  # of factors of tensors or rows: sums are the tensor cores'
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

        def sampled(rows: int) -> Tensor:
            x = torch.randn((rows, self.k), generator=g)
            sizes = [torch.randint(-4, 5, (n,), generator=g).float().exp2() for n in x.shape]
            return (x * sizes[0][:, None] * sizes[1]).bfloat16()

        own = torch.tensor(OWN) if of_rows.tensor_scale else None
        rows = [quantize(sampled(n), of_rows, tensor_scale=own) for n in self.rows]
        return rows, [quantize(sampled(self.n), of_matrices) for _ in self.rows]

    def inputs(self) -> dict[str, Any]:
        """The arguments of `cutex.scaled_grouped_mm`."""
        rows, matrices = self.operands()
        total = self.length * (len(self.rows) if self.padded else 1)
        a = self._of_groups([q.data for q in rows], total)
        b = torch.stack([q.data.view(torch.uint8) for q in matrices]).view(matrices[0].data.dtype)
        given: dict[str, Any] = {"b": b.mT}
        if self.recipe in FP32:
            given["scale_a"], given["scale_b"] = self._fp32_factors(rows, matrices, total)
        else:
            given["scale_a"], given["scale_b"] = self._block_factors(rows, matrices, total)
        if self.padded:
            a = a.unflatten(0, (len(self.rows), self.length))
        given["a"] = a
        if self.bias:
            g = torch.Generator().manual_seed(self.seed + 1)
            given["bias"] = torch.randn((len(self.rows), self.n), generator=g).bfloat16()
        return given

    def _of_groups(self, parts: list[Tensor], total: int) -> Tensor:
        """The rows of all groups at their places, the others of bytes that are NaN in fp8, E8M0
        and fp32."""
        like = parts[0].view(torch.uint8)
        found = torch.full((total, like.shape[1]), 0xFF, dtype=torch.uint8)
        for (begin, end), part in zip(self.spans(), parts, strict=True):
            found[begin:end] = part.view(torch.uint8)
        return found.view(parts[0].dtype)

    def _fp32_factors(self, rows: list[Quantized], matrices: list[Quantized], total: int) -> Any:
        of_b = torch.stack([q.scale for q in matrices])
        if self.recipe == "fp8_tensor":  # one of all rows
            return torch.tensor([0.5]), of_b[:, 0, 0]
        of_a = torch.full((total, rows[0].scale.shape[1]), math.nan)
        for (begin, end), q in zip(self.spans(), rows, strict=True):
            of_a[begin:end] = q.scale
        if self.recipe == "fp8_block":
            of_a, of_b = layouts.rows_contiguous(of_a), of_b.mT
        else:
            of_a, of_b = of_a[:, 0], of_b[:, :, 0]
        if self.padded:
            of_a = of_a.unflatten(0, (len(self.rows), self.length))
        return of_a, of_b

    def _block_factors(self, rows: list[Quantized], matrices: list[Quantized], total: int) -> Any:
        scales = [q.scale for q in rows]
        own = [q.tensor_scale for q in matrices]
        if self.swizzled:
            chunks = [layouts.swizzle(x).view(torch.uint8) for x in scales]
            of_a = torch.cat(chunks).view(scales[0].dtype)
            stacked = [layouts.swizzle(q.scale).view(torch.uint8) for q in matrices]
        else:
            of_a = self._of_groups(scales, total)
            if self.padded:
                of_a = of_a.unflatten(0, (len(self.rows), self.length))
            stacked = [q.scale.view(torch.uint8) for q in matrices]
        of_b = torch.stack(stacked).view(scales[0].dtype)
        if own[0] is None:
            return of_a, of_b
        return [of_a, torch.tensor([OWN])], [of_b, torch.stack([x for x in own if x is not None])]

    def run(self, device: str, function: Callable[..., Tensor]) -> str | None:
        """Call `function`, which is `cutex.scaled_grouped_mm` or a substitute; return a sentence on
        the first error of the result, or None."""
        given = {name: _moved(x, device) for name, x in self.inputs().items()}
        given["counts" if self.padded else "offs"] = self.edges.to(device)
        given |= {"activation": self.activation, "output_dtype": self.dtype}
        given |= {"use_fast_accum": True} if self.fast else {}
        return self.error(function(**given, **self.recipes).cpu())

    @property
    def recipes(self) -> dict[str, Any]:
        """The arguments that say what the factors are."""
        found: dict[str, Any] = {}
        for side, kind in zip("ab", KINDS[self.recipe], strict=True):
            own = RECIPES[self.recipe].a.tensor_scale
            found[f"scale_recipe_{side}"] = [kind, "TensorWise"] if own else kind
            if self.recipe not in FP32:
                found[f"swizzle_{side}"] = "SWIZZLE_32_4_4" if self.swizzled else "NO_SWIZZLE"
        return found

    def error(self, out: Tensor) -> str | None:
        """A sentence on the first element of `out` that is off by more than what rounding it and
        Hopper's sums of fp8 (truncation.py) can explain, or None."""
        rows, matrices = self.operands()
        biases = self.inputs().get("bias")
        flat = out.flatten(0, -2)
        for e, (begin, end) in enumerate(self.spans()):
            a, b = (dequantize(q, torch.float64) for q in (rows[e], matrices[e]))
            if self.recipe == "fp8_tensor":
                a = rows[e].data.double() * 0.5
            sums = a @ b.mT
            want = sums + (0 if biases is None else biases[e].double())
            block_k = None if self.fast or self.recipe not in FP32 else PROMOTED_K
            deviation = (a.square() @ b.square().mT).sqrt()
            kept = KEPT["gemm_fp8" if self.recipe in FP32 else "gemm_scaled"]
            lost = largest_loss(sums, deviation, self.k, kept, block_k) + 1e-30
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
            # what the result's type cannot hold may be an infinity
            limit[y.abs() + limit > torch.finfo(self.dtype).max] = math.inf
            found = flat[begin:end].double()
            bad = ~((found - y).abs() <= limit)  # a NaN too
            if bad.any():
                where = tuple(int(i) for i in bad.nonzero()[0])
                is_, due = float(found[where]), float(y[where])
                return f"group {e}, {where} is {is_:.6g}, not {due:.6g}, {int(bad.sum())} in all"
        return None


def _moved(x: Any, device: str) -> Any:
    return [_moved(y, device) for y in x] if isinstance(x, list) else x.to(device)


def draw(
    seed: int, largest: int = 150, most_groups: int = 5, recipes: tuple[str, ...] = FP32
) -> ScaledGroupedProblem:
    """A case sampled from `seed`: groups of up to `largest` rows, factors of one of `recipes`."""
    r = random.Random(seed)
    sizes = [n for n in EDGES if n <= largest]
    rows = [r.choice((*sizes, r.randint(0, largest))) for _ in range(r.randint(1, most_groups))]
    recipe = r.choice((*recipes[2:3], *recipes))
    activation = r.choice((None, None, "relu", "gated_silu"))
    whole = recipe == "fp8_block" or recipe not in FP32
    k = r.choice((128, 256, 384)) if whole else r.choice((16, 72, 200, 256))
    if recipe == "fp8_block":
        k -= r.choice((0, 0, 16, 80, 112))
    n = r.choice((8, 64, 72, 136, 2 * r.randint(1, 130)))
    fast = not whole and r.random() < 0.5
    return ScaledGroupedProblem(
        tuple(rows),
        n,
        k,
        recipe,
        padded=r.random() < 0.3,
        swizzled=r.random() < 0.5,
        rest=r.choice((0, 0, 5, 70)),
        bias=r.random() < 0.3,
        activation=activation,
        dtype=r.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
        fast=fast,
        seed=seed,
    )
