"""The operands of one `cutex.matmul` call, in the form that the kernel takes.

Operands that TMA can step through are passed unchanged; the notes of an Arranged give the cost of
the others:

- a and b need one contiguous side, and a base and other strides that are multiples of 16 bytes;
tf32 and fp8 on Hopper also K contiguous. Otherwise each call copies the operand first.
- On Hopper, a 16-bit a with M contiguous may have any stride (kernels/gemm/unaligned), and with up
to 16 rows also any base and K.
- out, if its base, strides or contiguous size are no such multiples, is stored element by element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex import dtypes
from cutex.arch import PORTABLE, arch
from cutex.compile import ALIGN
from cutex.compile.user_function import arguments_taken
from cutex.ops.matmul.checks import FLOAT8, Call, by_row

if TYPE_CHECKING:
    from cutex.device.epilogue import epilogue_ops
    from cutex.device.epilogue.epilogue_ops import EpilogueOp
    from cutex.kernels.gemm.layouts import OperandLayout

# bytes of the elements that an MMA reads only with K contiguous
K_ONLY = {"sm_90a": (1, 4)}
ANY_STRIDE = ("sm_90a",)  # where a has one
FOLDS = (16, 8)  # what divides its K, the best first
PROMOTED_K = 128  # of fp8, whose sums tensor cores add up on their own
FEW_ROWS = 16  # of a, up to which K and its base are any, too
MOST_PITCH = 1 << 27  # elements between rows of K: as many times a fold are counted in 32 bits


def name_of(x: Tensor) -> str:
    """The name of the element type, such as "bf16"; ValueError for one that cutex does not have."""
    found = dtypes.of_torch(x.dtype)
    if found is None:
        raise ValueError(f"{x.dtype} is no element type of cutex")
    return found.name


def aligned(x: Tensor, contiguous: int) -> bool:
    """Whether TMA can step through x (.., rows, columns) with `contiguous` (-1 or -2) innermost."""
    if x.data_ptr() % ALIGN or (x.stride(contiguous) != 1 and x.shape[contiguous] > 1):
        return False
    return all(
        s * x.element_size() % ALIGN == 0 and s >= 0
        for d, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))
        if n > 1 and d != x.dim() + contiguous
    )


def normal(x: Tensor, contiguous: int) -> Tensor:
    """The same tensor, with strides that TMA takes also in the modes of size 1."""
    unit = ALIGN // x.element_size()
    strides = [
        1 if d == x.dim() + contiguous else s if n > 1 or s % unit == 0 else unit
        for d, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))
    ]
    return x if tuple(strides) == x.stride() else x.as_strided(x.shape, strides)


def repacked(x: Tensor, contiguous: int) -> Tensor:
    """A copy that TMA can step through."""
    unit = ALIGN // x.element_size()
    *batch, rows, columns = x.shape if contiguous == -1 else x.mT.shape
    pitch = -(-columns // unit) * unit
    y = torch.empty((*batch, rows, pitch), dtype=x.dtype, device=x.device)[..., :columns]
    y = y if contiguous == -1 else y.mT
    return y.copy_(x)


def operand(x: Tensor, k_side: int, k_only: bool) -> tuple[Tensor, OperandLayout, str]:
    """x (R, C) or (L, R, C) as the kernel takes it, its layout, and a note if it was copied."""
    from cutex.kernels.gemm.layouts import OperandLayout

    note = ""
    side = next((s for s in ((k_side,) if k_only else (-1, -2)) if aligned(x, s)), None)
    if side is None:
        side = k_side if k_only or x.stride(-2) != 1 else -2
        note = "copied: TMA cannot step through it" if not k_only else "copied: K is not contiguous"
        x = repacked(x, side)
    major = "row" if side == -1 else "column"
    return normal(x, side), OperandLayout(name_of(x), major, x.dim() == 3), note


def unaligned(a: Tensor, b: OperandLayout, arch_name: str) -> OperandLayout | None:
    """The layout of a (M, K), which TMA cannot step through, for the kernels that take any stride;
    None if it cannot be read so. Of few rows, K and the base are any, too."""
    from cutex.kernels.gemm.layouts import OperandLayout

    if arch_name not in ANY_STRIDE or a.dim() != 2 or a.dtype.itemsize != 2 or b.batched:
        return None
    if any(aligned(a, side) for side in (-1, -2)):
        return None
    if a.stride(-2) != 1 or not 1 <= a.stride(-1) < MOST_PITCH:
        return None
    fold = next((n for n in FOLDS if a.shape[-1] % n == 0), 0)
    if fold and a.data_ptr() % ALIGN == 0:
        return OperandLayout(name_of(a), "column", fold=fold)
    if a.shape[-2] <= FEW_ROWS and b.major == "row" and b.whole:
        return OperandLayout(name_of(a), "column", tma=False, fold=1)
    return None


def is_whole(x: Tensor, layout: OperandLayout) -> bool:
    """Whether the contiguous side of x, a matrix or several, is a multiple of 16 bytes."""
    side = -1 if layout.major == "row" else -2
    return x.shape[side] * x.element_size() % ALIGN == 0


def result(x: Tensor) -> tuple[Tensor, OperandLayout, str]:
    """out as the kernel takes it, its layout and a note; it is never copied.

    NOTE: a TMA store writes whole units of 16 bytes: on an H200, where rows ended within one, the
    memory after them was overwritten.
    """
    from cutex.kernels.gemm.layouts import OperandLayout

    name, batched = name_of(x), x.dim() == 3
    for side, major in ((-1, "row"), (-2, "column")):
        if aligned(x, side) and x.shape[side] * x.element_size() % ALIGN == 0:
            return normal(x, side), OperandLayout(name, major, batched), ""
    note = "stored by element: TMA cannot step through it"
    return x, OperandLayout(name, "row", batched, tma=False), note


@dataclass
class Arranged:
    """A call in the kernel's terms: one matrix or a batch of them."""

    tensors: list[Any]  # a, b, out and the arguments of the epilogue
    a: OperandLayout
    b: OperandLayout
    out: OperandLayout
    ops: tuple[EpilogueOp, ...]
    names: tuple[str, ...]  # names of the epilogue's arguments
    notes: dict[str, str]  # by operand: the reason why the call is slower than it could be
    sizes: tuple[int, int, int, int]  # M, N, K, L
    as_given: bool  # every tensor is passed as the call was given it
    flattened: bool  # except a, out and residual, which are viewed as one matrix
    promoted: bool = False  # sums of each 128 of K are added up in fp32 registers


def arrange(call: Call, out: Tensor, arch_name: str) -> Arranged:
    """The kernel's arguments for `call`, whose result is `out`."""
    notes: dict[str, str] = {}
    a, b, residual = call.a, call.b, call.residual
    expanded = False
    if residual is not None and residual.shape != out.shape:
        residual, expanded = residual.expand(out.shape), True
    if a.shape[-1] == 0:  # nothing to add up: the epilogue of zeros
        a, b = a.new_zeros((a.shape[-2], ALIGN)), b.new_zeros((ALIGN, b.shape[-1]))
    is_flattened = False
    if b.dim() == 2 and a.dim() > 2 and not row_wise(call):
        one = [x if x is None else as_one(x) for x in (a, out, residual)]
        if one[0] is not None and one[1] is not None and (one[2] is None) == (residual is None):
            a, out, residual = one
            is_flattened = True
    given = [a, b, out, residual]
    if out.dim() > 3:
        batch = out.shape[:-2]
        a, b, residual = (
            x if x is None or x.dim() == 2 else x.expand(*batch, *x.shape[-2:]).flatten(0, -3)
            for x in (a, b, residual)
        )
        out = out.view(-1, *out.shape[-2:])
    a, b = (x[:1] if x.dim() == 3 and x.stride(0) == 0 else x for x in (a, b))

    k_only = a.dtype.itemsize in K_ONLY.get(arch_name, ())
    b, b_layout, notes["b"] = operand(b, -2, k_only)
    whole = replace(b_layout, whole=is_whole(b, b_layout) and b.stride(-2) < MOST_PITCH)
    if (as_it_is := unaligned(a, whole, arch_name)) is not None and out.dim() == 2:
        a_layout, b_layout = as_it_is, whole
    else:
        a, a_layout, notes["a"] = operand(a, -1, k_only)
    before = out
    out, out_layout, notes["out"] = result(out)
    if call.gate and out.dtype is torch.float32 and not arch(arch_name).tmem_columns:
        out, out_layout = before, replace(out_layout, major="row", tma=False)
        notes["out"] = "stored by element: gates leave single columns"
    ops, passed = fused(call, before, residual, arch_name)
    m, n = out.shape[-2], b.shape[-1]
    sizes = m, n, a.shape[-1], out.shape[0] if out.dim() == 3 else 1
    tensors = [a, b, out, *(x for _, x in passed)]
    names = tuple(name for name, _ in passed)
    notes = {name: note for name, note in notes.items() if note}
    others = [x for x in (call.bias, call.scale_a, call.scale_b, call.amax) if x is not None]
    as_given = (
        all(
            name == "c" or any(x is y for y in given) or any(is_flat(x, y) for y in others)
            for name, x in zip(("a", "b", "out", *names), tensors, strict=True)
            if isinstance(x, Tensor)
        )
        and before.data_ptr() % ALIGN == 0
        and call.a.shape[-1] > 0
        and not expanded
    )
    return Arranged(
        tensors, a_layout, b_layout, out_layout, ops, names, notes, sizes, as_given, is_flattened,
        is_promoted(call, arch_name),
    )  # fmt: skip


def is_promoted(call: Call, arch_name: str) -> bool:
    """Whether the sums of `call` leave the tensor cores after each 128 of K, if there are more:
    those of fp8 on Hopper, whose tensor cores keep 13 bits of a sum."""
    fp8 = call.a.dtype in FLOAT8 and not call.use_fast_accum
    return arch_name == "sm_90a" and fp8 and call.a.shape[-1] > PROMOTED_K


def row_wise(call: Call) -> bool:
    """Whether the epilogue of `call` distinguishes the rows of a matrix."""
    return (
        (call.bias is not None and by_row(call.bias, call))
        or (call.scale_a is not None and call.scale_a.numel() > 1)
        or (callable(call.activation) and arguments_taken(call.activation, (1, 3)) == 3)
    )


def as_one(x: Tensor) -> Tensor | None:
    """(.., R, C) viewed as one matrix (.. * R, C), or None where that needs a copy."""
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return None


def fused(
    call: Call, out: Tensor, residual: Tensor | None, arch_name: str
) -> tuple[tuple[EpilogueOp, ...], list[tuple[str, Any]]]:
    """The operations of the epilogue, and their arguments by name."""
    from cutex.device.epilogue import epilogue_ops

    ops: list[EpilogueOp] = []
    passed: list[tuple[str, Any]] = []
    loads_by_tma = arch_name == "sm_90a"

    def add(op: EpilogueOp, *values: tuple[str, Any]) -> None:
        ops.append(op)
        passed.extend(values)

    def matrix(name: str, x: Tensor, beta: bool = False) -> epilogue_ops.Add:
        whole = aligned(x, -1) and x.shape[-1] * x.element_size() % ALIGN == 0 and min(x.shape) > 1
        return epilogue_ops.Add(name, name_of(x), x.dim() == 3, beta, whole, call.gate is not None)

    sides, scales = [], []
    for name, each in (("scale_a", "row"), ("scale_b", "column")):
        scale = getattr(call, name)
        if scale is not None:
            sides.append(each if scale.numel() > 1 else "tensor")
            scales.append((name, flat(scale)))
    if len(scales) == 2:
        add(epilogue_ops.Scales(*sides), *scales)
    elif scales:
        add(epilogue_ops.Scale(scales[0][0], sides[0]), *scales)
    if call.alpha != 1.0:
        add(epilogue_ops.Alpha(), ("alpha", float(call.alpha)))
    if call.beta != 0.0:
        op = matrix("c", out, beta=True)
        # NOTE: on Hopper, whole rows are loaded by TMA. With loads by threads from the matrix that
        # TMA then stores to, a call takes 1.9 to 5.8 times as long; from a copy, 1.05 times (H200;
        # docs/facts/matmul.md#threads-load-tensor-tma)
        in_place = op.whole and loads_by_tma
        add(op, ("c", out if in_place else out.clone()), ("beta", float(call.beta)))
    if call.bias is not None:
        by = "row" if by_row(call.bias, call) else "column"
        bias = flat(call.bias)
        bias = bias if bias.is_contiguous() else bias.contiguous()
        whole = bias.data_ptr() % ALIGN == 0 and bias.nbytes % ALIGN == 0
        add(epilogue_ops.Bias(by, name_of(bias), by == "column" and whole), ("bias", bias))
    if call.gate:
        add(epilogue_ops.Gate(call.gate))
    elif isinstance(call.activation, str):
        add(epilogue_ops.Activation(call.activation))
    elif call.activation is not None:
        add(epilogue_ops.Elementwise.of(call.activation))
    if residual is not None:
        if arch_name in PORTABLE and residual.data_ptr() == out.data_ptr():
            # NOTE: threads without an element of their own load another's, which may be written
            residual = residual.clone()
        add(matrix("residual", residual), ("residual", residual))
    if call.amax is not None:
        add(epilogue_ops.Amax(), ("amax", flat(call.amax)))
    return tuple(ops), passed


def flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.reshape(-1)


def is_flat(x: Tensor, y: Tensor) -> bool:
    """Whether x is y, or a view of all of y with one mode."""
    same = x.dim() == 1 and x.data_ptr() == y.data_ptr() and x.numel() == y.numel()
    return x is y or (same and x.dtype is y.dtype and y.dim() != 1)
