"""`cutex.scaled_mm`: products of quantized operands, under the conventions of torch's scaled_mm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutex.ops import torchao_tensors
from cutex.ops.block_scaled import FORMATS, VECTORS, BlockScaledOperand, block_scaled
from cutex.ops.device import allocating
from cutex.ops.differentiation import check_unwanted
from cutex.ops.fp8_blocks import (
    BLOCK,
    KNOWN,
    RECIPES,
    check_blocks,
    key_of,
    of_matrix,
    of_rows,
    product,
    run,
    unpacked,
)
from cutex.ops.matmul.checks import Call, check
from cutex.ops.matmul.eager import launch_like, matmul
from cutex.ops.number import check_flag
from cutex.ops.plain import check_strided, untraced
from cutex.ops.plans import PlanCache
from cutex.ops.quantize import QuantizedTensor
from cutex.ops.recipes import name_of, names_of, only
from cutex.ops.row.operators import needs_nothing

# the names of torch.nn.functional.ScalingType; those that are products of whole rows or tensors
WHOLE = ("TensorWise", "RowWise")
FP32_BLOCKS = ("BlockWise1x128", "BlockWise128x128")
KINDS = (*WHOLE, *FP32_BLOCKS, *VECTORS)


def scaled_mm(
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor,
    scale_a: Any = None,
    scale_b: Any = None,
    *,
    scale_recipe_a: Any = None,
    scale_recipe_b: Any = None,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    output_dtype: Any = torch.bfloat16,
    activation: str | None = None,
    residual: Tensor | None = None,
    output_scale: Tensor | None = None,
    use_fast_accum: bool = False,
) -> Any:
    """activation((a * scale_a) @ (b * scale_b) + bias) + residual.

    a, b: (M, K) and (K, N), float8_e4m3fn; or results of `cutex.quantize` for x (M, K) and for a
        weight (N, K), which bring their scales; or torchao's MXTensor and NVFP4Tensor, (M, K) and
        (K, N). If K is not contiguous, they are copied first.
    scale_recipe_a, scale_recipe_b: members of torch.nn.functional.ScalingType, or their names.
        "TensorWise": one float32. "RowWise": (M, 1) and (1, N), as in `cutex.matmul`.
        "BlockWise1x128": (M, K / 128) for a, (N, K / 128) for b; best with contiguous rows at a
        pitch of a multiple of 16 bytes, as torch and DeepGEMM store them, otherwise copied at each
        call. "BlockWise128x128": for b, or for a if b's are 1x128: (K / 128, N / 128) or (K / 128,
        M / 128), or with K / 128 padded to a multiple of 4. With these two, K is a multiple of 16,
        the last block may be shorter, and M and N are arbitrary; a and b may be batches, (L, M, K)
        and (L, K, N), with their factors.
        "BlockWise1x32" (E8M0) or "BlockWise1x16" (e4m3) for both, which Blackwell's tensor cores
        read: swizzled, (M / 128, K / (4 block), 32, 4, 4), sizes rounded up. a and b are float8 or
        float4_e2m1fn_x2 (b transposed, K contiguous), matrices or batches. With 1x16 a per-tensor
        factor may follow: [blocks, one float32] with [BlockWise1x16, TensorWise].
    swizzle_a, swizzle_b: members of torch.nn.functional.SwizzleType, or their names, for 1x32 and
        1x16: SWIZZLE_32_4_4 in any shape, or NO_SWIZZLE (M, K / block), which is swizzled here.
    bias, activation, residual: as in `cutex.matmul`.
    output_dtype: bfloat16, float16 or float32. With 1x32 or 1x16 also "mxfp8", "mxfp8_e5m2",
        "mxfp4" or "nvfp4": a QuantizedTensor, bit by bit `cutex.quantize` of the float32 result,
        for the next product; for fp4, N is even and the activation not gated.
    output_scale: for "nvfp4", the result's per-tensor factor, one float32, which cannot be known
        before the product.
    use_fast_accum: whether, on Hopper, "TensorWise" and "RowWise" are summed by tensor cores alone,
        which keep some 13 bits of a sum, as in `cutex.matmul`; block recipes are not.

    On Hopper the sums of each 128 of K are added up in fp32 registers, as DeepSeek-V3 does, of
    block recipes scaled before. A factor multiplies the sum of its block's products, a's and b's by
    their product: an infinite one makes it infinite, or NaN if the sum is 0. Not differentiable.
    Raises TypeError or ValueError, in one sentence that says what was expected, for arguments that
    are not supported, and without a GPU that the recipe runs on.
    """
    recipes, swizzles = (scale_recipe_a, scale_recipe_b), (swizzle_a, swizzle_b)
    scale_a, scale_b = only(scale_a), only(scale_b)
    if not _is_compiling():
        given, formats = tensors_of(a, b, scale_a, scale_b)
        absent = bias is None, residual is None, output_scale is None
        kinds = names_of(*recipes, *swizzles)
        options = formats, kinds, absent, activation, output_dtype, use_fast_accum
        if bias is not None or residual is not None:
            given = (*given, *(x for x in (bias, residual) if x is not None))
        found = PLANS.launched(options, *given)
        if found is not None:
            return found
    a, b = torchao_tensors.both(a, b)
    check_unwanted("cutex.scaled_mm", a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    check_flag("use_fast_accum", use_fast_accum)
    if _by_tensor_cores(a, scale_recipe_a) or _by_tensor_cores(b, scale_recipe_b):
        operands = _block_operands((a, b), (scale_a, scale_b), recipes, swizzles)
        found = block_scaled(*operands, bias, residual, activation, output_dtype, output_scale)
        if isinstance(output_dtype, str):
            own = None if output_scale is None else output_scale.detach().reshape(1)
            return QuantizedTensor(found[0], found[1], output_dtype, True, own)
        return found[0]
    if isinstance(output_dtype, str):
        raise ValueError(f"output_dtype={output_dtype!r}: takes factors that tensor cores read")
    if output_scale is not None:
        raise ValueError('output_scale is given: takes output_dtype="nvfp4"')
    for name, swizzle in (("a", swizzle_a), ("b", swizzle_b)):
        if name_of(swizzle) not in (None, "NO_SWIZZLE"):
            raise ValueError(f"swizzle_{name}={swizzle!r}: these factors are not swizzled")
    if isinstance(a, QuantizedTensor):
        a, scale_a, scale_recipe_a = unpacked("a", a, scale_a)
    if isinstance(b, QuantizedTensor):
        b, scale_b, scale_recipe_b = unpacked("b", b, scale_b)
    kinds = _kind("scale_recipe_a", scale_recipe_a), _kind("scale_recipe_b", scale_recipe_b)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        check_strided(name, scale)
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {scale.dtype}")
    assert isinstance(scale_a, Tensor) and isinstance(scale_b, Tensor)
    if kinds[0] in WHOLE and kinds[1] in WHOLE:
        _check_whole(a, b, scale_a, scale_b, kinds)
        if not _is_compiling():
            _remember_whole(options, given, formats)
        return matmul(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, residual=residual,
                      activation=activation, out_dtype=output_dtype,
                      use_fast_accum=use_fast_accum)  # fmt: skip
    if kinds not in RECIPES:
        raise ValueError(
            f"scale_recipe_a {kinds[0]} with scale_recipe_b {kinds[1]}: takes TensorWise or RowWise"
            " of both, or BlockWise1x128 of one with BlockWise128x128 or BlockWise1x128"
        )
    check_blocks(a, b, scale_a, scale_b, kinds, activation, output_dtype)
    check(Call(a, b, bias, residual, activation=activation, out_dtype=output_dtype))
    if not _is_compiling():
        _remember(options, given, formats, kinds)
    scale_a, scale_b = of_rows(scale_a, a, kinds), of_matrix(scale_b, a.shape[-1], kinds)
    return product(a, b, scale_a, scale_b, RECIPES[kinds], bias, residual, activation, output_dtype)


PLANS = PlanCache()
_is_compiling = torch.compiler.is_dynamo_compiling


def tensors_of(
    a: Any, b: Any, scale_a: Any, scale_b: Any
) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """The elements and factors of both sides as they are given, and the formats of those that
    `cutex.quantize` returned, or None."""
    if scale_a is not None and scale_b is not None:
        return (a, b, scale_a, scale_b), (None, None)
    formats = []
    sides = []
    for x, scale in ((a, scale_a), (b, scale_b)):
        mine = isinstance(x, QuantizedTensor) and scale is None
        sides.append((x.data, x.scale) if mine else (x, scale))
        formats.append(x.format if mine else None)
    (a, scale_a), (b, scale_b) = sides
    return (a, b, scale_a, scale_b), (formats[0], formats[1])


def _remember(
    options: Any, given: tuple[Any, ...], formats: tuple[Any, Any], kinds: tuple[str, str]
) -> None:
    """Keep a plan for such calls, if torch has nothing more to do than to run them."""
    if not needs_nothing(*given):
        return
    *_, (no_bias, no_residual, _), activation, output_dtype, _ = options
    a, _, _, scale_b, *_ = given
    turned = formats[1] is not None  # b and its factors, as `cutex.quantize` has them
    whole = kinds[1] == "BlockWise128x128" and not turned
    padded = whole and scale_b.shape[-2] != -(-a.shape[-1] // BLOCK)
    shared = kinds[0] == "BlockWise128x128"  # by rows of a
    turned_a = formats[0] is not None
    known: list[Callable[..., Tensor]] = []

    @untraced
    def launch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *rest: Tensor) -> Tensor:
        b = b.mT if turned else b
        if shared:
            scale_a = of_rows(scale_a.mT if turned_a else scale_a, a, kinds)
        if padded:
            scale_b = of_matrix(scale_b, a.shape[-1], kinds)
        elif whole:
            scale_b = scale_b.mT
        if known:
            return known[0](a, b, scale_a, scale_b, *rest)
        bias, residual = None if no_bias else rest[0], None if no_residual else rest[-1]
        options = RECIPES[kinds], bias, residual, activation, output_dtype
        out = run(a, b, scale_a, scale_b, *options)
        if (function := KNOWN.get(key_of(a, b, scale_a, scale_b, *options))) is not None:
            known.append(allocating(function, out, 4))
        return out

    PLANS.remember(PLANS.key_of(options, *given), given, launch)


def _remember_whole(options: Any, given: tuple[Any, ...], formats: tuple[Any, Any]) -> None:
    """The same of calls with factors of rows or tensors, which `matmul` has plans for."""
    if not all(isinstance(x, Tensor) for x in given) or not needs_nothing(*given):
        return
    *_, (no_bias, no_residual, _), activation, output_dtype, fast = options
    turned = formats[1] is not None
    known: list[Callable[..., Tensor]] = []

    @untraced
    def launch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *rest: Tensor) -> Tensor:
        b, scale_b = (b.mT, scale_b.mT) if turned else (b, scale_b)
        if known:
            return known[0](a, b, *rest, scale_a, scale_b)
        bias, residual = None if no_bias else rest[0], None if no_residual else rest[-1]
        call = Call(a, b, bias, residual, None, scale_a, scale_b, None, activation, output_dtype,
                    use_fast_accum=fast)  # fmt: skip
        out = matmul(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, residual=residual,
                     activation=activation, out_dtype=output_dtype,
                     use_fast_accum=fast)  # fmt: skip
        if a is not b and (found := launch_like(call)) is not None:
            known.append(found)
        return out

    PLANS.remember(PLANS.key_of(options, *given), given, launch)


# ---- checks


def _by_tensor_cores(x: Any, recipe: Any) -> bool:
    """Whether an operand's factors are of those that tensor cores read."""
    if isinstance(x, QuantizedTensor):
        return x.format in FORMATS
    return name_of(recipe) in VECTORS


def _block_operands(
    both: tuple[Any, Any],
    scales: tuple[Any, Any],
    recipes: tuple[Any, Any],
    swizzles: tuple[Any, Any],
) -> tuple[BlockScaledOperand, BlockScaledOperand, int]:
    """a and b, both with K along the last mode, and the elements that share a factor."""
    found, kinds = [], []
    for name, x, scale, recipe, swizzle in zip("ab", both, scales, recipes, swizzles, strict=True):
        if isinstance(x, QuantizedTensor):
            if scale is not None or recipe is not None:
                raise ValueError(f"scale_{name} is given, but {name} is quantized and has its own")
            swizzle = "SWIZZLE_32_4_4" if x.swizzled else "NO_SWIZZLE"
            kinds.append(FORMATS.get(x.format, x.format))
            found.append(BlockScaledOperand(name, x.data, x.scale, x.tensor_scale, swizzle))
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        several = isinstance(scale, list | tuple)
        blocks, *own = scale if several else [scale]
        if len(own) > 1 or (several and not isinstance(recipe, list | tuple)):
            raise ValueError(f"scale_{name}: takes [blocks, one number] with a list of recipes")
        kinds.append(name_of(recipe))
        x = x.mT if name == "b" else x
        found.append(BlockScaledOperand(name, x, blocks, own[0] if own else None, name_of(swizzle)))
    if kinds[0] != kinds[1] or kinds[0] not in VECTORS:
        raise ValueError(
            f"scale_recipe_a {kinds[0]} with scale_recipe_b {kinds[1]}: tensor cores take "
            f"{' or '.join(VECTORS)} of both"
        )
    return found[0], found[1], VECTORS[kinds[0]]


def _kind(name: str, recipe: Any) -> str:
    """The name of a ScalingType."""
    if isinstance(recipe, list | tuple) and len(recipe) == 1:
        recipe = recipe[0]
    found = recipe if isinstance(recipe, str) else getattr(recipe, "name", None)
    if found not in KINDS:
        raise ValueError(f"{name}={recipe!r} is not one of {', '.join(KINDS)}")
    return str(found)


def _check_whole(a: Any, b: Any, scale_a: Tensor, scale_b: Tensor, kinds: tuple[str, str]) -> None:
    rows = a.shape[-2] if isinstance(a, Tensor) and a.dim() > 1 else 1
    columns = b.shape[-1] if isinstance(b, Tensor) and b.dim() > 1 else 1
    each = ("scale_a", scale_a, kinds[0], (rows, 1)), ("scale_b", scale_b, kinds[1], (1, columns))
    for name, scale, kind, due in each:
        shape = tuple(scale.shape)
        if kind == "TensorWise":
            if scale.numel() != 1:
                raise ValueError(f"{name} of {kind} must have 1 element, got shape {shape}")
        # NOTE: a's factors as a row, or b's as a column, would be those of the other side
        elif shape not in (due, (due[0] * due[1],)):
            raise ValueError(f"{name} of {kind} must have shape {due}, got {shape}")
