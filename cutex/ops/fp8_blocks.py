"""Products of fp8 operands with fp32 factors of blocks: cutex::scaled_mm."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cutex.arch import arch as arch_named
from cutex.ops.device import arch_of, current, launcher, other_board, per_device
from cutex.ops.matmul.arrange import arrange
from cutex.ops.matmul.checks import ACTIVATIONS, OUT_DTYPES, Call, check
from cutex.ops.row.operators import define
from cutex.problem.scaled import layouts

BLOCK = 128
RECIPES = {
    ("BlockWise1x128", "BlockWise128x128"): "fp8_block",
    ("BlockWise1x128", "BlockWise1x128"): "fp8_1x128",
    ("BlockWise128x128", "BlockWise1x128"): "fp8_1x128",  # a's for each row (`of_rows`)
}
KIND_OF_FORMAT = {
    "fp8_1x128": "BlockWise1x128",
    "fp8_128x128": "BlockWise128x128",
    "fp8_row": "RowWise",
}
FLOAT8 = (torch.float8_e4m3fn,)
UNIT = 16  # elements of e4m3 in what TMA steps by


def product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    recipe: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a (M, K) @ b (K, N), scaled by factors of blocks: (M, K / 128), and (N / 128, K / 128) or (N,
    K / 128), each of a batch with L first; K is a multiple of 16, and a last block may be
    shorter."""
    given = (x.detach() for x in (a, b, scale_a, scale_b))
    return SCALED_MM(*given, recipe, bias, residual, activation, output_dtype)


def of_quantized(
    a: Any,
    b: Any,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    output_dtype: torch.dtype,
) -> Tensor:
    """`product` of two QuantizedTensors, (M, K) and (N, K)."""
    (x, scale_a, kind_a), (w, scale_b, kind_b) = unpacked("a", a, None), unpacked("b", b, None)
    kinds = kind_a, kind_b
    if kinds not in RECIPES:
        raise ValueError(f"a is quantized as {a.format} and b as {b.format}: no kernel takes both")
    check_blocks(x, w, scale_a, scale_b, kinds, activation, output_dtype)
    check(Call(x, w, bias, residual, activation=activation, out_dtype=output_dtype))
    scale_a, scale_b = of_rows(scale_a, x, kinds), of_matrix(scale_b, x.shape[-1], kinds)
    fused = bias, residual, activation, output_dtype
    return product(x, w, scale_a, scale_b, RECIPES[kinds], *fused)


def of_matrix(scale_b: Tensor, k: int, kinds: tuple[str, str]) -> Tensor:
    """The factors of b in `product`'s form: (N / 128, K / 128) for blocks of 128x128."""
    return scale_b[..., : -(-k // BLOCK), :].mT if kinds[1] == "BlockWise128x128" else scale_b


def of_rows(scale_a: Tensor, a: Tensor, kinds: tuple[str, str]) -> Tensor:
    """The factors (.., M, K / 128) of a's rows; with blocks of 128x128, 128 rows share one."""
    if kinds[0] != "BlockWise128x128":
        return scale_a
    *_, m, k = a.shape
    return scale_a[..., : -(-k // BLOCK), :].repeat_interleave(BLOCK, -1)[..., :m].mT


# ---- checks


def unpacked(name: str, q: Any, scale: Any) -> tuple[Tensor, Tensor, str]:
    """The elements of a QuantizedTensor, b's transposed to (K, N), their factors, and the factors'
    kind."""
    if scale is not None:
        raise ValueError(f"scale_{name} is given, but {name} is quantized and has its own")
    if q.format not in KIND_OF_FORMAT:
        known = ", ".join(KIND_OF_FORMAT)
        raise ValueError(f"{name} is quantized as {q.format}, which is not one of {known}")
    kind, by_rows = KIND_OF_FORMAT[q.format], q.format == "fp8_1x128"
    data = q.data.mT if name == "b" else q.data
    turned = kind == "BlockWise128x128" or (name == "b" and not by_rows)
    return data, q.scale.mT if turned else q.scale, kind


def check_blocks(
    a: Any,
    b: Any,
    scale_a: Tensor,
    scale_b: Tensor,
    kinds: tuple[str, str],
    activation: Any,
    output_dtype: torch.dtype,
) -> None:
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in FLOAT8:
            raise TypeError(f"{name} must be float8_e4m3fn with factors of blocks, got {x.dtype}")
        if x.dim() not in (2, 3):
            raise ValueError(f"{name} must be a matrix or a batch, got {x.dim()} dimensions")
    (*batch, m, k), (*batch_b, kb, n) = a.shape, b.shape
    if batch != batch_b:
        raise ValueError(
            f"a and b must be matrices or batches of as many, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )
    if k != kb:
        raise ValueError(f"b has K={kb} (its first size), but a has K={k} (its last)")
    if k % UNIT or not k:
        raise ValueError(f"K={k}: with factors of {BLOCK} it must be a multiple of {UNIT}")
    blocks = -(-k // BLOCK)
    for name, scale, side, rows, kind in (
        ("scale_a", scale_a, "M", m, kinds[0]),
        ("scale_b", scale_b, "N", n, kinds[1]),
    ):
        along = f"K / {BLOCK}" if k % BLOCK == 0 else f"ceil(K / {BLOCK})"
        due, what = [(rows, blocks)], f"{side}, {along}"
        if kind == "BlockWise128x128":
            across = -(-rows // BLOCK)
            due = [(blocks, across), (-(-blocks // 4) * 4, across)]
            what = f"{along}, {side} / {BLOCK}"
        whole = [(*batch, *shape) for shape in due]
        if tuple(scale.shape) not in whole:
            what = f"({'L, ' if batch else ''}{what}) = {whole[0]}"
            raise ValueError(f"{name} of {kind} must be {what}, got {tuple(scale.shape)}")
        if scale.device != a.device:
            raise ValueError(f"{name} is on {scale.device}, but a is on {a.device}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if output_dtype not in OUT_DTYPES:
        raise TypeError(f"output_dtype {output_dtype} is not bfloat16, float16 or float32")


# ---- the operator


def by_rows(scale: Tensor) -> Tensor:
    """Factors (.., rows, K) with contiguous rows that TMA can step through; copied if they are
    not."""
    if scale.dim() == 3 and scale.stride(0) == 0:
        scale = scale[:1]  # one matrix for all of a batch
    *batch, rows, columns = scale.shape
    unit = layouts.PITCH
    pitch = scale.stride(-1) if columns > 1 else -(-rows // unit) * unit
    steps = [pitch * columns if size == 1 else scale.stride(0) for size in batch]
    whole = scale.stride(-2) == 1 and not (scale.data_ptr() % 16 or pitch % unit)
    if not whole or pitch < rows or any(step % unit for step in steps):
        return layouts.rows_contiguous(scale)
    strides = *steps, 1, pitch
    return scale if scale.stride() == strides else scale.as_strided(scale.shape, strides)


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    recipe: str,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    output_dtype: torch.dtype,
) -> Tensor:
    given = [a, b, scale_a, scale_b, *(x for x in (bias, residual) if x is not None)]
    key = key_of(a, b, scale_a, scale_b, recipe, bias, residual, activation, output_dtype)
    if (known := KNOWN.get(key)) is not None:
        out = _fake(a, b, scale_a, scale_b, recipe, bias, residual, activation, output_dtype)
        with current(a.device):
            known(*given[:4], out, *given[4:])
        return out
    call = Call(a, b, bias, residual, activation=activation, out_dtype=output_dtype)
    out = torch.empty(call.shape, dtype=output_dtype, device=a.device)
    arch = arch_of(a.device)
    if arch != "sm_90a":
        raise ValueError(
            f"a is on {arch_named(arch).title}: fp32 factors of blocks run on Hopper; Blackwell's "
            'tensor cores scale by themselves, with cutex.quantize(x, "mxfp8")'
        )
    if not out.numel():
        return out
    if a.shape[-1] % UNIT:
        raise ValueError(f"K={a.shape[-1]}: must be a multiple of {UNIT}")
    arranged = arrange(call, out, arch)
    scale_a = by_rows(scale_a)
    scale_b = scale_b if recipe == "fp8_block" else by_rows(scale_b)
    (first, second, to, *rest) = arranged.tensors
    tensors = [first, second, scale_a, scale_b, to, *rest]
    compiled = _kernel(arranged.sizes, recipe, arranged.out, arranged.ops)
    with current(a.device):
        function = launcher(compiled, tensors)
        function(*tensors)
    passed = [first, second, scale_a, scale_b, *rest]
    if len(passed) == len(given) and all(x is y for x, y in zip(passed, given, strict=True)):
        KNOWN[key] = function
    return out


# the launches of calls whose tensors are passed as they are given, by layouts and options
KNOWN: dict[Any, Any] = per_device({})


def key_of(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str, bias: Tensor | None,
    residual: Tensor | None, activation: str | None, output_dtype: torch.dtype,
) -> Hashable:  # fmt: skip
    """What the launch of a call depends on."""
    given = (a, b, scale_a, scale_b, *(x for x in (bias, residual) if x is not None))
    return (recipe, activation, output_dtype, bias is None, *map(_layout, given))


def _layout(x: Tensor) -> tuple[Any, ...]:
    """What a launch depends on of a tensor, besides its values."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.device


@lru_cache(maxsize=4096)
def _kernel(mnkl: tuple[int, int, int, int], recipe: str, out: Any, ops: Any) -> Any:
    """The compiled kernel for such calls."""
    from cutex.kernels.gemm.scaled.fp8.choose import configs_for
    from cutex.kernels.gemm.scaled.fp8.sm90.kernel import Fp8Signature

    *mnk, batch = mnkl
    for tiles in configs_for((mnk[0], mnk[1], mnk[2]), recipe, batch, other_board("sm_90a")):
        for signature in (Fp8Signature.of(t, out, ops) for t in _with_slots(tiles, ops)):
            if signature.why_not(None, arch_named("sm_90a")) is None:
                return _compiled(signature)
    raise ValueError(f"M={mnk[0]}, N={mnk[1]}, K={mnk[2]}: no config takes these sizes")


def _with_slots(tiles: Any, ops: Any) -> list[Any]:
    """`tiles`, with operations in smaller parts of out, so that fewer registers are in use."""
    return [replace(tiles, epi_n=32), tiles] if ops and tiles.epi_n == 64 else [tiles]


@lru_cache(maxsize=4096)
def _compiled(config: Any) -> Any:
    from cutex.compile import compile
    from cutex.kernels.gemm.scaled.fp8.sm90.kernel import Fp8Gemm

    return compile(Fp8Gemm(config), config.tiles.recipe, "sm_90a")


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    recipe: str,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    output_dtype: torch.dtype,
) -> Tensor:
    call = Call(a, b, bias, residual, activation=activation, out_dtype=output_dtype)
    return a.new_empty(call.shape, dtype=output_dtype)


SCALED_MM = define(
    "scaled_mm",
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str recipe, Tensor? bias, "
    "Tensor? residual, str? activation, ScalarType output_dtype) -> Tensor",
    run,
    _fake,
)
