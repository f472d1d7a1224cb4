"""Randomized cases of `cutex.matmul` with a packed weight of 4 bits: data, reference, tolerance."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutex.problem.matmul import ACTIVATIONS
from cutex.problem.protocol import Check, Computation

KINDS = ("int4", "uint4", "mxfp4", "nvfp4")
GROUPS = (32, 64, 128, 256, None)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an ulp, relative
ROWS = (1, 2, 7, 8, 16, 17, 33, 64, 65, 100)


@dataclass(frozen=True)
class W4Problem(Computation):
    """activation(x @ w^T + bias) + residual, w (N, K) of 4 bits with scales of groups."""

    m: int
    n: int
    k: int
    kind: str = "int4"
    group: int | None = 128
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    activation: str | None = None
    residual: bool = False
    spread: bool = False  # rows of w of very different sizes, a hot row of x
    seed: int = 0

    @property
    def group_size(self) -> int:
        """The elements of K that share a scale."""
        fixed = {"mxfp4": 32, "nvfp4": 16}
        return fixed.get(self.kind, self.group or self.k)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        scales = self.n * -(-self.k // self.group_size) * (1 if "fp4" in self.kind else 2)
        return self.n * self.k // 2 + scales + self.dtype.itemsize * self.m * (self.n + self.k)

    @property
    def columns(self) -> int:
        """The columns of the result."""
        return self.n // 2 if (self.activation or "").startswith("gated") else self.n

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[Tensor, ...]:
        """x, the float weight, and bias and residual if there are any."""
        g = torch.Generator().manual_seed(self.seed + 1_000_003 * copy)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        x, w = normal(self.m, self.k), 0.05 * normal(self.n, self.k)
        if self.spread:
            w *= torch.exp2(torch.randint(-12, 3, (self.n, 1), generator=g).float())
            w[:, : self.k // 2] *= 2.0**-6
            x[torch.randint(self.m, (1,), generator=g)] *= 8
        more = [normal(self.n)] if self.bias else []
        more += [normal(self.m, self.columns)] if self.residual else []
        return (
            x.to(self.dtype).to(device),
            w.to(device),
            *(t.to(self.dtype).to(device) for t in more),
        )

    def outputs(self, device: str | torch.device = "cpu") -> tuple[Tensor]:
        shape = self.m, self.columns
        return (torch.full(shape, math.nan, dtype=self.dtype, device=device),)

    def run(self, device: str, pack: Callable[..., Any], matmul: Callable[..., Tensor]) -> str:
        """Pack and multiply; return a sentence on the first error of the result, or ""."""
        x, w, *rest = self.inputs(device)
        given = dict(zip(self.names, rest, strict=True))
        packed = pack(w, group_size=self.group, kind=self.kind, dtype=self.dtype)
        out = matmul(x, packed, activation=self.activation, **given)
        check = self.check(x, packed.dequantize(torch.float64), *rest, out)
        return "" if check.ok else check.message

    @property
    def names(self) -> list[str]:
        """The names of what is given beside x and w."""
        return ["bias"] * self.bias + ["residual"] * self.residual

    def reference(self, x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        """The result for the dequantized weight, in float64."""
        given = dict(zip(self.names, rest, strict=True))
        y = x.double() @ w.double().mT
        y = y + given["bias"].double() if self.bias else y
        y = ACTIVATIONS[self.activation](y)
        return y + given["residual"].double() if self.residual else y

    def check(self, *tensors: Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare the last of `tensors` with the product of x and the dequantized weight, the
        second of them.

        Within a rounding of the result, and what the weight's own rounding to the dtype of x gives
        at most by chance: each is off by up to half a unit, evenly spread, so the sum's deviation
        is that over the root of 3 times the root of the summed squares of the products, of which 6
        are allowed; and fp32's own of the sum.
        """
        x, w, *rest, out = tensors
        if out.shape != (self.m, self.columns) or out.dtype != self.dtype:
            message = f"the result has shape {tuple(out.shape)} and {out.dtype}"
            return Check(False, math.nan, 0.0, message)
        want = self.reference(x, w, *rest)
        squares = (x.double().square() @ w.double().square().mT).sqrt()
        loss = squares * (6 * UNIT[self.dtype] / 3**0.5 + 2.0**-20 * self.k**0.5)
        if want.shape != loss.shape:  # gated: of both columns, each times the other at most
            pre = (x.double() @ w.double().mT).abs() + (1 if self.bias else 0) * 4
            gate, up = loss[:, ::2], loss[:, 1::2]
            loss = 1.2 * (gate * (pre[:, 1::2] + up) + up * (pre[:, ::2] + gate))
        limit = loss * 1.2 + UNIT[self.dtype] * 2 * (want.abs() + 2.0**-10)
        error = (out.double() - want).abs()
        bad = ~(error <= limit)
        largest, allowed = float(error.max()), float(limit.max())
        if not bad.any():
            return Check(True, largest, allowed, f"within {allowed:.3g}")
        i, j = (int(v) for v in bad.nonzero()[0])
        message = (
            f"out[{i}, {j}] is {float(out[i, j]):g}, {float(want[i, j]):g} was due, within "
            f"{float(limit[i, j]):.3g}; {int(bad.sum())} of {bad.numel()} elements are wrong"
        )
        return Check(False, largest, allowed, message)


def draw(seed: int, largest: int = 300) -> W4Problem:
    """A case sampled from `seed`: every kind and group, odd sizes, epilogues."""
    r = random.Random(seed)
    kind, group = r.choice(KINDS), r.choice(GROUPS)
    step = {"mxfp4": 32, "nvfp4": 16}.get(kind, group or 40)
    activation = r.choice((None, None, None, "relu", "silu", "gated_silu"))
    n = r.choice((8, 64, 72, 136, r.randint(1, largest)))
    if activation == "gated_silu":
        n += n % 2
    return W4Problem(
        m=r.choice(ROWS),
        n=n,
        k=step * r.randint(1, max(1, 2 * largest // step)),
        kind=kind,
        group=group,
        dtype=r.choice(tuple(UNIT)),
        bias=r.random() < 0.3,
        activation=activation,
        residual=r.random() < 0.3,
        spread=r.random() < 0.3,
        seed=seed,
    )
