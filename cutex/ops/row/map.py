"""`cutex.map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cutex.compile.user_function import UserFunction, arguments_taken
from cutex.ops.plain import is_plain, nobody_watches, untraced
from cutex.ops.plans import PlanCache
from cutex.ops.row.launches import Launch, Run
from cutex.ops.row.operators import define
from cutex.ops.row.rows import DTYPES, VECTOR, arch_of, check, dtype_of

_is_compiling = torch.compiler.is_dynamo_compiling
MOST = 2**31  # vectors of a launch; elements of a dimension are fewer


def map(fn: Callable[..., Any], *tensors: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """fn(x, y, ..) elementwise over any number of tensors, broadcast together, in one pass.

    fn: a function of as many DSL Float32 (`cutlass.Float32`) as there are tensors, returning one;
        @cute.jit if it branches on them. Values that it closes over are part of the kernel: another
        value gives another kernel. In a torch.compile graph they are those at trace time.
    tensors: bfloat16, float16 or float32, any shapes that broadcast and any strides; dtypes may
        differ. None may require a gradient.
    out_dtype: one of these dtypes; by default torch's promotion of the tensors'.

    Returns a tensor of the broadcast shape, with the dimension order in memory of the first tensor
    of that shape. Raises TypeError or ValueError, in one sentence that names the argument, for
    arguments that are not supported, and without an NVIDIA GPU from Ampere on.
    """
    if not _is_compiling() and tensors:
        known = _PLANS.find((fn, out_dtype), *tensors)
        if known is not None:
            return known.launch(*tensors)
    dtype = _checked(fn, tensors, out_dtype)
    if _is_compiling() or not (nobody_watches() and all(is_plain(x) for x in tensors)):
        if not _is_compiling():
            _check_transforms(tensors)
        return MAP.through_torch([x.detach() for x in tensors], _named(fn), dtype)
    return _first(fn, tensors, out_dtype, dtype)


def _checked(fn: Any, tensors: Sequence[Any], out_dtype: Any) -> torch.dtype:
    """The dtype of the result; raises, in one sentence, for what does not fit."""
    if not tensors:
        raise TypeError("map takes a function and at least one tensor")
    for i, x in enumerate(tensors):
        check(f"tensor {i}", x, tensors[0] if isinstance(tensors[0], Tensor) else None)
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(f"tensor {i} wants a gradient, which a function of yours has not here")
    if not callable(fn) or (not _is_compiling() and arguments_taken(fn, (len(tensors),)) is None):
        raise TypeError(f"fn={fn!r} must be a Python function of {len(tensors)} DSL Float32")
    if out_dtype not in (None, *DTYPES):
        raise TypeError(f"out_dtype={out_dtype!r:.60} is not bfloat16, float16 or float32")
    try:
        torch.broadcast_shapes(*(x.shape for x in tensors))
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"tensors of shapes {shapes} do not broadcast") from None
    return out_dtype or reduce(torch.promote_types, (x.dtype for x in tensors))


def _check_transforms(tensors: Sequence[Tensor]) -> None:
    """Refuse what torch would answer with no derivative, or with words of its own."""
    dual = forward_ad._current_level >= 0
    if dual and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("cutex::map has no forward differentiation (jvp)")
    if any(torch._C._functorch.is_batchedtensor(x) for x in tensors):
        raise NotImplementedError("cutex::map has no rule for torch.vmap: call it on whole tensors")


# ---- the launch


def _plan(function: UserFunction, dtype: torch.dtype, tensors: Sequence[Tensor]) -> Run:
    from cutex.kernels.row.map import FEW, VECTORS, Map, MapConfig

    arch = arch_of(tensors[0].device, "cutex.map")
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    order = _order(tensors, shape)
    back = [order.index(d) for d in range(len(shape))]
    lying = [shape[d] for d in order]
    if 0 in shape:
        return lambda *given: torch.empty(lying, dtype=dtype, device=given[0].device).permute(back)
    merged = _merged([x.expand(shape).permute(order) for x in tensors], lying)
    if (longest := max(n for n, _ in merged)) >= MOST:
        raise ValueError(f"a dimension has {longest} elements: at most {MOST - 1}")
    launch = Launch(tensors[0].device)
    sizes, given = tuple(n for n, _ in merged), []
    for i, x in enumerate(tensors):
        strides = tuple(s[i] for _, s in merged)
        passed = launch.passes(f"x{i}", x, _as_strided(sizes, strides))
        given.append(passed)
    y = launch.makes("y", sizes, dtype)
    loads = tuple("one" if x.stride(-1) == 0 and sizes[-1] > 1 else
                  "vector" if x.stride(-1) == 1 else "element" for x in given)  # fmt: skip
    width = _width([y, *(x for x, how in zip(given, loads, strict=True) if how == "vector")])
    if y.numel() // width >= MOST:
        raise ValueError(f"the result has {y.numel()} elements: at most {MOST * width}")
    names = tuple(dtype_of(x) for x in tensors)
    vectors = 1 if y.numel() < FEW * width else VECTORS
    config = MapConfig(function, names, loads, dtype_of(y), len(sizes), width, vectors)
    inputs = (f"x{i}" for i in range(len(tensors)))
    run = launch.run((Map, config, arch), ("y", *inputs), (), ("y",))
    if list(sizes) == list(shape):
        return run
    return lambda *given: run(*given).view(lying).permute(back)


def _as_strided(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    return lambda x: x.as_strided(sizes, strides)


def _order(tensors: Sequence[Tensor], shape: Sequence[int]) -> list[int]:
    """The dimensions in the order of memory of the first tensor that has them all."""
    for x in tensors:
        if x.shape == shape:
            order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
            size = 1
            for d in reversed(order):
                if x.shape[d] > 1 and x.stride(d) != size:
                    break
                size *= x.shape[d]
            else:
                return order
    return [*range(len(shape))]


def _merged(tensors: Sequence[Tensor], shape: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Sizes, and the strides of each tensor, with neighbours as one where all tensors allow it."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for d, size in enumerate(shape):
        strides = tuple(x.stride(d) for x in tensors)
        if size == 1:
            continue
        lies = found and all(a == b * size for a, b in zip(found[-1][1], strides, strict=True))
        if lies and found[-1][0] * size < MOST:  # which 32 bits count
            found[-1] = found[-1][0] * size, strides
        else:
            found.append((size, strides))
    return found or [(1, (1,) * len(tensors))]


def _width(tensors: Sequence[Tensor]) -> int:
    """The elements of the widest vectors that begin every row of the tensors."""
    width = VECTOR // min(x.element_size() for x in tensors)
    for x in tensors:
        size = x.element_size()
        places = x.data_ptr()
        for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            places |= stride * size if n > 1 else 0
        while min(width * size, VECTOR) > (places & -places or VECTOR):
            width //= 2
    return width


_PLANS = PlanCache()


@untraced
def _first(
    fn: Callable[..., Any], tensors: Sequence[Tensor], out_dtype: Any, dtype: torch.dtype
) -> Any:
    """A call that has no plan yet."""
    function = UserFunction(fn)
    run = _plan(function, dtype, tensors)
    key = _PLANS.key_of((fn, out_dtype), *tensors)
    _PLANS.remember(key, tensors, run, [function])
    return run(*tensors)


# ---- the operator, by which torch sees it: a function has a name there


_FUNCTIONS: dict[str, UserFunction] = {}


def _named(fn: Callable[..., Any]) -> str:
    """The name under which torch calls a function."""
    function = UserFunction(fn)
    _FUNCTIONS[function.key] = function
    return function.key


# NOTE: torch.compiler.assume_constant_result, without importing dynamo, which takes a second
_named._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _run(tensors: list[Tensor], fn: str, dtype: torch.dtype) -> Any:
    return _plan(_FUNCTIONS[fn], dtype, tensors)(*tensors)


def _fake(tensors: list[Tensor], fn: str, dtype: torch.dtype) -> Tensor:
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    order = _order(tensors, shape)
    lying = torch.empty([shape[d] for d in order], dtype=dtype, device=tensors[0].device)
    return lying.permute([order.index(d) for d in range(len(shape))])


MAP = define("map", "(Tensor[] tensors, str fn, ScalarType dtype) -> Tensor", _run, _fake)
