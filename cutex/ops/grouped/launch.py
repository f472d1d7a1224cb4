"""The launches of grouped products: tensors as the kernels take them, and the kernel."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.compile import ALIGN
from cutex.kernels.gemm.grouped import choose
from cutex.ops.device import arch_of, current, launcher
from cutex.ops.matmul.arrange import name_of, operand

if TYPE_CHECKING:
    from cutex.compile import Compiled
    from cutex.device.epilogue.epilogue_ops import EpilogueOp
    from cutex.kernels.gemm.grouped.config import GroupedConfig, SumsConfig

FOLDERS = {"sm_90a": "sm90", "sm_100a": "sm100"}


def rows(x: Tensor, w: Tensor, edges: Tensor, out: Tensor, options: tuple[Any, ...]) -> None:
    """out[rows of e] = activation(x[rows of e] @ w[e] + bias[e]), with x (T, K), w (E, K, N), and
    out (T, N) in memory of `empty`; options: bias, activation, padded."""
    from cutex.kernels.gemm.grouped.config import GroupedConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout

    bias, activation, padded = options
    arch = arch_for(x)
    if x.shape[1] == 0:  # nothing to add up: the epilogue of zeros
        x, w = x.new_zeros((x.shape[0], ALIGN)), w.new_zeros((w.shape[0], ALIGN, w.shape[2]))
    # NOTE: a group may begin at any row, and TMA at none of a side that is contiguous
    x, a, _ = operand(x, -1, True)
    w, b, _ = operand(w.contiguous() if w.stride(0) == 0 else w, -2, False)
    ops, passed = fused(bias, activation)
    mean = -(-x.shape[0] // edges.shape[0])
    most = choose.most_groups(edges.shape[0])
    tiles = choose.rows_tiles(arch, mean, w.shape[2], bool(ops), most)
    product = GeneralConfig(tiles, a, b, OperandLayout(name_of(out)), ops)
    config = GroupedConfig(product, most, padded)
    run("rows", config, arch, [x, w, with_padding(out), edges.contiguous(), *passed])


def sums(x: Tensor, w: Tensor, edges: Tensor, out: Tensor, padded: bool) -> None:
    """out[e] = x[:, rows of e] @ w[rows of e], with x (M, T), w (T, N), and out (E, M, N) in memory
    of `empty`."""
    from cutex.kernels.gemm.grouped.config import SumsConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout

    arch = arch_for(x)
    # NOTE: a group may begin anywhere along T, which must not be the contiguous side
    (xt, a, _), (w, b, _) = operand(x.mT, -1, True), operand(w, -1, True)
    mean = -(-x.shape[1] // edges.shape[0])
    most = choose.most_groups(edges.shape[0])
    layouts = OperandLayout(a.dtype, "column"), b, OperandLayout(name_of(out), batched=True)
    product = GeneralConfig(choose.sums_tiles(arch, mean, w.shape[1], most), *layouts)
    config = SumsConfig(product, most, padded)
    run("sums", config, arch, [xt.mT, w, with_padding(out), edges.contiguous()])


def zeros(out: Tensor, edges: Tensor, padded: bool) -> None:
    """Write zeros to the rows of out (T, N) that belong to no group."""
    from cutex.kernels.gemm.grouped.zeros import ZerosConfig

    whole = out.stride(0) * out.element_size() % ALIGN == 0 and out.shape[1] % 8 == 0
    whole = whole and out.data_ptr() % ALIGN == 0
    run("zeros", ZerosConfig(whole, padded), arch_for(out), [out, edges.contiguous()])


def fused(
    bias: Tensor | None, activation: str | None
) -> tuple[tuple[EpilogueOp, ...], list[Tensor]]:
    """The operations of the epilogue, and their arguments."""
    from cutex.device.epilogue.epilogue_ops import Activation, Bias, Gate

    ops: list[EpilogueOp] = []
    passed = []
    if bias is not None:
        bias = bias.contiguous()
        whole = bias.data_ptr() % ALIGN == 0 and bias.shape[1] * bias.element_size() % ALIGN == 0
        ops.append(Bias("column", name_of(bias), whole))
        passed.append(bias)
    if activation is not None and activation.startswith("gated_"):
        ops.append(Gate(activation.removeprefix("gated_")))
    elif activation is not None:
        ops.append(Activation(activation))
    return tuple(ops), passed


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor whose memory TMA can store to: its rows are in whole units of 16 bytes."""
    unit = ALIGN // like.element_size()
    pitch = -(-shape[-1] // unit) * unit
    return like.new_empty((*shape[:-1], pitch))[..., : shape[-1]]


def with_padding(x: Tensor) -> Tensor:
    """x of `empty`, with the columns that fill up its rows."""
    unit = ALIGN // x.element_size()
    return x.as_strided((*x.shape[:-1], -(-x.shape[-1] // unit) * unit), x.stride())


def arch_for(x: Tensor) -> str:
    """The arch of a kernel for x; ValueError, in one sentence, if there is none."""
    return arch_of(x.device, "cutex.grouped_mm", "x", "torch.nn.functional.grouped_mm")


@lru_cache(maxsize=4096)
def kernel_for(
    kind: str, config: GroupedConfig | SumsConfig | Any, dtype: str, arch: str
) -> Compiled:
    """The kernel of a config."""
    from cutex.compile import compile

    home = "zeros" if kind == "zeros" else f"{FOLDERS[arch]}.{kind}"
    module = import_module(f"cutex.kernels.gemm.grouped.{home}")
    name = {"rows": "GroupedRows", "sums": "GroupedSums", "zeros": "Zeros"}[kind]
    return compile(getattr(module, name)(config), dtype, arch)


def run(kind: str, config: Any, arch: str, tensors: list[Tensor]) -> None:
    """Launch the kernel of a config on `tensors`."""
    compiled = kernel_for(kind, config, name_of(tensors[0]), arch)
    with torch.no_grad(), current(tensors[0].device):
        launcher(compiled, tensors)(*tensors)
