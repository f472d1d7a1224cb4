"""Products of operands whose scale factors tensor cores read: MXFP8, MXFP4, NVFP4, fp8 by fp4.

The part of `cutex.scaled_mm` that runs on Blackwell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cutex.arch import arch as arch_named
from cutex.compile import ALIGN
from cutex.dtypes import DTYPES, of_torch
from cutex.ops.device import arch_of, current, launcher, on_device
from cutex.ops.matmul.arrange import aligned, fused, normal, repacked, result
from cutex.ops.matmul.checks import Call, check
from cutex.ops.plain import untraced
from cutex.ops.plans import PlanCache, arguments_of
from cutex.ops.row.operators import define, needs_nothing
from cutex.problem.scaled import layouts
from cutex.problem.scaled.formats import format_named

VECTORS = {"BlockWise1x32": 32, "BlockWise1x16": 16}  # elements that share a factor
FACTORS = {32: torch.float8_e8m0fnu, 16: torch.float8_e4m3fn}
ARCH = "sm_100a"
PADDED_K, PADDED_ALIGN = 128, 32  # of fp4 beside fp8: elements, bytes
OUT_FORMATS = (
    "mxfp8",
    "mxfp8_e5m2",
    "mxfp4",
    "nvfp4",
)  # that the epilogue can quantize the result to
INST_K = 64  # elements of fp4 in an MMA
FORMATS = {
    "mxfp8": "BlockWise1x32",
    "mxfp8_e5m2": "BlockWise1x32",
    "mxfp4": "BlockWise1x32",
    "nvfp4": "BlockWise1x16",
}


class BlockScaledOperand(NamedTuple):
    """One operand as scaled_mm was given it: elements, factors of blocks, the tensor's own."""

    name: str
    x: Tensor  # (.., rows, K) or, of fp4, (.., rows, K / 2): K along the last mode
    factors: Tensor
    own: Tensor | None
    swizzle: Any  # the name of a SwizzleType, or None


def block_scaled(
    a: BlockScaledOperand,
    b: BlockScaledOperand,
    vector: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    output_dtype: Any,
    output_scale: Tensor | None = None,
) -> list[Tensor]:
    """activation((a * factors) @ (b * factors)^T + bias) + residual, b as (N, K); with the name of
    a format as `output_dtype` its elements, and their factors, of NVFP4 relative to
    `output_scale`."""
    from cutex.kernels.gemm.scaled.sm100.config import kind_of

    compiling, rest = _is_compiling(), (a.own, b.own, bias, residual, output_scale)
    if not compiling:
        tensors = [a.x, a.factors, b.x, b.factors, *(x for x in rest if x is not None)]
        absent = tuple([x is None for x in rest])
        options = a.swizzle, b.swizzle, vector, absent, activation, output_dtype
        if (known := PLANS.launched(options, *tensors)) is not None:
            return known
    names = _element(a), _element(b)
    kind_of(names[0], names[1], vector)  # ValueError
    (*batch_a, m, k), (*batch_b, n, k_of_b) = (_sizes(x) for x in (a, b))
    if k != k_of_b:
        raise ValueError(f"b has K={k_of_b}, but a has K={k}")
    if batch_a != batch_b or len(batch_a) > 1:
        raise ValueError(
            f"a and b must be matrices or batches of as many, got {tuple(a.x.shape)} and "
            f"{tuple(b.x.shape)}"
        )
    unit = PADDED_K if _is_mixed(names) else vector
    if not k or k % unit:
        why = "with fp4 beside fp8" if unit == PADDED_K else f"with factors of 1x{vector}"
        raise ValueError(f"K={k}: {why} it must be a multiple of {unit}")
    factors = [_swizzled(x, rows, k // vector, vector) for x, rows in ((a, m), (b, n))]
    own = [_own(x, vector) for x in (a, b)]
    stand_ins = [_stand_in(x.x, (*batch_a, *size)) for x, size in ((a, (m, k)), (b, (k, n)))]
    quantized = output_dtype if isinstance(output_dtype, str) else None
    if quantized not in (None, *OUT_FORMATS):
        raise ValueError(f"output_dtype={quantized!r} is not one of {', '.join(OUT_FORMATS)}")
    output_scale = _output_scale(quantized, output_scale, n, activation, a.x.device)
    if quantized is not None:
        output_dtype = torch.bfloat16  # for the checks: bias and residual may have it
    check(
        Call(
            stand_ins[0],
            stand_ins[1],
            bias,
            residual,
            activation=activation,
            out_dtype=output_dtype,
        )
    )
    of = BlockScaledProduct(
        _bytes(a.x.detach()), _bytes(b.x.detach()), factors[0], factors[1], own[0], own[1], vector,
        bias, residual, activation, output_dtype, quantized, output_scale,
    )  # fmt: skip
    if not compiling and needs_nothing(*tensors):
        _remember(options, tensors, of)
    return _finished(list(BLOCK_SCALED_MM(*of)), quantized)


PLANS = PlanCache()
_is_compiling = torch.compiler.is_dynamo_compiling


def _remember(options: Hashable, tensors: list[Tensor], of: BlockScaledProduct) -> None:
    """Keep a plan for such calls, if their kernel's arguments are views of the call's."""
    _check_arch(of)
    outputs, device = of.outputs(), of.a.device
    if not outputs[0].numel():
        return
    with current(device):
        function, passed = _launch_of(of, outputs)
    arguments = arguments_of(passed, [*tensors, *outputs])
    if arguments is None:
        return
    function, quantized = on_device(device, function), of.quantized
    made = [(tuple(x.shape), x.dtype) for x in outputs]  # no tensor, which a plan would keep

    @untraced
    def launch(*given: Tensor) -> list[Tensor]:
        out = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in made[:1]]
        for shape, dtype in made[1:]:  # factors, of which those that pad are zero
            out.append(torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype))
        function(*[x.of((*given, *out)) for x in arguments])
        return _finished(out, quantized)

    PLANS.remember(PLANS.key_of(options, *tensors), tensors, launch)


def of_quantized(
    a: Any,
    b: Any,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    output_dtype: Any,
) -> list[Tensor]:
    """block_scaled for two QuantizedTensors, (M, K) and (N, K)."""
    found = []
    for name, q in (("a", a), ("b", b)):
        swizzle = "SWIZZLE_32_4_4" if q.swizzled else "NO_SWIZZLE"
        found.append(BlockScaledOperand(name, q.data, q.scale, q.tensor_scale, swizzle))
    kinds = FORMATS[a.format], FORMATS[b.format]
    if kinds[0] != kinds[1]:
        raise ValueError(f"a is of {a.format} and b of {b.format}: tensor cores take blocks alike")
    vector = VECTORS[kinds[0]]
    return block_scaled(found[0], found[1], vector, bias, residual, activation, output_dtype)


# ---- checks


def _output_scale(
    quantized: str | None, given: Any, n: int, activation: str | None, device: torch.device
) -> Tensor | None:
    """The factor of a result in NVFP4, of one element; ValueError or TypeError for another."""
    of = None if quantized is None else format_named(quantized)
    if of is not None and of.element == "e2m1":
        if activation is not None and activation.startswith("gated"):
            raise ValueError(f"output_dtype={quantized!r} takes no gated activation")
        if n % 2:
            raise ValueError(f"N={n}: two elements of {quantized} share a byte, it is even")
    if of is None or not of.tensor_scale:
        if given is not None:
            raise ValueError('output_scale is given: takes output_dtype="nvfp4"')
        return None
    if not isinstance(given, Tensor) or given.dtype != torch.float32 or given.numel() != 1:
        got = f"{given.dtype} of {given.numel()}" if isinstance(given, Tensor) else given
        raise TypeError(f"output_scale must be one float32 number for nvfp4, got {got}")
    if given.device != device:
        raise ValueError(f"output_scale is on {given.device}, not on {device}")
    return given.detach().reshape(1)


def _element(operand: BlockScaledOperand) -> str:
    found = of_torch(operand.x.dtype) if isinstance(operand.x, Tensor) else None
    if found is None or found.name not in ("e4m3", "e5m2", "e2m1"):
        got = getattr(operand.x, "dtype", type(operand.x).__name__)
        raise TypeError(
            f"{operand.name} must be float8_e4m3fn, float8_e5m2 or float4_e2m1fn_x2 with factors "
            f"that tensor cores read, got {got}"
        )
    return found.name


def _sizes(operand: BlockScaledOperand) -> tuple[int, ...]:
    """The sizes (.., rows, K) in elements."""
    if operand.x.dim() not in (2, 3):
        raise ValueError(f"{operand.name} must be a matrix or a batch, got {operand.x.dim()} dims")
    *rest, k = operand.x.shape
    return (*rest, k * (2 if operand.x.dtype is torch.float4_e2m1fn_x2 else 1))


def _swizzled(operand: BlockScaledOperand, rows: int, columns: int, vector: int) -> Tensor:
    """The factors as bytes (.., RestRows, RestK, 32, 4, 4)."""
    name, scale = f"scale_{operand.name}", operand.factors
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(scale).__name__}")
    if scale.dtype != FACTORS[vector]:
        raise TypeError(f"{name} of 1x{vector} must be {FACTORS[vector]}, got {scale.dtype}")
    if scale.device != operand.x.device:
        raise ValueError(f"{name} is on {scale.device}, not on {operand.x.device}")
    batch, how = operand.x.shape[:-2], operand.swizzle
    due = (*batch, *layouts.swizzled_shape(rows, columns))
    plain = (*batch, rows, columns)
    option, scale = f"swizzle_{operand.name}", scale.detach()
    if how not in (None, "NO_SWIZZLE", "SWIZZLE_32_4_4"):
        raise ValueError(f"{option}={how!r} is not one of NO_SWIZZLE, SWIZZLE_32_4_4")
    if how == "NO_SWIZZLE":
        if tuple(scale.shape) != plain:
            raise ValueError(f"{name} must be {plain} with NO_SWIZZLE, got {tuple(scale.shape)}")
        return layouts.swizzle(scale).view(torch.uint8)
    flat = how == "SWIZZLE_32_4_4" and scale.numel() == math.prod(due)
    if not (tuple(scale.shape) == due or flat):
        raise ValueError(
            f"{name} must be {due}, or as many in another shape with {option}=SWIZZLE_32_4_4, or "
            f"{plain} with NO_SWIZZLE, got {tuple(scale.shape)}"
        )
    if not scale.is_contiguous():
        raise ValueError(f"{name} is swizzled, and must be contiguous: strides {scale.stride()}")
    return scale.view(torch.uint8).view(due)


def _own(operand: BlockScaledOperand, vector: int) -> Tensor | None:
    """The tensor's own factor, of one element."""
    own, name = operand.own, f"tensor scale of {operand.name}"
    if own is None:
        return None
    if vector != 16:
        raise ValueError(f"the {name} is given, but factors of 1x{vector} have none")
    if not isinstance(own, Tensor) or own.dtype != torch.float32 or own.numel() != 1:
        got = f"{own.dtype} of {own.numel()}" if isinstance(own, Tensor) else type(own).__name__
        raise TypeError(f"the {name} must be one float32 number, got {got}")
    if own.device != operand.x.device:
        raise ValueError(f"the {name} is on {own.device}, not on {operand.x.device}")
    return own.detach().reshape(1)


def _stand_in(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An fp8 tensor of this shape, for checking the arguments beside a and b."""
    return torch.empty((), dtype=torch.float8_e4m3fn, device=x.device).expand(shape)


# ---- the operator


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype is torch.float4_e2m1fn_x2 else x


class BlockScaledProduct(NamedTuple):
    """The operator's arguments: a (.., M, K) and b (.., N, K), elements of 4 bits as bytes of two,
    their swizzled factors, and their own."""

    a: Tensor
    b: Tensor
    factors_a: Tensor
    factors_b: Tensor
    own_a: Tensor | None
    own_b: Tensor | None
    vector: int
    bias: Tensor | None
    residual: Tensor | None
    activation: str | None
    output_dtype: torch.dtype
    quantized: str | None
    output_scale: Tensor | None

    @property
    def call(self) -> Call:
        """The call in terms of `cutex.matmul`, for its shape and its epilogue."""
        a, b = self.a, self.b
        k = a.shape[-1] * (2 if a.dtype is torch.uint8 else 1)
        like = [_stand_in(a, (*a.shape[:-1], k)), _stand_in(b, (*b.shape[:-2], k, b.shape[-2]))]
        rest = self.own_a, self.own_b, None, self.activation, self.output_dtype
        return Call(like[0], like[1], self.bias, self.residual, None, *rest)

    def outputs(self) -> list[Tensor]:
        """The result, or its elements and its swizzled factors, of which those that pad are
        zero."""
        call, device = self.call, self.a.device
        if self.quantized is None:
            return [torch.empty(call.shape, dtype=call.dtype, device=device)]
        of = format_named(self.quantized)
        *batch, m, n = call.shape
        shape = (*batch, *layouts.swizzled_shape(*of.factors(m, n)))
        factors = torch.zeros(shape, dtype=torch.uint8, device=device)
        if of.element == "e2m1":
            data = torch.empty((*batch, m, n // 2), dtype=torch.uint8, device=device)
        else:
            data = torch.empty(call.shape, dtype=of.dtype.torch, device=device)
        return [data, factors.view(FACTORS[of.block[1]])]


def _finished(outputs: list[Tensor], quantized: str | None) -> list[Tensor]:
    """`outputs`, with bytes of two 4-bit elements viewed as their dtype."""
    if quantized is None or format_named(quantized).element != "e2m1":
        return outputs
    return [outputs[0].view(torch.float4_e2m1fn_x2), *outputs[1:]]


def _run(*given: Any) -> list[Tensor]:
    of = BlockScaledProduct(*given)
    outputs = of.outputs()
    _check_arch(of)
    if outputs[0].numel():
        with current(of.a.device):
            function, tensors = _launch_of(of, outputs)
            function(*tensors)
    return outputs


def _check_arch(of: BlockScaledProduct) -> None:
    arch = arch_of(of.a.device, "cutex.scaled_mm")
    if arch != ARCH:
        raise ValueError(
            f"a is on {arch_named(arch).title}: factors of 1x{of.vector} take Blackwell's tensor "
            'cores; Hopper has kernels for cutex.quantize(x, "fp8_1x128")'
        )


def _launch_of(
    of: BlockScaledProduct, outputs: list[Tensor]
) -> tuple[Callable[..., None], list[Tensor]]:
    """The launch of a product into `outputs`, and its arguments."""
    from cutex.kernels.gemm.layouts import OperandLayout
    from cutex.kernels.gemm.scaled.sm100.signature import SWIZZLED

    a, b, vector, residual, call = of.a, of.b, of.vector, of.residual, of.call
    out = outputs[0]
    k, names = call.a.shape[-1], tuple(_name(x) for x in (a, b))
    mixed = _is_mixed(names)
    placed = [_placed(x, mixed and name == "e2m1") for x, name in zip((a, b), names, strict=True)]
    layout = [
        OperandLayout(
            name,
            "row" if k_contiguous == (i == 0) else "column",
            batched=x.dim() == 3,
            scales=SWIZZLED,
        )
        for i, (name, (x, k_contiguous)) in enumerate(zip(names, placed, strict=True))
    ]
    words = [layouts.words(_without_padding(f, k, vector, names)) for f in of[2:4]]
    if residual is not None and residual.shape != call.shape:
        residual = residual.expand(call.shape)
    to, out_layout, _ = result(out)
    ops, passed = fused(call, out, residual, ARCH)
    if of.quantized is not None:
        from cutex.kernels.gemm.scaled.sm100.roles import QuantizeRows

        ops = cast(Any, (*ops, QuantizeRows(of.quantized)))
        own = [] if of.output_scale is None else [("out_scale", of.output_scale)]
        passed = [*passed, ("out_factors", layouts.words(outputs[1])), *own]
    tensors = [placed[0][0], placed[1][0].mT, to, *words, *(x for _, x in passed)]
    mnk = (call.a.shape[-2], call.b.shape[-1], k)
    batch = out.shape[0] if out.dim() == 3 else 1
    compiled = _kernel(mnk, batch, (*names, vector), (*layout, out_layout), ops)
    return launcher(compiled, tensors), tensors


def _is_mixed(names: tuple[str, ...]) -> bool:
    """Whether one operand has 4 bits and the other 8."""
    return (names[0] == "e2m1") != (names[1] == "e2m1")


def _name(x: Tensor) -> str:
    found = of_torch(x.dtype)
    assert found is not None
    return "e2m1" if found is DTYPES["uint8"] else found.name


def _placed(x: Tensor, wide: bool) -> tuple[Tensor, bool]:
    """x (.., rows, K) so that TMA can step through it, copied if necessary, and whether K is
    contiguous.

    `wide`: 4-bit elements that are loaded into a byte each, which requires units of 32 bytes.
    """
    if wide:
        steps = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
        fits = x.stride(-1) == 1 and not any(s % PADDED_ALIGN for s in steps)
        return (x if fits and x.data_ptr() % PADDED_ALIGN == 0 else x.contiguous().clone()), True
    sides = (-1,) if x.dtype is torch.uint8 else (-1, -2)
    side = next((s for s in sides if aligned(x, s)), None)
    if side is None:
        side, x = -1, repacked(x, -1)
    return normal(x, side), side == -1


def _without_padding(factors: Tensor, k: int, vector: int, names: tuple[str, ...]) -> Tensor:
    """The factors with zeros past K, where an fp4 MMA reads beyond the last ones."""
    if factors.data_ptr() % ALIGN:
        factors = factors.clone()
    if names != ("e2m1", "e2m1") or k % INST_K == 0:
        return factors
    factors = factors.clone()
    factors[..., -1, :, :, k // vector % layouts.SWIZZLE_FACTORS :] = 0
    return factors


@lru_cache(maxsize=4096)
def _kernel(
    mnk: tuple[int, int, int], batch: int, operands: Any, layout: tuple[Any, ...], ops: Any
) -> Any:
    """The compiled kernel for such calls."""
    from cutex.kernels.gemm.scaled.choose import ranked_for
    from cutex.kernels.gemm.scaled.sm100.signature import ScaledConfig

    arch = arch_named(ARCH)
    for tiles in ranked_for(mnk, operands, arch, batch):
        if tiles.swap_ab and (ops or not layout[2].tma):
            # NOTE: a thread then has a column of out, and an address for each row of it
            tiles = replace(tiles, epi_n=16)
        for slots in range(tiles.epi_stages, 1, -1):
            fewer = replace(tiles, epi_stages=slots)
            config = ScaledConfig(**_fields(layout), ops=ops, tiles=fewer)
            if config.why_not(None, arch) is None:
                return _compiled(config)
    m, n, k = mnk
    raise ValueError(f"M={m}, N={n}, K={k}: no config takes these sizes")


def _fields(layout: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("a", "b", "out"), layout, strict=True))


@lru_cache(maxsize=4096)
def _compiled(config: Any) -> Any:
    from cutex.compile import compile
    from cutex.kernels.gemm.scaled.sm100.general import Scaled

    return compile(Scaled(config), config.a.dtype, ARCH)


def _fake(*given: Any) -> list[Tensor]:
    return BlockScaledProduct(*given).outputs()


BLOCK_SCALED_MM = define(
    "block_scaled_mm",
    "(Tensor a, Tensor b, Tensor factors_a, Tensor factors_b, Tensor? own_a, Tensor? own_b, "
    "int vector, Tensor? bias, Tensor? residual, str? activation, ScalarType output_dtype, "
    "str? quantized, Tensor? output_scale) -> Tensor[]",
    _run,
    _fake,
)
