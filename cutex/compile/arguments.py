"""The arguments of a kernel: tensors whose sizes have names, and host numbers.

Sizes and strides are symbolic while a kernel is compiled, so that one compiled kernel serves all
shapes. Operands declare strides and alignment, which are checked before a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cutex.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

ALIGN = 16  # bytes: TMA takes base addresses and row strides that are multiples of 16
MAX_SIZE = 2**31 - 1  # of a tensor: sizes are 32-bit


class Bound(NamedTuple):
    """The least and the most of a size, by its name, for which a compiled kernel has memory."""

    size: str
    least: int
    most: int = MAX_SIZE

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.most)
        return f"at least {self.least}" if self.most == MAX_SIZE else f"at most {self.most}"


@dataclass(frozen=True)
class Operand:
    """A tensor argument: the names of its sizes, e.g. ("m", "k"), and the constraints on its
    strides and sizes."""

    name: str
    sizes: tuple[str, ...]
    dtype: str
    contiguous: int | None = -1  # the mode of stride 1; None: no stride is known
    aligned: bool = True  # base and other strides are multiples of 16 bytes, as TMA takes them
    whole: bool = True  # the contiguous size is a multiple of 16 bytes, too
    any_stride: bool = False  # of what is aligned, the base alone is
    bounds: tuple[Bound, ...] = ()
    # more bounds, which depend on the sizes and the whole numbers of all arguments, by name
    bounds_by: Callable[[Mapping[str, int]], tuple[Bound, ...]] | None = None


@dataclass(frozen=True)
class Scalar:
    """A host number: a float, passed as fp32, or an int, passed as int32."""

    name: str
    dtype: str = "fp32"


class Workspace(NamedTuple):
    """Global memory that a launch needs beside its operands, such as for partial sums of CTAs."""

    sums: int  # fp32 elements, of any values
    flags: int  # words of int32: 0 before and after each launch
    # whether launches use the flags before the kernel before theirs has ended: no other kernel has
    # the same
    early: bool = False


Argument = Operand | Scalar
SCALARS = {"fp32": float, "int32": int}  # the Python type of a Scalar of each dtype


# ---- checked, before a launch


def check_arguments(arguments: Sequence[Argument], values: Sequence[object]) -> None:
    """Raise TypeError or ValueError, in one sentence, if `values` do not meet the constraints of
    `arguments`."""
    sizes: dict[str, tuple[int, str]] = {}
    for argument, x in zip(arguments, values, strict=True):
        if isinstance(argument, Operand):
            _check_operand(argument, x, sizes)
        elif not isinstance(x, kind := SCALARS[argument.dtype]):
            article = "an" if kind is int else "a"
            raise TypeError(
                f"{argument.name} must be {article} {kind.__name__}, got {type(x).__name__}"
            )
    check_bounds(arguments, values)


def _check_operand(operand: Operand, x: object, sizes: dict[str, tuple[int, str]]) -> None:
    import torch

    name = operand.name
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    dtype = DTYPES[operand.dtype].torch
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    if not x.is_cuda:
        raise ValueError(f"{name} must be on a CUDA device, got {x.device}")
    rank = len(operand.sizes)
    if x.dim() != rank:
        shape = "a matrix" if rank == 2 else f"a tensor of {rank} dimensions"
        raise ValueError(f"{name} must be {shape}, got {x.dim()} dimensions")
    for letter, size in zip(operand.sizes, x.shape, strict=True):
        if size < 1:
            raise ValueError(f"{name} has {letter.upper()}={size}, every size must be at least 1")
        known, owner = sizes.setdefault(letter, (size, name))
        if known != size:
            raise ValueError(f"{name} has {letter.upper()}={size}, but {owner} has {known}")
    _check_strides(operand, x)


def check_bounds(arguments: Sequence[Argument], values: Sequence[Any]) -> None:
    """Raise ValueError, in one sentence, if one of `values` has a size for which the kernel has no
    memory. Values of other numbers of dimensions are left to `check_arguments`.

    NOTE: sizes are symbolic in a compiled kernel, whose launcher only compares them.
    """
    named = list(zip(arguments, values, strict=False))
    operands = [(x, value) for x, value in named if isinstance(x, Operand)]
    if len(arguments) != len(values) or any(len(x.sizes) != len(v.shape) for x, v in operands):
        return
    numbers = {x.name: value for x, value in named if isinstance(value, int)}
    for x, value in operands:
        numbers.update(zip(x.sizes, value.shape, strict=True))
    for x, value in operands:
        more = () if x.bounds_by is None else x.bounds_by(numbers)
        for bound in (*x.bounds, *more):
            size = value.shape[x.sizes.index(bound.size)]
            if not bound.least <= size <= bound.most:
                raise ValueError(
                    f"{x.name} has {bound.size.upper()}={size}, this kernel takes {bound}"
                )


def _check_strides(operand: Operand, x: torch.Tensor) -> None:
    name, itemsize = operand.name, x.element_size()
    if operand.contiguous is None:
        return
    last = operand.contiguous % x.dim()
    if x.stride(last) != 1:
        what = "rows" if last == x.dim() - 1 else "columns"
        raise ValueError(f"{name} must have contiguous {what}, got strides {tuple(x.stride())}")
    unit = ALIGN // itemsize
    if operand.whole and x.shape[last] % unit:
        letter = operand.sizes[last].upper()
        raise ValueError(f"{name} has {letter}={x.shape[last]}, which must be a multiple of {unit}")
    steps = [x.stride(d) * itemsize for d in range(x.dim()) if d != last and x.shape[d] > 1]
    steps = [] if operand.any_stride else steps
    if operand.aligned and (any(s % ALIGN for s in steps) or x.data_ptr() % ALIGN):
        step = steps[-1] if steps else 0
        raise ValueError(
            f"{name} must start at, and step its rows by, a multiple of {ALIGN} bytes, "
            f"got address {x.data_ptr():#x} and {step} bytes"
        )


# ---- symbolic, while a kernel is compiled


def fake_arguments(arguments: Sequence[Argument]) -> list[Any]:
    """Stand-ins for the arguments while a kernel is compiled: tensors with symbolic sizes (32 bits)
    and strides (64 bits), and scalars."""
    from cutlass import cute

    operands = [o for o in arguments if isinstance(o, Operand)]
    # a size that is the contiguous one of any operand is a multiple of the unit in all of them
    unit = {
        o.sizes[o.contiguous]: _unit(o) for o in operands if o.whole and o.contiguous is not None
    }
    size: dict[str, Any] = {}
    for letter in (letter for o in operands for letter in o.sizes):
        if letter not in size:
            size[letter] = cute.sym_int(divisibility=unit.get(letter, 1), symbol=letter)
    return [
        _fake_tensor(o, [size[letter] for letter in o.sizes])
        if isinstance(o, Operand)
        else DTYPES[o.dtype].dsl(1)
        for o in arguments
    ]


def _unit(o: Operand) -> int:
    """The elements of which strides are multiples."""
    return DTYPES[o.dtype].elements(ALIGN) if o.aligned and not o.any_stride else 1


def _fake_tensor(o: Operand, sizes: list[Any]) -> Any:
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    last = None if o.contiguous is None else o.contiguous % len(sizes)
    strides = tuple(
        1 if mode == last else cute.sym_int64(divisibility=_unit(o), symbol=f"ld{mode}_{o.name}")
        for mode in range(len(sizes))
    )
    align = {"assumed_align": ALIGN} if o.aligned else {}
    return make_fake_tensor(DTYPES[o.dtype].dsl, tuple(sizes), strides, **align)
