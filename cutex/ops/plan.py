"""From the sizes and layouts of an arranged call to the kernel that computes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from cutex.arch import arch
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.choose import ranked
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.problem.gemm import GemmProblem
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.compile import Compiled
    from cutex.compile.user_function import UserFunction
    from cutex.device.epilogue.epilogue_ops import EpilogueOp
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout


def proposals(problem: GemmProblem, arch_name: str, batch: int = 1) -> Iterator[GemmConfig]:
    """The config that the autotuner chose on this GPU, if it did, then the model's ranking."""
    from cutex.bench import autotune
    from cutex.kernels.gemm import stages

    if torch.cuda.is_available() and batch == 1:
        found = autotune.remembered(stages(arch_name)[-1], problem)
        if isinstance(found, GemmConfig) and found.why_not(problem, arch(arch_name)) is None:
            yield found
    yield from ranked(problem, arch(arch_name), batch)


@lru_cache(maxsize=4096)
def config_for(
    sizes: tuple[int, int, int, int],
    layouts: tuple[OperandLayout, OperandLayout, OperandLayout],
    ops: tuple[EpilogueOp, ...],
    arch_name: str,
) -> GeneralConfig:
    """The first of `proposals` that the general kernel can do."""
    from cutex.kernels.gemm.signature import GeneralConfig

    m, n, k, batch = sizes
    a, b, out = layouts
    k = DTYPES[a.dtype].bytes(k) // 2  # tiles are cut in units of 2 bytes
    # whole units, and no larger than makes a difference
    m, n, k = (min(max(8, -(-size // 8) * 8), 1 << 20) for size in (m, n, k))
    name = a.dtype if a.dtype in ("bf16", "fp16") else "bf16"
    problem = GemmProblem(m, n, k, name)
    for tiles in proposals(problem, arch_name, batch):
        if ops and isinstance(tiles, Sm90Config):
            tiles = with_slots(tiles, arch_name)
        if isinstance(tiles, Sm100Config) and tiles.swap_ab and (ops or not out.tma):
            # NOTE: a thread then has a column of out, and an address for each row of it
            tiles = replace(tiles, epi_n=16)
        for slots in range(tiles.epi_stages, 0, -1):
            config = GeneralConfig(replace(tiles, epi_stages=slots), a, b, out, ops)
            if config.why_not(None, arch(arch_name)) is None:
                return config
    raise ValueError(f"M={m}, N={n}, K={k}: no config takes these sizes")


def with_slots(tiles: Sm90Config, arch_name: str) -> Sm90Config:
    """`tiles` with smaller sub-tiles of out, so that fewer registers are in use at a time, and with
    as many slots for them as smem holds, so that what comes in through them is loaded early."""
    if tiles.epi_n == 64 and tiles.epi_stages == 1:
        tiles = replace(tiles, epi_n=32)
    more = (replace(tiles, epi_stages=n) for n in (4, 3, 2))
    return next((x for x in more if x.why_not(None, arch(arch_name)) is None), tiles)


@lru_cache(maxsize=4096)
def kernel_for(config: GeneralConfig, arch_name: str) -> Compiled:
    from cutex.compile import compile

    kernel = import_module(f"{package('gemm', arch_name)}.general").General(config)
    cache = all(f.cacheable for f in user_functions(config.ops))
    return compile(kernel, config.a.dtype, arch_name, cache=cache)


def user_functions(ops: Iterable[EpilogueOp]) -> list[UserFunction]:
    """The functions of a user's own among `ops`."""
    from cutex.device.epilogue.epilogue_ops import Elementwise

    return [op.function for op in ops if isinstance(op, Elementwise)]
