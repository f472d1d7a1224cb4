"""An elementwise user-defined function of any number of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Operand
from cutex.compile.user_function import UserFunction
from cutex.device.row.tile import VECTOR_BYTES
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
from cutex.kernels.row.kernel import ARCHS

THREADS = 256
VECTORS = 4  # of a thread, whose loads it starts at once; one where a GPU is not full of them
FEW = 1 << 17  # vectors
LOADS = ("vector", "one", "element")  # next to each other, the same for all, or anywhere


@dataclass(frozen=True)
class MapConfig:
    """The function, the tensors it takes, and how they are loaded.

    NOTE: the function's repr, which identifies what it computes, is part of the compile key.
    """

    function: UserFunction
    dtypes: tuple[str, ...]  # of the tensors
    loads: tuple[str, ...]  # of each, in the last mode, one of LOADS
    out: str  # the dtype of the result
    rank: int = 1
    width: int = 8  # elements of a vector
    vectors: int = VECTORS  # of a thread

    @property
    def cacheable(self) -> bool:
        """Whether the compiled kernel may be cached for other processes."""
        return self.function.cacheable


class Map:
    """y = function(x0, x1, ...) of tensors (D0, ..., Dn), broadcast by strides of 0; y is
    contiguous. A thread processes `vectors` vectors along the last mode.
    """

    archs = ARCHS
    dtypes = ("bf16", "fp16", "fp32")
    name = "row_map"

    def __init__(self, config: MapConfig) -> None:
        self.config = config

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        sizes = tuple(f"d{i}" for i in range(c.rank))

        def operand(name: str, kind: str) -> Operand:
            return Operand(name, sizes, kind, contiguous=None, aligned=False, whole=False)

        return (operand("y", c.out), *(operand(f"x{i}", d) for i, d in enumerate(c.dtypes)))

    @cute.jit
    def __call__(self, mY: cute.Tensor, *rest) -> None:
        *given, stream = rest
        vectors = cute.ceil_div(mY.shape[-1], self.config.width)
        for i in cutlass.range_constexpr(self.config.rank - 1):
            vectors *= mY.shape[i]
        self.kernel(mY, tuple(given)).launch(
            grid=(cute.ceil_div(vectors, THREADS * self.config.vectors), 1, 1),
            block=(THREADS, 1, 1),
            use_pdl=may_overlap(),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mY: cute.Tensor, given: tuple) -> None:
        c = self.config
        first = cute.arch.block_idx()[0] * (THREADS * c.vectors) + cute.arch.thread_idx()[0]
        places = [self.place(mY, first + i * THREADS) for i in range(c.vectors)]
        wait_for_kernel_before()
        values = [[self.loaded(k, x, place) for k, x in enumerate(given)] for place in places]
        for i in cutlass.range_constexpr(c.vectors):
            rY = cute.make_rmem_tensor(c.width, mY.element_type)  # (V)
            for j in cutlass.range_constexpr(c.width):
                arguments = [r[j].to(Float32) for r in values[i]]
                rY[j] = Float32(c.function(*arguments)).to(mY.element_type)
            self.store(rY, mY, places[i])

    def place(self, mY: cute.Tensor, vector: Int32) -> tuple[Any, ...]:
        """The coordinates of a vector's first element; past the end the first coordinate is out of
        range."""
        c = self.config
        across = cute.ceil_div(mY.shape[-1], c.width)
        found: list[Any] = [vector % across * c.width]
        at = vector // across
        for i in reversed(range(1, c.rank - 1)):
            found.insert(0, at % mY.shape[i])
            at = at // mY.shape[i]
        return (at, *found) if c.rank > 1 else (vector * c.width,)

    def exists(self, mY: cute.Tensor, place: tuple[Any, ...], j: int) -> Any:
        """Whether element j of a vector is inside the tensor."""
        there = place[-1] + j < mY.shape[-1]
        return there & (place[0] < mY.shape[0]) if self.config.rank > 1 else there

    @cute.jit
    def loaded(self, k: int, mX: cute.Tensor, place: tuple) -> cute.Tensor:
        """The elements of tensor k in a vector (V), 0 outside the tensor."""
        c = self.config
        rX = cute.make_rmem_tensor(c.width, mX.element_type)  # (V)
        rX.fill(0)
        if cutlass.const_expr(c.loads[k] == "one"):
            if self.exists(mX, place, 0):
                rX.fill(mX[place])
        elif self.exists(mX, place, c.width - 1) & (c.loads[k] == "vector"):
            cute.autovec_copy(self.vector(mX, place), rX)
        else:
            for j in cutlass.range_constexpr(c.width):
                if self.exists(mX, place, j):
                    rX[j] = mX[(*place[:-1], place[-1] + j)]
        return rX

    @cute.jit
    def store(self, rY: cute.Tensor, mY: cute.Tensor, place: tuple) -> None:
        """Write a vector."""
        c = self.config
        if self.exists(mY, place, c.width - 1):
            cute.autovec_copy(rY, self.vector(mY, place))
        else:
            for j in cutlass.range_constexpr(c.width):
                if self.exists(mY, place, j):
                    mY[(*place[:-1], place[-1] + j)] = rY[j]

    def vector(self, mX: cute.Tensor, place: tuple[Any, ...]) -> cute.Tensor:
        """A vector of consecutive elements in the last mode, aligned to its own size."""
        width, bits = self.config.width, mX.element_type.width
        start = cute.domain_offset(place, mX).iterator.toint()
        align = min(width * bits // 8, VECTOR_BYTES)
        p = cute.make_ptr(mX.element_type, start, cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(p, cute.make_layout(width))
