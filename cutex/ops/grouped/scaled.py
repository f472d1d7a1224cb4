"""`cutex.scaled_grouped_mm`: products of fp8 rows in groups with a matrix for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cutex.ops.differentiation import check_unwanted
from cutex.ops.fp8_blocks import KIND_OF_FORMAT, UNIT, by_rows
from cutex.ops.grouped import launch
from cutex.ops.grouped.block_scaled import block_scaled_grouped
from cutex.ops.grouped.launch import repeated
from cutex.ops.grouped.scaled_checks import BLOCK, check_epilogue, check_factors, check_operands
from cutex.ops.grouped.scaled_sums import scaled_sums
from cutex.ops.number import check_flag
from cutex.ops.plans import PlanCache
from cutex.ops.quantize import QuantizedTensor
from cutex.ops.recipes import name_of, names_of, only
from cutex.ops.row.operators import define, needs_nothing
from cutex.ops.scaled_mm import (
    _block_operands,
    _by_tensor_cores,
    _kind,
    tensors_of,
)
from cutex.problem.matmul import ACTIVATIONS

if TYPE_CHECKING:
    from cutex.kernels.gemm.config import GemmConfig

WHOLE = ("TensorWise", "RowWise")
BLOCKS = ("BlockWise1x128", "BlockWise128x128")


def scaled_grouped_mm(
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor,
    scale_a: Any = None,
    scale_b: Any = None,
    offs: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    scale_recipe_a: Any = None,
    scale_recipe_b: Any = None,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> Tensor:
    """Grouped products of fp8 rows: activation((a * scale_a)[rows of e] @ (b * scale_b)[e] +
    bias[e]), where group e has the rows from offs[e - 1] (0 for e = 0) to offs[e]. The result is
    (T, N).

    a, b: (T, K) and (E, K, N), float8_e4m3fn with K contiguous (b a view of (E, N, K)); otherwise
        copied first. Or results of `cutex.quantize` for x (T, K) and for weights (E, N, K), N a
        multiple of 128, which bring their scales.
    offs, counts: as in `cutex.grouped_mm`; with counts, a is (E, M, K) and the result (E, M, N).
    scale_recipe_a, scale_recipe_b: members of torch.nn.functional.ScalingType, or their names. With
        counts, the shapes for a have E and M instead of T.
        "TensorWise": one float32, for b alternatively one per group. "RowWise": (T,) for a, (E, N)
        for b. a and b may differ.
        "BlockWise1x128" for a, (T, K / 128), with "BlockWise128x128" for b, (E, K / 128, N / 128),
        sizes rounded up. a's factors are best given with contiguous rows at a pitch of a multiple
        of 16 bytes, as torch and DeepGEMM store them; otherwise they are copied at each call. b's
        may have any strides. K is a multiple of 16; the last block may be shorter.
        "BlockWise1x32" (E8M0) or "BlockWise1x16" (e4m3) for both, which Blackwell's tensor cores
        read: (T, K / block) for a, (E, N, K / block) for b; or swizzled, with a's in chunks of 128
        rows and a new chunk for each group, as in torch. a and b are float8 or float4_e2m1fn_x2 (K
        contiguous). With 1x16 a per-tensor factor may follow, for b one per group: [blocks,
        float32] with [BlockWise1x16, TensorWise].
    swizzle_a, swizzle_b: members of torch.nn.functional.SwizzleType, or their names, for 1x32 and
        1x16: SWIZZLE_32_4_4, or NO_SWIZZLE, which is swizzled here. Quantize x for this function
        without a swizzle: quantize(x, "mxfp8", swizzled=False).
    bias, activation: as in `cutex.grouped_mm`. output_dtype: bfloat16, float16 or float32.
    use_fast_accum: whether, on Hopper, "TensorWise" and "RowWise" with offs or counts over rows are
        summed by tensor cores alone, which keep some 13 bits of a sum; as in torch.
    a (M, T), b (T, N), with offs: a[:, rows of e] @ b[rows of e], (E, M, N), such as a weight's
        gradient; zeros for an empty group, whatever its factors. "TensorWise": one float32, or one
        per group; "RowWise": (E M,) or (E, M) for a, (E N,) or (E, N) for b, as in torch: each
        group has its own row factors. Computed in bfloat16, which represents every float8 exactly,
        at bfloat16's speed.

    On Hopper the sums of each 128 of K are added up in fp32 registers, as DeepSeek-V3 does, of
    block recipes scaled before. Rows of no group are neither read nor written. Nothing waits for
    the host. Not differentiable. Raises TypeError or ValueError, in one sentence, for arguments
    that are not supported, and without a GPU that the recipe runs on.
    """
    name, edges = ("offs", offs) if counts is None else ("counts", counts)
    kinds = (scale_recipe_a, scale_recipe_b), (swizzle_a, swizzle_b)
    scale_a, scale_b = only(scale_a), only(scale_b)
    if not torch.compiler.is_dynamo_compiling():
        sides, formats = tensors_of(a, b, scale_a, scale_b)
        forms = offs is None, counts is None, bias is None
        names = names_of(*kinds[0], *kinds[1])
        options = formats, names, forms, activation, output_dtype, use_fast_accum
        given = (*sides, edges) if bias is None else (*sides, edges, bias)
        found = PLANS.launched(options, *given)
        if found is not None:
            return found
    if (offs is None) == (counts is None):
        raise ValueError("scaled_grouped_mm takes offs or counts, one of them")
    check_flag("use_fast_accum", use_fast_accum)
    check_unwanted("cutex.scaled_grouped_mm", a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    if _by_tensor_cores(a, scale_recipe_a) or _by_tensor_cores(b, scale_recipe_b):
        *both, vector = _block_operands((a, b), (scale_a, scale_b), *kinds)
        if isinstance(a, QuantizedTensor) and a.swizzled:
            raise ValueError(
                "a's factors are swizzled over all rows, not each group's: quantize it with "
                "swizzled=False"
            )
        return block_scaled_grouped(
            (both[0], both[1]), vector, edges, name, bias, activation, output_dtype
        )
    for side, swizzle in zip("ab", kinds[1], strict=True):
        if name_of(swizzle) not in (None, "NO_SWIZZLE"):
            raise ValueError(f"swizzle_{side}={swizzle!r}: these factors are not swizzled")
    a, scale_a, kind_a = _side("a", a, scale_a, scale_recipe_a)
    b, scale_b, kind_b = _side("b", b, scale_b, scale_recipe_b)
    assert edges is not None  # as checked
    if name == "offs" and _is_matrix(a) and _is_matrix(b):
        if bias is not None or activation is not None:
            raise ValueError("bias, activation: sums over the rows of groups take neither")
        return scaled_sums(a, b, (scale_a, scale_b), (kind_a, kind_b), edges, output_dtype)
    check_operands(a, b, edges, name)
    check_epilogue(bias, activation, b, output_dtype)
    recipe = _recipe(kind_a, kind_b)
    _check_scales(a, b, (scale_a, scale_b), (kind_a, kind_b))
    operands = (x.detach() for x in (a, b, *_as_kernels_have(a, b, scale_a, scale_b)))
    rest = recipe, bias, activation, output_dtype, name == "counts", use_fast_accum
    if not torch.compiler.is_dynamo_compiling():
        _remember(options, given, formats, rest)
    return SCALED_GROUPED(*operands, edges.detach(), *rest)


PLANS = PlanCache()


def _remember(
    options: Any, given: tuple[Any, ...], formats: tuple[Any, Any], rest: tuple[Any, ...]
) -> None:
    """Keep a plan for such calls, if torch has nothing more to do than to run them."""
    if not needs_nothing(*given) or any(x.requires_grad for x in given):
        return
    recipe, _, *others = rest
    of_a, of_b = (KIND_OF_FORMAT.get(f) if f else None for f in formats)
    activation, _, padded, fast = others
    known: list[Callable[..., Tensor]] = []

    def launch(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, edges: Tensor, *bias: Tensor
    ) -> Tensor:
        if of_a:
            a, scale_a, _ = _of_quantized("a", a, scale_a, of_a)
        if of_b:
            b, scale_b, _ = _of_quantized("b", b, scale_b, of_b)
        factors = _as_kernels_have(a, b, scale_a, scale_b)
        if known and recipe == "fp8_block":
            return known[0](a, b, *factors, edges, *bias)
        if known:
            return known[0](a, b, edges, *factors, *bias)
        out = _run(a, b, *factors, edges, recipe, bias[0] if bias else None, *others)
        kind, passed, place = _as_passed(recipe, a, b, *factors, out, edges, *bias)
        kinds = [(kind, _Options(recipe, activation, padded, fast))]
        if found := repeated(kinds, passed, place):
            known.append(found)
        return out

    PLANS.remember(PLANS.key_of(options, *given), given, launch)


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2


def _recipe(kind_a: str, kind_b: str) -> str:
    """The kernel's recipe for factors of these kinds."""
    if (kind_a, kind_b) == BLOCKS:
        return "fp8_block"
    if kind_a in WHOLE and kind_b in WHOLE:
        return "fp8_row"
    raise ValueError(
        f"scale_recipe_a {kind_a} with scale_recipe_b {kind_b}: takes TensorWise or RowWise of "
        "each, or BlockWise1x128 with BlockWise128x128"
    )


def _check_scales(a: Tensor, b: Tensor, scales: tuple[Any, Any], kinds: tuple[str, str]) -> None:
    """Raise unless the factors are of the shapes that their kinds take."""
    (groups, k, n), rows = b.shape, tuple(a.shape[:-1])
    if kinds == BLOCKS:
        if k % UNIT or not k:
            raise ValueError(f"K={k}: with factors of {BLOCK} it must be a multiple of {UNIT}")
        blocks = -(-k // BLOCK)
        check_factors("scale_a", scales[0], ((*rows, blocks),), a)
        check_factors("scale_b", scales[1], ((groups, blocks, -(-n // BLOCK)),), a)
        return
    one: tuple[tuple[int, ...], ...] = ((), (1,))
    check_factors("scale_a", scales[0], one if kinds[0] == "TensorWise" else (rows,), a)
    due = (*one, (groups,)) if kinds[1] == "TensorWise" else ((groups, n),)
    check_factors("scale_b", scales[1], due, a)


def _as_kernels_have(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The factors by rows: of blocks (.., K / 128) of a and (E, N / 128, K / 128) of b, else one
    for each row of a, and for each column of each group."""
    groups, _, n = b.shape
    if scale_b.dim() == 3:
        return scale_a, scale_b.mT
    if scale_b.shape == (groups,):
        scale_b = scale_b[:, None]
    return scale_a.expand(a.shape[:-1]), scale_b.expand(groups, n)


def _side(name: str, x: Any, scale: Any, recipe: Any) -> tuple[Any, Any, str]:
    """The elements, factors and kind of an operand, with K along a's last mode and b's second."""
    if not isinstance(x, QuantizedTensor):
        return x, scale, _kind(f"scale_recipe_{name}", recipe)
    if scale is not None or recipe is not None:
        raise ValueError(f"scale_{name} is given, but {name} is quantized and has its own")
    if x.format not in KIND_OF_FORMAT:
        known = ", ".join(KIND_OF_FORMAT)
        raise ValueError(f"{name} is quantized as {x.format}, which is not one of {known}")
    return _of_quantized(name, x.data, x.scale, KIND_OF_FORMAT[x.format])


def _of_quantized(name: str, data: Tensor, factors: Tensor, kind: str) -> tuple[Any, Any, str]:
    """The same of what `cutex.quantize` returned."""
    if name == "a":
        return data, factors.view(*data.shape[:-1], -1) if data.dim() > 2 else factors, kind
    if data.dim() != 3 or (kind == "BlockWise128x128" and data.shape[1] % BLOCK):
        shape = tuple(data.shape)
        raise ValueError(
            f"b is quantized with shape {shape}: takes (E, N, K) with N a multiple of {BLOCK}; "
            "quantize each matrix by itself otherwise"
        )
    return data.mT, factors.unflatten(0, (data.shape[0], -1)).mT, kind


class _Options(NamedTuple):
    """What a launch's kernel depends on beside its tensors."""

    recipe: str
    activation: str | None
    padded: bool
    fast: bool


def _run(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, edges: Tensor, recipe: str,
    bias: Tensor | None, activation: str | None, output_dtype: torch.dtype, padded: bool,
    fast: bool,
) -> Tensor:  # fmt: skip
    gated = (activation or "").startswith("gated_")
    if gated and output_dtype is torch.float32 and launch.arch_for(a, NAME) == "sm_90a":
        # NOTE: a gate leaves single columns of fp32 to a thread, which TMA does not store there
        plain = _run(a, b, scale_a, scale_b, edges, recipe, bias, None, output_dtype, padded, fast)
        return _as_stored(ACTIVATIONS[activation](plain))
    rest = recipe, bias, activation, output_dtype, padded, fast
    out = _fake(a, b, scale_a, scale_b, edges, *rest)
    if out.numel() == 0:
        launch.arch_for(a, NAME)
        return out
    flat = launch.with_padding(out.flatten(0, -2))
    rows, factors = a.flatten(0, -2), scale_a.flatten(0, a.dim() - 2)
    options, biases = _Options(recipe, activation, padded, fast), [] if bias is None else [bias]
    # as the kernels have them: a call that is known is launched at once
    kind, given, _ = _as_passed(recipe, rows, b, factors, scale_b, flat, edges, *biases)
    launch.again(kind, options, given, _blocks_call if kind == "blocks" else _rows_call)
    return out


def _as_passed(
    recipe: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor,
    edges: Tensor, *bias: Tensor,
) -> tuple[str, list[Tensor], int]:  # fmt: skip
    """The kernel of a recipe, its arguments, and which of them is the result."""
    if recipe == "fp8_block":
        return "blocks", [a, b, scale_a, scale_b, out, edges, *bias], 4
    return "rows", [a, b, out, edges, scale_a, scale_b, *bias], 2


def _as_stored(x: Tensor) -> Tensor:
    """x with rows at the pitch that a kernel's result has."""
    out = launch.empty(tuple(x.shape), x)
    return out.copy_(x) if out.stride() != x.stride() else x


def _fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, edges: Tensor, recipe: str,
    bias: Tensor | None, activation: str | None, output_dtype: torch.dtype, padded: bool,
    fast: bool,
) -> Tensor:  # fmt: skip
    n = b.shape[2] // 2 if (activation or "").startswith("gated_") else b.shape[2]
    return launch.empty((*a.shape[:-1], n), a.new_empty(0, dtype=output_dtype))


NAME = "cutex.scaled_grouped_mm"


def _blocks_call(options: Any, passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of a call with factors of blocks."""
    from cutex.kernels.gemm.grouped import choose
    from cutex.kernels.gemm.grouped.config import BLOCKS, BlocksConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout

    a, b, scale_a, scale_b, out, edges, *bias = passed
    arch = launch.arch_for(a, NAME)
    if arch != "sm_90a":
        raise ValueError(
            "a is on a Blackwell GPU: fp32 factors of blocks run on Hopper; Blackwell's tensor "
            'cores scale by themselves, with cutex.quantize(x, "mxfp8")'
        )
    a, of_a, b, of_b = _operands(a, b)
    of_a, of_b = (replace(of, scales=x) for of, x in zip((of_a, of_b), BLOCKS, strict=True))
    ops, others = launch.fused(bias[0] if bias else None, activation=options.activation)
    most = choose.most_groups(edges.shape[0])
    groups, k, n = b.shape
    mean = -(-a.shape[0] // groups)
    tiles = choose.blocks_tiles(mean, (k, n), bool(ops), most, groups, options.padded)
    product = GeneralConfig(tiles, of_a, of_b, OperandLayout(launch.name_of(out)), ops)
    config = BlocksConfig(product, most, options.padded)
    factors = by_rows(scale_a), scale_b
    return config, arch, [a, b, *factors, out, launch.ends(edges), *others]


def _rows_call(options: Any, passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of a call with factors of rows and columns."""
    from cutex.device.epilogue.epilogue_ops import Scales
    from cutex.kernels.gemm.grouped import choose
    from cutex.kernels.gemm.grouped.config import GroupedConfig, PromotedConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout

    a, b, out, edges, scale_a, scale_b, *bias = passed
    arch = launch.arch_for(a, NAME)
    if a.shape[1] == 0:  # nothing to add up: the epilogue of zeros
        a = a.new_zeros((a.shape[0], launch.ALIGN))
        b = b.new_zeros((b.shape[0], b.shape[2], launch.ALIGN)).mT
    a, of_a, b, of_b = _operands(a, b)
    ops, others = launch.fused(bias[0] if bias else None, activation=options.activation)
    ops = (Scales("row", "column"), *ops)
    most, mean = choose.most_groups(edges.shape[0]), -(-a.shape[0] // edges.shape[0])
    groups, k, n = b.shape
    # NOTE: sums of one block are the same either way
    promoted = arch == "sm_90a" and k > BLOCK and not options.fast
    tiles: GemmConfig = (
        choose.promoted_tiles(mean, (k, n), most)
        if promoted
        else choose.rows_tiles(arch, mean, (k, n), True, most, groups, padded=options.padded)
    )
    product = GeneralConfig(tiles, of_a, of_b, OperandLayout(launch.name_of(out)), ops)
    config = (PromotedConfig if promoted else GroupedConfig)(product, most, options.padded)
    return config, arch, [a, b, out, launch.ends(edges), scale_a, scale_b, *others]


def _operands(a: Tensor, b: Tensor) -> tuple[Tensor, Any, Tensor, Any]:
    """a and b with K contiguous, each with its layout."""
    a, of_a, _ = launch.operand(a, -1, True)
    b, of_b, _ = launch.operand(b.contiguous() if b.stride(0) == 0 else b, -2, True)
    return a, of_a, b, of_b


SCALED_GROUPED = define(
    "scaled_grouped_mm",
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor edges, str recipe, Tensor? bias, "
    "str? activation, ScalarType output_dtype, bool padded, bool fast) -> Tensor",
    _run,
    _fake,
)
