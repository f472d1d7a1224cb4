"""Drawn problems for cutex.matmul: how the operands lie, data, reference and tolerance.

The tolerance is twice the error of torch's own sequence of operations, each rounded to the dtype of
the result, and what tensor cores lose when they add up (they truncate: PTX leaves the precision of
the accumulation open; `MatmulProblem.truncation` says what is allowed and why).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cutlass import cute
from torch import Tensor

import cutex
from cutex.ops.plan import FLOAT8

GUARD = 5.0  # what memory around an operand holds
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "gated_silu": lambda x: F.silu(x[..., 0::2]) * x[..., 1::2],
    "gated_gelu": lambda x: F.gelu(x[..., 0::2]) * x[..., 1::2],
    "leaky": lambda x: F.leaky_relu(x, 0.125),
}


def leaky(x):
    """A function of a user's own, on DSL numbers; ACTIVATIONS holds the same of torch."""
    return cute.arch.fmax(x, 0.125 * x, nan=True)


DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, *FLOAT8, torch.float32)


@dataclass(frozen=True)
class View:
    """How matrices (.., R, C) lie in memory that is larger than they are."""

    transposed: bool = False
    before: int = 0  # elements in front of each row
    after: int = 0
    repeat: bool = False  # one entry for the whole batch, of stride 0

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        """Room for them, with a guard on every side."""
        *batch, rows, columns = shape
        if self.transposed:
            rows, columns = columns, rows
        kept = [1] * len(batch) if self.repeat else batch
        whole = (*kept, rows + 2, self.before + columns + self.after)
        return torch.full(whole, GUARD, device=device).to(dtype)

    def of(self, memory: Tensor) -> Tensor:
        """The matrices in it; of a repeated batch, its one entry."""
        x = memory[..., 1:-1, self.before : memory.shape[-1] - self.after]
        return x.mT if self.transposed else x


@dataclass(frozen=True)
class MatmulProblem:
    """activation(alpha * scales * (a @ b) + beta * out + bias) + residual."""

    m: int
    n: int
    k: int
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    dtype_b: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    a: View = View()
    b: View = View()
    out: View | None = None  # None: not given
    bias: str | None = None  # "row", "column"
    activation: str | None = None
    residual: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    scales: str | None = None  # "tensor", "each"
    amax: bool = False
    seed: int = 0

    @property
    def batch(self) -> tuple[int, ...]:
        return torch.broadcast_shapes(self.batch_a, self.batch_b)

    @property
    def gated(self) -> bool:
        return (self.activation or "").startswith("gated")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.batch, self.m, self.n // 2 if self.gated else self.n)

    def operands(self, device: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """a, b and the options of cutex.matmul, but for out."""
        g = torch.Generator(device).manual_seed(self.seed)

        def matrix(view: View, batch: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype):
            x = view.of(view.memory((*batch, *shape), dtype, device))
            x.copy_(torch.randn(x.shape, generator=g, device=device).to(dtype))
            return x.expand(*batch, *shape)

        def uniform(*shape: int, low: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return (torch.rand(shape, generator=g, device=device) + low).to(dtype)

        a = matrix(self.a, self.batch_a, (self.m, self.k), self.dtype)
        b = matrix(self.b, self.batch_b, (self.k, self.n), self.dtype_b)
        activation: Any = leaky if self.activation == "leaky" else self.activation
        options: dict[str, Any] = {"activation": activation, "alpha": self.alpha}
        if self.bias:
            shape = (self.n,) if self.bias == "column" else (self.m, 1)
            options["bias"] = uniform(*shape, low=-0.5, dtype=self.out_dtype)
        if self.residual:
            options["residual"] = uniform(*self.shape, low=-0.5, dtype=self.out_dtype)
        if self.scales:
            each = self.scales == "each"
            options["scale_a"] = uniform(self.m if each else 1, low=0.5)
            options["scale_b"] = uniform(self.n if each else 1, low=0.5)
        if self.amax:
            options["amax"] = torch.zeros(1, device=device)
        return a, b, options

    def run(self, device: str) -> str | None:
        """Calls cutex.matmul and says what is wrong with the result, or None."""
        a, b, options = self.operands(device)
        held = None
        if self.out is None:
            c = cutex.matmul(a, b, out_dtype=self.out_dtype, **options)
        else:
            memory = self.out.memory(self.shape, self.out_dtype, device)
            c = self.out.of(memory).fill_(torch.nan)
            if self.beta:
                g = torch.Generator(device).manual_seed(self.seed + 1)
                c.copy_(torch.randn(c.shape, generator=g, device=device))
            held, around = c.clone(), memory.clone()
            cutex.matmul(a, b, out=c, beta=self.beta, **options)
            self.out.of(around).copy_(c)
            if not torch.equal(memory, around) and not c.isnan().any():
                return "memory around out was written to"
        return self._check(a, b, options, held, c)

    def _check(
        self, a: Tensor, b: Tensor, options: dict[str, Any], held: Tensor | None, c: Tensor
    ) -> str | None:
        if c.shape != self.shape or c.dtype != self.out_dtype:
            return f"the result has shape {tuple(c.shape)} and {c.dtype}"
        if c.isnan().any():
            return f"{int(c.isnan().sum())} of {c.numel()} elements are NaN"
        if c.numel() == 0:
            return None
        want = self.reference(a, b, options, held, torch.float64)
        torchs = self.reference(a, b, options, held, self.out_dtype)
        error, torch_error = (c.double() - want).abs(), (torchs.double() - want).abs()
        limit = 2 * float(torch_error.max()) + self.truncation() + self.approximation
        worst = float(error.max())
        if worst > limit:
            where = tuple(int(i) for i in (error > limit).nonzero()[0])
            return f"{where} is off by {worst:.3g}, torch by {float(torch_error.max()):.3g}"
        if self.amax and abs(float(options["amax"]) - float(want.abs().max())) > limit:
            return f"amax is {float(options['amax']):.6g}, not {float(want.abs().max()):.6g}"
        return None

    def reference(
        self, a: Tensor, b: Tensor, options: dict[str, Any], held: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """In `dtype`, after a product in float64 or float32 that is rounded to it."""
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        if self.dtype is torch.float32 and wide is torch.float32:
            a, b = as_tf32(a), as_tf32(b)
        x = a.to(wide) @ b.to(wide)
        if self.scales:
            x = x * options["scale_a"].to(wide).view(-1, 1) * options["scale_b"].to(wide)
        x = x.to(dtype) * self.alpha
        if self.beta and held is not None:
            x = x + self.beta * held.to(dtype)
        if self.bias:
            x = x + options["bias"].to(dtype)
        x = ACTIVATIONS[self.activation](x)
        return x + options["residual"].to(dtype) if self.residual else x

    @property
    def approximation(self) -> float:
        """The largest error of the polynomial in cutex/device/epilogue/epilogue_ops.py."""
        return 3e-7 if "gelu" in (self.activation or "") else 0.0

    def truncation(self) -> float:
        """What tensor cores may lose in adding up K products, 32 bytes at a time.

        Hopper's fp8 steps align 32 products and the sum so far to the largest of them, cut each off
        13 bits below, and so the sum (docs/facts.md). A loss between 0 and one such unit, of either
        sign, has a mean square of a third; the root of the sum of all 34 a step, at the unit of the
        largest sum, is 1.8 times the largest error of 113 drawn problems. Other types keep the bits
        of fp32.
        """
        steps = -(-self.k * self.dtype.itemsize // 32)
        largest = 6 * max(self.k, 1) ** 0.5 * abs(self.alpha) * (2.25 if self.scales else 1)
        if self.dtype in FLOAT8:
            lost = 2.0**-13 * largest * (34 / 3 * steps) ** 0.5
        else:
            lost = 2.0**-23 * largest * steps
        return lost * 2.1 * largest if self.gated else lost  # each factor's error times the other


def as_tf32(x: Tensor) -> Tensor:
    """fp32 without its 13 low bits, which is what a tensor core reads."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def draw(seed: int, largest: float = 7, most_work: int = 2**21) -> MatmulProblem:
    """One problem, always the same for a seed: sizes up to 2^largest, every view, dtype, epilogue.

    most_work: M * N * K at most.
    """
    r = random.Random(seed)

    def size() -> int:
        kind = r.random()
        if kind < 0.15:
            return r.randint(1, 9)
        top = int(2 ** r.uniform(4, largest))
        return top if kind < 0.4 else max(8, top // 8 * 8)

    def view(repeat: bool = False) -> View:
        before, after = r.choice((0, 0, 0, 8, 16, 3)), r.choice((0, 0, 0, 8, 16, 5))
        return View(r.random() < 0.5, before, after, repeat and r.random() < 0.3)

    m, n, k = size(), size(), size()
    while m * n * k > most_work:
        m, n, k = size(), size(), size()
    if r.random() < 0.04:
        m, n, k = r.choice(((0, n, k), (m, 0, k), (m, n, 0)))
    batch = r.choice(((), (), (), (2,), (3,), (2, 2)))
    batch_b = r.choice((batch, batch, (), (1,) * len(batch)))
    dtype = r.choice(DTYPES)
    eight = dtype in FLOAT8
    out = view() if r.random() < 0.5 else None
    activation = r.choice((None, None, *ACTIVATIONS))
    gated = activation is not None and activation.startswith("gated")
    if gated:
        n += n % 2
    half = torch.float16 if not gated or k <= 64 else torch.bfloat16  # products would overflow
    return MatmulProblem(
        m=m,
        n=n,
        k=k,
        batch_a=batch,
        batch_b=batch_b,
        dtype=dtype,
        dtype_b=r.choice(FLOAT8) if eight else dtype,
        out_dtype=r.choice((torch.bfloat16, half, torch.float32)),
        a=view(repeat=bool(batch)),
        b=view(repeat=bool(batch_b)),
        out=out,
        bias=r.choice((None, None, "column", "column" if gated else "row")),
        activation=activation,
        residual=r.random() < 0.3,
        alpha=r.choice((1.0, 1.0, 0.5)),
        beta=r.choice((0.0, 0.75)) if out is not None and not gated else 0.0,
        scales=r.choice(("tensor", "each")) if eight else None,
        amax=r.random() < 0.1,
        seed=seed,
    )
