"""The operations that an epilogue runs on the product, in fp32 registers, before it is stored.

An operation is a frozen dataclass, part of the compile key. `arguments` lists its host arguments;
`apply` changes a fragment whose coordinates are known, or returns another. Operations run in the
order given:

    (Alpha(), Bias("column", "bf16"), Activation("gelu"), Add("residual", "bf16"))

Loads are clamped to the matrix instead of guarded: elements outside of it are never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.base_dsl import BaseDSL

from cutex.compile import Argument, Operand, Scalar
from cutex.compile.user_function import UserFunction, arguments_taken

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
MODERATE = (
    64  # the largest power of two of a factor that no sum of products of fp8 is too large for
)


class Fragment(NamedTuple):
    """The values of a tile that one thread holds: R rows by C columns, not always adjacent."""

    values: cute.Tensor  # (R, C) fp32 in registers
    rows: tuple[Int32, ...]  # R of M
    columns: tuple[Int32, ...]  # C of N
    batch: Int32 | int
    bounds: tuple[Int32, Int32]  # (M, N)
    run: int  # columns in turn that are neighbours: a power of two that divides the first's index
    own: bool = False  # a matrix that is out as well is read within the bounds alone

    @property
    def safe_rows(self) -> tuple[Int32, ...]:
        return tuple(cutlass.min(r, self.bounds[0] - 1) for r in self.rows)

    @property
    def safe_columns(self) -> tuple[Int32, ...]:
        return tuple(cutlass.min(c, self.bounds[1] - 1) for c in self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    def load_width(self, dtype: type[cutlass.Numeric]) -> int:
        """The number of neighbouring elements that one load, of up to 16 bytes, brings."""
        return min(self.run, 128 // dtype.width)

    def map(self, function: Callable[[Float32], Float32]) -> None:
        for r in range(len(self.rows)):
            for c in range(len(self.columns)):
                self.values[r, c] = function(self.values[r, c])


class Preloaded(NamedTuple):
    """A matrix operand of `Add` whose values for this fragment are in registers already."""

    values: cute.Tensor  # (R, C), as of the fragment


@dataclass(frozen=True)
class Alpha:
    """x * alpha, where alpha is a host number."""

    def arguments(self) -> tuple[Argument, ...]:
        return (Scalar("alpha"),)

    def apply(self, x: Fragment, alpha: Float32) -> None:
        x.map(lambda v: v * alpha)


@dataclass(frozen=True)
class Scale:
    """x * scale, fp32 on the device: one number for each "row" or "column", or one for the
    "tensor"."""

    name: str
    by: str = "tensor"

    def arguments(self) -> tuple[Argument, ...]:
        size = {"row": "m", "column": "n", "tensor": "one"}[self.by]
        operand = Operand(self.name, (size,), "fp32", contiguous=None, aligned=False, whole=False)
        return (operand,)

    def apply(self, x: Fragment, scale: cute.Tensor) -> None:
        if self.by == "tensor":
            one = scale[0]
            x.map(lambda v: v * one)
        else:
            _combine(x, scale, self.by, lambda v, s: v * s)


@dataclass(frozen=True)
class Scales:
    """x * scale_a * scale_b, fp32 on the device: for each "row", and each "column", or the
    "tensor".

    NOTE: a huge factor beside a tiny one must not take x, a sum of products of fp8, out of fp32's
    range on the way to their product, which may be within it.
    """

    a: str = "tensor"
    b: str = "tensor"

    def arguments(self) -> tuple[Argument, ...]:
        return (*Scale("scale_a", self.a).arguments(), *Scale("scale_b", self.b).arguments())

    def apply(self, x: Fragment, scale_a: cute.Tensor, scale_b: cute.Tensor) -> None:
        of_rows = [scale_a[r] for r in (x.safe_rows if self.a == "row" else (0,))]
        of_columns = [scale_b[c] for c in (x.safe_columns if self.b == "column" else (0,))]
        if self.a == "row" and self.b == "column":
            _scale(x.values, of_rows, of_columns)
            return
        found = [[_in_range(a, b) for b in of_columns] for a in of_rows]
        rows, columns = x.shape
        for r in range(rows):
            for c in range(columns):
                for factor in found[r % len(of_rows)][c % len(of_columns)]:
                    x.values[r, c] = x.values[r, c] * factor


@cute.jit
def _scale(
    values: cute.Tensor,
    of_rows: cutlass.Constexpr[list[Float32]],
    of_columns: cutlass.Constexpr[list[Float32]],
) -> None:
    """Multiply each of `values` (R, C) with its row's factor and its column's: one after the other
    where those of the shorter side, which come first, are moderate."""
    by_rows = len(of_rows) <= len(of_columns)
    moderate = cutlass.Boolean(True)
    for s in of_rows if by_rows else of_columns:
        moderate = moderate & (_magnitude(s) <= 2.0**MODERATE)
        moderate = moderate & (_magnitude(s) >= 2.0**-MODERATE)
    if moderate:
        for r in cutlass.range_constexpr(len(of_rows)):
            for c in cutlass.range_constexpr(len(of_columns)):
                pair = (of_rows[r], of_columns[c]) if by_rows else (of_columns[c], of_rows[r])
                values[r, c] = values[r, c] * pair[0] * pair[1]
    else:
        for r in cutlass.range_constexpr(len(of_rows)):
            for c in cutlass.range_constexpr(len(of_columns)):
                pair = _in_range(of_rows[r], of_columns[c])
                values[r, c] = values[r, c] * pair[0] * pair[1]


def _magnitude(x: Float32) -> Float32:
    return Float32(cutlass.select_(x < 0.0, -x, x))


def _in_range(a: Float32, b: Float32) -> tuple[Float32, Float32]:
    """Two numbers, to multiply with one after the other as with a and b: a * b and 1 if one of them
    is below 1 and the other is not."""
    below = [Int32((s < 1.0) & (s > -1.0)) for s in (a, b)]
    apart = below[0] != below[1]
    return (
        Float32(cutlass.select_(apart, a * b, a)),
        Float32(cutlass.select_(apart, Float32(1.0), b)),
    )


@dataclass(frozen=True)
class Bias:
    """x + bias, with one number for each "row" or each "column".

    whole: base and length are multiples of 16 bytes, so that one load brings several neighbours.
    """

    by: str = "column"
    dtype: str = "bf16"
    whole: bool = False

    def arguments(self) -> tuple[Argument, ...]:
        size = ("m",) if self.by == "row" else ("n",)
        return (Operand("bias", size, self.dtype, aligned=self.whole, whole=self.whole),)

    def apply(self, x: Fragment, bias: cute.Tensor) -> None:
        width = x.load_width(bias.element_type) if self.whole else 1
        if width == 1:
            _combine(x, bias, self.by, lambda v, b: v + b)
            return
        columns = x.safe_columns
        for c in range(0, len(columns), width):
            for e, value in enumerate(_neighbours(bias, columns[c], width)):
                for r in range(len(x.rows)):
                    x.values[r, c + e] = x.values[r, c + e] + value


@dataclass(frozen=True)
class Add:
    """x + matrix, or x + beta * matrix with `beta`; the matrix has the shape of the output.

    whole: its rows are contiguous, and N, base and the other strides are multiples of 16 bytes, so
    that one load brings several neighbours.
    """

    name: str
    dtype: str
    batched: bool = False
    beta: bool = False
    whole: bool = False
    gated: bool = False  # added after a Gate

    def arguments(self) -> tuple[Argument, ...]:
        n = "half" if self.gated else "n"
        sizes = ("l", "m", n) if self.batched else ("m", n)
        last = -1 if self.whole else None
        matrix = Operand(self.name, sizes, self.dtype, last, aligned=self.whole, whole=self.whole)
        return (matrix, Scalar("beta")) if self.beta else (matrix,)

    def apply(self, x: Fragment, matrix: cute.Tensor | Preloaded, *beta: Float32) -> None:
        if isinstance(matrix, Preloaded):
            for r in range(len(x.rows)):
                for c in range(len(x.columns)):
                    value = matrix.values[r, c].to(Float32)
                    value = value * beta[0] if beta else value
                    x.values[r, c] = x.values[r, c] + value
            return
        if self.batched:
            matrix = matrix[x.batch, None, None]
        step = x.load_width(matrix.element_type) if self.whole else 1
        own = bool(beta) and x.own
        rows, columns = (x.rows, x.columns) if own else (x.safe_rows, x.safe_columns)
        for r, row in enumerate(rows):
            for c in range(0, len(columns), step):
                load = partial(_load_own, bounds=x.bounds) if own else _load
                loaded = load(matrix, row, columns[c], step)
                for e, value in enumerate(loaded):
                    value = value * beta[0] if beta else value
                    x.values[r, c + e] = x.values[r, c + e] + value


@dataclass(frozen=True)
class Activation:
    """An activation function: relu, gelu (by erf), gelu_tanh or silu."""

    kind: str

    def arguments(self) -> tuple[Argument, ...]:
        return ()

    def apply(self, x: Fragment) -> None:
        x.map(_FUNCTIONS[self.kind])


@dataclass(frozen=True)
class Gate:
    """act(x[:, 0::2]) * x[:, 1::2]: gate columns and gated columns alternate; half of them are
    left."""

    kind: str

    def arguments(self) -> tuple[Argument, ...]:
        return ()

    def apply(self, x: Fragment) -> Fragment:
        rows, columns = x.shape
        function = _FUNCTIONS[self.kind]
        values = cute.make_rmem_tensor((rows, columns // 2), Float32)  # (R, C / 2)
        for r in range(rows):
            for c in range(columns // 2):
                gate = function(x.values[r, 2 * c])
                values[r, c] = gate * x.values[r, 2 * c + 1]
        halves = tuple(c // 2 for c in x.columns[::2])
        bounds = x.bounds[0], x.bounds[1] // 2
        return x._replace(values=values, columns=halves, bounds=bounds, run=x.run // 2)


@dataclass(frozen=True)
class Elementwise:
    """A user's function(x), or function(x, m, n) with coordinates, on DSL numbers; one that
    branches on them must be a @cute.jit function.

    NOTE: the repr of the function, which identifies what it computes, is part of the compile key.
    """

    function: UserFunction

    @staticmethod
    def of(function: Callable[..., Float32]) -> Elementwise:
        return Elementwise(UserFunction(function))

    def arguments(self) -> tuple[Argument, ...]:
        return ()

    def apply(self, x: Fragment) -> None:
        takes = arguments_taken(self.function.function, (1, 3))
        for r, m in enumerate(x.rows):
            for c, n in enumerate(x.columns):
                where = (m, n) if takes == 3 else ()
                x.values[r, c] = Float32(self.function(x.values[r, c], *where))


@dataclass(frozen=True)
class Amax:
    """The largest |x|, or NaN if an x is, accumulated into one fp32 on the device that holds 0
    before the launch."""

    def arguments(self) -> tuple[Argument, ...]:
        return (Operand("amax", ("one",), "fp32", contiguous=None, aligned=False, whole=False),)

    @cute.jit
    def apply(self, x: Fragment, amax: cute.Tensor) -> None:
        largest = Float32(0.0)
        for r in cutlass.range_constexpr(len(x.rows)):
            for c in cutlass.range_constexpr(len(x.columns)):
                inside = x.rows[r] < x.bounds[0] and x.columns[c] < x.bounds[1]
                value = x.values[r, c]
                value = _larger(value, -value)
                largest = _larger(largest, value if inside else Float32(0.0))
        largest = cute.arch.warp_reduction(largest, _larger)
        if cutlass.const_expr(_has_elect()):
            with cute.arch.elect_one():
                _raise_to(amax, largest)
        elif cute.arch.lane_idx() == 0:
            _raise_to(amax, largest)


EpilogueOp = Alpha | Scale | Scales | Bias | Add | Activation | Gate | Elementwise | Amax


def op_arguments(ops: tuple[EpilogueOp, ...]) -> tuple[Argument, ...]:
    """The host arguments that a kernel with these operations takes beside its matrices, in
    order."""
    return tuple(argument for op in ops for argument in op.arguments())


def has_gate(ops: tuple[EpilogueOp, ...]) -> bool:
    """Whether the operations leave half as many columns as the product has."""
    return any(isinstance(op, Gate) or getattr(op, "halves", False) for op in ops)


@dataclass(frozen=True)
class BoundOps:
    """The operations of an epilogue, their arguments, and the extent of the product."""

    ops: tuple[EpilogueOp, ...]
    arguments: tuple[Any, ...]  # the values of op_arguments(ops)
    bounds: tuple[Int32, Int32]  # (M, N) of the product, as out is oriented
    transposed: bool  # the accumulator's rows are out's columns
    preloaded: int | None = None  # the index of the argument that `apply` takes from registers

    @property
    def gated(self) -> bool:
        return has_gate(self.ops)

    def apply(self, x: Fragment, preloaded: cute.Tensor | None = None) -> Fragment:
        """Run all operations on x; return the fragment to store. `preloaded` is (R, C)."""
        arguments = list(self.arguments)
        if preloaded is not None and self.preloaded is not None:
            arguments[self.preloaded] = Preloaded(preloaded)
        at = 0
        for op in self.ops:
            count = len(op.arguments())
            run: Callable[..., Fragment | None] = op.apply
            x = run(x, *arguments[at : at + count]) or x
            at += count
        return x

    @cute.jit
    def store_elements(self, x: Fragment, out: cute.Tensor) -> None:
        """Store each element of x that is in bounds to out (M, N), or to out (N, M) if
        `transposed`.

        NOTE: columns first: a thread has few rows, and keeps their addresses.
        """
        for c in cutlass.range_constexpr(len(x.columns)):
            for r in cutlass.range_constexpr(len(x.rows)):
                if x.rows[r] < x.bounds[0] and x.columns[c] < x.bounds[1]:
                    where = x.rows[r], x.columns[c]
                    if cutlass.const_expr(self.transposed):
                        where = x.columns[c], x.rows[r]
                    out[where] = x.values[r, c].to(out.element_type)


def _combine(
    x: Fragment,
    vector: cute.Tensor,
    by: str,
    function: Callable[[Float32, Float32], Float32],
) -> None:
    places = x.safe_rows if by == "row" else x.safe_columns
    loaded = [vector[p].to(Float32) for p in places]
    for r in range(len(x.rows)):
        for c in range(len(x.columns)):
            x.values[r, c] = function(x.values[r, c], loaded[r if by == "row" else c])


def _load(matrix: cute.Tensor, row: Int32, column: Int32, count: int) -> list[Float32]:
    """`count` neighbours in a row of `matrix`, by one load."""
    if count == 1:
        return [matrix[row, column].to(Float32)]
    return _neighbours(matrix[row, None], column, count)


@cute.jit
def _load_own(
    matrix: cute.Tensor,
    row: Int32,
    column: Int32,
    count: cutlass.Constexpr[int],
    bounds: tuple[Int32 | int, Int32 | int],
) -> list[Float32]:
    """Like `_load`, with zeros out of bounds: another warp may be storing what is at a clamped
    place."""
    held = cute.make_rmem_tensor(count, Float32)
    held.fill(0.0)
    if row < bounds[0] and column < bounds[1]:
        for e, value in enumerate(_load(matrix, row, column, count)):
            held[e] = value
    return [held[e] for e in range(count)]


def _neighbours(vector: cute.Tensor, place: Int32, count: int) -> list[Float32]:
    """`count` neighbours, among them the element at `place`, by one load aligned to all of them."""
    start = vector.iterator + (place & ~(count - 1))
    start = start.align(count * vector.element_type.width // 8)
    loaded = cute.make_tensor(start, cute.make_layout(count)).load().to(Float32)
    return [loaded[e] for e in range(count)]


def _raise_to(amax: cute.Tensor, x: Float32) -> None:
    """NOTE: numbers of one sign order like their bits, and NaN orders above infinity."""
    cute.arch.atomic_max(cute.recast_ptr(amax.iterator, dtype=Int32), x.bitcast(Int32))


def _has_elect() -> bool:
    """Whether the arch that is compiled for has elect.sync (PTX ISA 9.7.13.15: sm_90 and later)."""
    return BaseDSL._get_dsl().get_arch_enum().major >= 9


def _larger(x: Float32, y: Float32) -> Float32:
    return cute.arch.fmax(x, y, nan=True)


def _sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(1.0 + cute.math.exp(-x, fastmath=True))


def _relu(x: Float32) -> Float32:
    return cute.arch.fmax(x, 0.0, nan=True)


def _silu(x: Float32) -> Float32:
    return x * _sigmoid(x)


def _gelu_tanh(x: Float32) -> Float32:
    """x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)."""
    u = x * (-0.1029432397 * (x * x) - 2.302208198)
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(u, fastmath=True))  # u: times -2 log2 e


def _gelu(x: Float32) -> Float32:
    """max(x, 0) - |x| Q(|x|), where Q, the upper tail of the normal distribution, is erfc by
    Abramowitz and Stegun 7.1.26: half the instructions of a library's erf, within 2.2e-7."""
    size = cute.arch.fmin(cute.arch.fmax(x, -x, nan=True), 100.0, nan=True)  # nan stays, inf not
    t = cute.arch.rcp_approx(1.0 + 0.23164188 * size)  # 0.3275911 / sqrt(2)
    tail = 0.5307027 * t - 0.7265760
    tail = tail * t + 0.7107069
    tail = tail * t - 0.1422484
    tail = tail * t + 0.1274148
    tail = tail * t * cute.math.exp2(x * x * -0.7213475204444817, fastmath=True)
    return _relu(x) - size * tail


_FUNCTIONS = {"relu": _relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}
