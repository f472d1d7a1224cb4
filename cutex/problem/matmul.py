"""Randomized cases of `cutex.matmul`: layouts of the operands, data, reference and tolerance.

The tolerance is twice the error of torch's own sequence of operations, each rounded to the dtype of
the result, plus the loss of tensor cores in adding up (they truncate: PTX leaves the precision of
the accumulation open; `MatmulProblem.truncation` bounds it, with the reason).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutex.problem.protocol import Check, Computation

GUARD = 5.0  # the value of the memory around an operand
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


def leaky(x: Any) -> Any:
    """A user's own activation function, on DSL numbers; ACTIVATIONS holds the same for torch."""
    from cutlass import cute

    return cute.arch.fmax(x, 0.125 * x, nan=True)


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, *FLOAT8, torch.float32)


@dataclass(frozen=True)
class View:
    """The layout of matrices (.., R, C) in memory that is larger than they are."""

    transposed: bool = False
    before: int = 0  # elements in front of each row
    after: int = 0
    repeat: bool = False  # one entry for the whole batch, of stride 0

    def memory(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device
    ) -> Tensor:
        """The memory for the matrices, with a guard on every side."""
        *batch, rows, columns = shape
        if self.transposed:
            rows, columns = columns, rows
        kept = [1] * len(batch) if self.repeat else batch
        whole = (*kept, rows + 2, self.before + columns + self.after)
        return torch.full(whole, GUARD, device=device).to(dtype)

    def of(self, memory: Tensor) -> Tensor:
        """The matrices in `memory`; of a repeated batch, its single entry."""
        x = memory[..., 1:-1, self.before : memory.shape[-1] - self.after]
        return x.mT if self.transposed else x


@dataclass(frozen=True)
class MatmulProblem(Computation):
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

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.batch) * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        kept_a, kept_b = (
            1 if view.repeat else math.prod(batch)
            for view, batch in ((self.a, self.batch_a), (self.b, self.batch_b))
        )
        read = kept_a * self.m * self.dtype.itemsize + kept_b * self.n * self.dtype_b.itemsize
        return read * self.k + math.prod(self.shape) * self.out_dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs: the arguments of `cutex.matmul` that are tensors, without
        out."""
        given = {
            "bias": self.bias,
            "residual": self.residual,
            "scale_a": self.scales,
            "scale_b": self.scales,
            "amax": self.amax,
        }
        return ("a", "b", *(name for name, wanted in given.items() if wanted))

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[Tensor, ...]:
        """The input tensors, in the order of `names`."""
        g = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy)

        def matrix(
            view: View, batch: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
        ) -> Tensor:
            x = view.of(view.memory((*batch, *shape), dtype, device))
            x.copy_(torch.randn(x.shape, generator=g, device=device).to(dtype))
            return x.expand(*batch, *shape)

        def uniform(*shape: int, low: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return (torch.rand(shape, generator=g, device=device) + low).to(dtype)

        tensors = [
            matrix(self.a, self.batch_a, (self.m, self.k), self.dtype),
            matrix(self.b, self.batch_b, (self.k, self.n), self.dtype_b),
        ]
        if self.bias:
            shape = (self.n,) if self.bias == "column" else (self.m, 1)
            tensors.append(uniform(*shape, low=-0.5, dtype=self.out_dtype))
        if self.residual:
            tensors.append(uniform(*self.shape, low=-0.5, dtype=self.out_dtype))
        if self.scales:
            each = self.scales == "each"
            tensors.append(uniform(self.m if each else 1, low=0.5))
            tensors.append(uniform(self.n if each else 1, low=0.5))
        if self.amax:
            tensors.append(torch.zeros(1, device=device))
        return tuple(tensors)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[Tensor]:
        """The output in its view of guarded memory: NaN, or random data if beta scales it."""
        view = self.out or View()
        out = view.of(view.memory(self.shape, self.out_dtype, device)).fill_(torch.nan)
        if self.beta:
            g = torch.Generator(device).manual_seed(self.seed + 1)
            out.copy_(torch.randn(out.shape, generator=g, device=device))
        return (out,)

    def run(self, device: str, matmul: Callable[..., Tensor]) -> str | None:
        """Call `matmul`, which is `cutex.matmul` or a substitute; return a sentence on the first
        error of the result, or None."""
        inputs = self.inputs(device)
        options = dict(zip(self.names, inputs, strict=True))
        options.update(activation=self.function, alpha=self.alpha)
        a, b = options.pop("a"), options.pop("b")
        if self.out is None:
            out = matmul(a, b, out_dtype=self.out_dtype, **options)
        else:
            (out,) = self.outputs(device)
            memory = out._base
            before = memory.clone()
            matmul(a, b, out=out, beta=self.beta, **options)
            self.out.of(before).copy_(out)
            if not torch.equal(memory, before) and not out.isnan().any():
                return "memory around out was written to"
        check = self.check(*inputs, out)
        return None if check.ok else check.message

    @property
    def function(self) -> Any:
        """The activation in the form that `cutex.matmul` takes."""
        return leaky if self.activation == "leaky" else self.activation

    def check(self, *tensors: Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare out, the last of `tensors`, with the reference in float64: its error is at most
        twice that of torch's own operations, plus the bounds `truncation` and `approximation`."""
        *inputs, c = tensors
        given = dict(zip(self.names, inputs, strict=True))

        def fail(message: str, error: float = math.nan, limit: float = 0.0) -> Check:
            return Check(False, error, limit, message)

        if c.shape != self.shape or c.dtype != self.out_dtype:
            return fail(f"the result has shape {tuple(c.shape)} and {c.dtype}")
        if c.isnan().any():
            return fail(f"{int(c.isnan().sum())} of {c.numel()} elements are NaN")
        if c.numel() == 0:
            return Check(True, 0.0, 0.0, "empty")
        held = self.outputs(c.device)[0] if self.beta else None
        want = self.reference(given, held, torch.float64)
        torchs = self.reference(given, held, self.out_dtype)
        error, torch_error = (c.double() - want).abs(), (torchs.double() - want).abs()
        limit = 2 * float(torch_error.max()) + self.truncation() + self.approximation
        worst = float(error.max())
        if worst > limit:
            where = tuple(int(i) for i in (error > limit).nonzero()[0])
            by = f"off by {worst:.3g}, torch by {float(torch_error.max()):.3g}"
            return fail(f"{where} is {by}", worst, limit)
        largest = float(want.abs().max())
        if self.amax and abs(float(given["amax"]) - largest) > limit:
            return fail(f"amax is {float(given['amax']):.6g}, not {largest:.6g}", worst, limit)
        return Check(True, worst, limit, f"within {limit:.3g}")

    def reference(
        self, given: Mapping[str, Tensor], held: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The result in `dtype`, from a product in float64 or float32 that is rounded to it.

        given: the inputs by name. held: the former content of out.
        """
        a, b = given["a"], given["b"]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        if self.dtype is torch.float32 and wide is torch.float32:
            a, b = as_tf32(a), as_tf32(b)
        x = a.to(wide) @ b.to(wide)
        if self.scales:
            x = x * given["scale_a"].to(wide).view(-1, 1) * given["scale_b"].to(wide)
        x = x.to(dtype) * self.alpha
        if self.beta and held is not None:
            x = x + self.beta * held.to(dtype)
        if self.bias:
            x = x + given["bias"].to(dtype)
        x = ACTIVATIONS[self.activation](x)
        return x + given["residual"].to(dtype) if self.residual else x

    @property
    def approximation(self) -> float:
        """The largest error of the polynomial in cutex/device/epilogue/epilogue_ops.py."""
        return 3e-7 if "gelu" in (self.activation or "") else 0.0

    def truncation(self) -> float:
        """The largest error that tensor cores may make in adding up K products, 32 bytes at a time.

        Hopper's fp8 steps align 32 products and the sum so far to the largest of them, truncate
        each 13 bits below it, and then the sum (docs/facts/matmul.md#hopper-tensor-core-fp8). A
        loss between 0 and one such unit, of either sign, has a mean square of a third; the root
        of the sum of all 34 per step, at the unit of the largest sum, is 1.8 times the largest
        error of 113 randomized cases. Other types keep the bits of fp32.
        """
        steps = -(-self.k * self.dtype.itemsize // 32)
        largest = 6 * max(self.k, 1) ** 0.5 * abs(self.alpha) * (2.25 if self.scales else 1)
        if self.dtype in FLOAT8:
            lost = 2.0**-13 * largest * (34 / 3 * steps) ** 0.5
        else:
            lost = 2.0**-23 * largest * steps
        return lost * 2.1 * largest if self.gated else lost  # each factor's error times the other


def as_tf32(x: Tensor) -> Tensor:
    """fp32 without its 13 low bits, as a tensor core reads it."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def draw(seed: int, largest: float = 7, most_work: int = 2**21) -> MatmulProblem:
    """A case sampled from `seed`: sizes up to 2^largest, every view, dtype and epilogue.

    most_work: the limit of M * N * K.
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
