"""From the tensors of one `cutex.matmul` call to a compiled kernel and how to call it.

A plan holds for every call with the same dtypes, shapes, strides and options. Operands that TMA can
step through are passed as they are; what it costs where it cannot, the plan's notes say:

- a and b need one side contiguous, and the base and all other strides a multiple of 16 bytes; tf32
  and fp8 on Hopper also K contiguous. Else each call copies the operand first.
- out, where its base, strides or contiguous side are no such multiples, is stored element by
  element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import arch
from cutex.kernels.gemm import package
from cutex.kernels.gemm.choose import ranked
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.problem.gemm import GemmProblem

if TYPE_CHECKING:
    from cutex.compile import Compiled
    from cutex.device.epilogue.epilogue_ops import EpilogueOp
    from cutex.kernels.gemm.config import GemmConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout

ALIGN = 16  # bytes
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float32: "fp32",
}
BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1, "fp32": 4}
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# bytes of the elements that an MMA reads only with K contiguous
K_ONLY = {"sm_90a": (1, 4), "sm_100a": ()}
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "gated_silu", "gated_gelu")


@dataclass
class Call:
    """The arguments of one cutex.matmul call."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    out: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    amax: Tensor | None = None
    activation: str | Callable[..., Any] | None = None
    out_dtype: torch.dtype | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are given, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)[:8]}
        return {name: x for name, x in values.items() if x is not None}

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        if self.out is not None:
            return self.out.dtype
        if self.out_dtype is not None:
            return self.out_dtype
        return torch.bfloat16 if self.a.dtype in FLOAT8 else self.a.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        batch = torch.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])
        columns = self.b.shape[-1] // 2 if self.gate else self.b.shape[-1]
        return (*batch, self.a.shape[-2], columns)

    @property
    def gate(self) -> str | None:
        """What the even columns go through, before they multiply the odd ones."""
        name = self.activation if isinstance(self.activation, str) else ""
        return name.removeprefix("gated_") if name.startswith("gated_") else None


def check(call: Call) -> None:
    """TypeError or ValueError, in one sentence that names the argument, for what cannot be."""
    for name in ("a", "b"):
        x = getattr(call, name)
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    for name, x in call.tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(x).__name__}")
        if x.device != call.a.device:
            raise ValueError(f"{name} is on {x.device}, but a is on {call.a.device}")
        if x.layout is not torch.strided:
            raise ValueError(f"{name} must be a strided tensor, got {x.layout}")
    _check_inputs(call)
    _check_result(call)
    _check_fused(call)


def _check_inputs(call: Call) -> None:
    a, b = call.a, call.b
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in NAMES:
            known = ", ".join(str(d).removeprefix("torch.") for d in NAMES)
            raise TypeError(f"{name} has dtype {x.dtype}, which is not one of {known}")
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got {x.dim()}")
    if a.dtype != b.dtype and not (a.dtype in FLOAT8 and b.dtype in FLOAT8):
        raise TypeError(f"b has dtype {b.dtype}, but a has {a.dtype}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"b has K={b.shape[-2]} (its last size but one), but a has K={a.shape[-1]} (its last)"
        )
    try:
        torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"b has batch sizes {tuple(b.shape[:-2])}, which do not broadcast with those of a, "
            f"{tuple(a.shape[:-2])}"
        ) from None


def _check_result(call: Call) -> None:
    dtype, shape = call.dtype, call.shape
    if dtype not in OUT_DTYPES:
        name = "out" if call.out is not None else "out_dtype"
        raise TypeError(f"{name} has dtype {dtype}, which is not bfloat16, float16 or float32")
    if call.out_dtype not in (None, dtype):
        raise TypeError(f"out_dtype is {call.out_dtype}, but out has dtype {dtype}")
    if call.out is not None:
        if tuple(call.out.shape) != shape:
            raise ValueError(f"out has shape {tuple(call.out.shape)}, the result has {shape}")
        if any(n > 1 and s == 0 for n, s in zip(call.out.shape, call.out.stride(), strict=True)):
            raise ValueError(f"out has strides {call.out.stride()}: its elements overlap")
    if call.beta and call.out is None:
        raise ValueError(f"beta={call.beta} scales what out held before: out must be given")


def _check_fused(call: Call) -> None:
    m, n = call.a.shape[-2], call.b.shape[-1]
    if call.gate and (n % 2 or (call.bias is not None and by_row(call.bias, call))):
        raise ValueError(
            f"activation {call.activation!r} takes an even N, got {n}, and no row bias"
        )
    if call.gate and call.beta:
        raise ValueError(f"beta={call.beta} cannot be given with activation {call.activation!r}")
    if isinstance(call.activation, str):
        if call.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation {call.activation!r} is not one of {known}")
    elif call.activation is not None and not callable(call.activation):
        kind = type(call.activation).__name__
        raise TypeError(f"activation must be a name, a function or None, got {kind}")
    for name in ("bias", "residual"):
        x = getattr(call, name)
        if x is not None and x.dtype not in OUT_DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not bfloat16, float16, float32")
    if call.bias is not None and call.bias.shape not in ((n,), (1, n), (m, 1)):
        raise ValueError(
            f"bias has shape {tuple(call.bias.shape)}, which is none of ({n},), (1, {n}), ({m}, 1)"
        )
    if call.residual is not None:
        try:
            call.residual.expand(call.shape)
        except RuntimeError:
            shape = tuple(call.residual.shape)
            raise ValueError(
                f"residual has shape {shape}, which does not broadcast to {call.shape}"
            ) from None
    for name, size in (("scale_a", m), ("scale_b", n), ("amax", 1)):
        x = getattr(call, name)
        if x is None:
            continue
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {x.dtype}")
        if x.numel() not in (1, size):
            takes = "1 element" if size == 1 else f"1 or {size} elements"
            raise ValueError(f"{name} must have {takes}, got {x.numel()}")


# ---- how operands lie


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
    """The same, with strides that TMA takes in the modes of size 1, too."""
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
    """x (R, C) or (L, R, C) as the kernel takes it, how it lies, and a note if that took a copy."""
    from cutex.kernels.gemm.signature import OperandLayout

    note = ""
    side = next((s for s in ((k_side,) if k_only else (-1, -2)) if aligned(x, s)), None)
    if side is None:
        side = k_side if k_only or x.stride(-2) != 1 else -2
        note = "copied: TMA cannot step through it" if not k_only else "copied: K is not contiguous"
        x = repacked(x, side)
    major = "row" if side == -1 else "column"
    return normal(x, side), OperandLayout(NAMES[x.dtype], major, x.dim() == 3), note


def result(x: Tensor) -> tuple[Tensor, OperandLayout, str]:
    """The same of out, which is never copied.

    NOTE: a TMA store writes units of 16 bytes whole: on an H200, rows that end within one had what
    lies behind them overwritten.
    """
    from cutex.kernels.gemm.signature import OperandLayout

    name, batched = NAMES[x.dtype], x.dim() == 3
    for side, major in ((-1, "row"), (-2, "column")):
        if aligned(x, side) and x.shape[side] * x.element_size() % ALIGN == 0:
            return normal(x, side), OperandLayout(name, major, batched), ""
    note = "stored by element: TMA cannot step through it"
    return x, OperandLayout(name, "row", batched, tma=False), note


@dataclass
class Arranged:
    """A call in the kernel's terms: one matrix or a batch of them."""

    tensors: list[Any]  # a, b, out and what the pieces take
    a: OperandLayout
    b: OperandLayout
    out: OperandLayout
    pieces: tuple[EpilogueOp, ...]
    names: tuple[str, ...]  # of what the pieces take
    notes: dict[str, str]  # by operand: what makes the call slower than it could be
    sizes: tuple[int, int, int, int]  # M, N, K, L
    as_given: bool  # every tensor is what the call was given
    tall: bool  # but for a, out and residual, which are seen as one matrix


def arrange(call: Call, out: Tensor, arch_name: str) -> Arranged:
    """The kernel's arguments for `call`, whose result is `out`."""
    notes: dict[str, str] = {}
    a, b, residual = call.a, call.b, call.residual
    expanded = False
    if residual is not None and residual.shape != out.shape:
        residual, expanded = residual.expand(out.shape), True
    if a.shape[-1] == 0:  # nothing to add up: the epilogue of zeros
        a, b = a.new_zeros((a.shape[-2], ALIGN)), b.new_zeros((ALIGN, b.shape[-1]))
    row_wise = any(x is not None and x.numel() > 1 and by_row(x, call) for x in (call.bias,)) or (
        call.scale_a is not None and call.scale_a.numel() > 1
    )
    is_tall = False
    if b.dim() == 2 and a.dim() > 2 and not row_wise:
        tall = [x if x is None else as_one(x) for x in (a, out, residual)]
        if tall[0] is not None and tall[1] is not None and (tall[2] is None) == (residual is None):
            a, out, residual = tall
            is_tall = True
    given = [a, b, out, residual]
    if out.dim() > 3:
        batch = out.shape[:-2]
        a, b, residual = (
            x if x is None or x.dim() == 2 else x.expand(*batch, *x.shape[-2:]).flatten(0, -3)
            for x in (a, b, residual)
        )
        out = out.view(-1, *out.shape[-2:])
    a, b = (x[:1] if x.dim() == 3 and x.stride(0) == 0 else x for x in (a, b))

    k_only = a.dtype.itemsize in K_ONLY[arch_name]
    a, a_lies, notes["a"] = operand(a, -1, k_only)
    b, b_lies, notes["b"] = operand(b, -2, k_only)
    before = out
    out, out_lies, notes["out"] = result(out)
    if call.gate and out.dtype is torch.float32 and not arch(arch_name).tmem_columns:
        out, out_lies = before, replace(out_lies, major="row", tma=False)
        notes["out"] = "stored by element: gates leave single columns"
    pieces, passed = fused(call, before, residual, arch_name)
    m, n = out.shape[-2], b.shape[-1]
    sizes = m, n, a.shape[-1], out.shape[0] if out.dim() == 3 else 1
    tensors = [a, b, out, *(x for _, x in passed)]
    names = tuple(name for name, _ in passed)
    notes = {name: note for name, note in notes.items() if note}
    others = [x for x in (call.bias, call.scale_a, call.scale_b, call.amax) if x is not None]
    as_given = (
        all(
            name == "c" or any(x is y for y in (*given, *others))
            for name, x in zip(("a", "b", "out", *names), tensors, strict=True)
            if isinstance(x, Tensor)
        )
        and before.data_ptr() % ALIGN == 0
        and call.a.shape[-1] > 0
        and not expanded
    )
    return Arranged(
        tensors, a_lies, b_lies, out_lies, pieces, names, notes, sizes, as_given, is_tall
    )


def by_row(bias: Tensor, call: Call) -> bool:
    """Whether bias has one number for each row of the result, rather than for each column."""
    n = call.b.shape[-1]
    return bias.shape not in ((n,), (1, n))


def as_one(x: Tensor) -> Tensor | None:
    """(.., R, C) as one matrix (.. * R, C), where it can be seen so without a copy."""
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return None


def fused(
    call: Call, out: Tensor, residual: Tensor | None, arch_name: str
) -> tuple[tuple[EpilogueOp, ...], list[tuple[str, Any]]]:
    """The pieces of the epilogue, and the arguments that they take, by name."""
    from cutex.device.epilogue import epilogue_ops as fusion

    pieces: list[EpilogueOp] = []
    passed: list[tuple[str, Any]] = []

    def add(piece: EpilogueOp, *values: tuple[str, Any]) -> None:
        pieces.append(piece)
        passed.extend(values)

    def matrix(name: str, x: Tensor, beta: bool = False) -> fusion.Add:
        whole = aligned(x, -1) and x.shape[-1] * x.element_size() % ALIGN == 0 and min(x.shape) > 1
        return fusion.Add(name, NAMES[x.dtype], x.dim() == 3, beta, whole, call.gate is not None)

    for name, by in (("scale_a", "row"), ("scale_b", "column")):
        scale = getattr(call, name)
        if scale is not None:
            by = by if scale.numel() > 1 else "tensor"
            add(fusion.Scale(name, by), (name, flat(scale)))
    if call.alpha != 1.0:
        add(fusion.Alpha(), ("alpha", float(call.alpha)))
    if call.beta != 0.0:
        piece = matrix("c", out, beta=True)
        # NOTE: on Hopper, whole rows come in by TMA. What threads load from the matrix that TMA
        # then stores to takes 1.9 to 5.8 times as long, from a copy 1.05 (H200; docs/facts.md)
        in_place = piece.whole and not arch(arch_name).tmem_columns
        add(piece, ("c", out if in_place else out.clone()), ("beta", float(call.beta)))
    if call.bias is not None:
        by = "row" if by_row(call.bias, call) else "column"
        bias = flat(call.bias)
        bias = bias if bias.is_contiguous() else bias.contiguous()
        whole = bias.data_ptr() % ALIGN == 0 and bias.nbytes % ALIGN == 0
        add(fusion.Bias(by, NAMES[bias.dtype], by == "column" and whole), ("bias", bias))
    if call.gate:
        add(fusion.Gate(call.gate))
    elif isinstance(call.activation, str):
        add(fusion.Activation(call.activation))
    elif call.activation is not None:
        add(fusion.Elementwise(call.activation))
    if residual is not None:
        add(matrix("residual", residual), ("residual", residual))
    if call.amax is not None:
        add(fusion.Amax(), ("amax", flat(call.amax)))
    return tuple(pieces), passed


def flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.reshape(-1)


# ---- the kernel


def proposals(problem: GemmProblem, arch_name: str, batch: int = 1) -> Iterator[GemmConfig]:
    """What an autotuner run chose, where there was one on this GPU, then the model's ranking."""
    from cutex.bench import autotune
    from cutex.kernels.gemm import stages

    if torch.cuda.is_available() and batch == 1:
        found = autotune.remembered(stages(arch_name)[-1], problem)
        if found is not None and found.why_not(problem, arch(arch_name)) is None:
            yield found
    yield from ranked(problem, arch(arch_name), batch)


@lru_cache(maxsize=4096)
def config_for(
    sizes: tuple[int, int, int, int],
    lies: tuple[OperandLayout, OperandLayout, OperandLayout],
    pieces: tuple[EpilogueOp, ...],
    arch_name: str,
) -> GeneralConfig:
    """The first of `proposals` that the general kernel can do."""
    from cutex.kernels.gemm.signature import GeneralConfig

    m, n, k, batch = sizes
    a, b, out = lies
    k = k * BYTES[a.dtype] // 2  # tiles are cut in units of 2 bytes
    # whole units, and no larger than makes a difference
    m, n, k = (min(max(8, -(-size // 8) * 8), 1 << 20) for size in (m, n, k))
    name = a.dtype if a.dtype in ("bf16", "fp16") else "bf16"
    problem = GemmProblem(m, n, k, name)
    for tiles in proposals(problem, arch_name, batch):
        if pieces and isinstance(tiles, Sm90Config):
            tiles = with_slots(tiles, arch_name)
        if isinstance(tiles, Sm100Config) and tiles.swap_ab and (pieces or not out.tma):
            # NOTE: a thread then has a column of out, and an address for each row of it
            tiles = replace(tiles, epi_n=16)
        for slots in range(tiles.epi_stages, 0, -1):
            config = GeneralConfig(replace(tiles, epi_stages=slots), a, b, out, pieces)
            if config.why_not(None, arch(arch_name)) is None:
                return config
    raise ValueError(f"M={m}, N={n}, K={k}: no config takes these sizes")


def with_slots(tiles: Sm90Config, arch_name: str) -> Sm90Config:
    """With smaller parts, so that fewer registers are in use at a time, and as many slots for them
    as smem has room for: what comes in through them is on its way early."""
    if tiles.epi_n == 64 and tiles.epi_stages == 1:
        tiles = replace(tiles, epi_n=32)
    more = (replace(tiles, epi_stages=n) for n in (4, 3, 2))
    return next((x for x in more if x.why_not(None, arch(arch_name)) is None), tiles)


@lru_cache(maxsize=4096)
def kernel_for(config: GeneralConfig, arch_name: str) -> Compiled:
    from cutex.compile import compile

    kernel = import_module(f"{package(arch_name)}.general").General(config)
    return compile(kernel, config.a.dtype, arch_name)
