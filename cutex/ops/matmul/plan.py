"""The choice of a kernel for the sizes and layouts of an arranged call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from cutex.arch import ARCHS, arch
from cutex.compile import worker
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.choose import ranked, sizes_class
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.scaled.fp8 import promoted
from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.kernels.gemm.sm90.candidates import by_warpgroups, in_parts
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.tile_order import by_gpc, by_number
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.kernels.gemm.unaligned import choose as unaligned
from cutex.kernels.gemm.unaligned.config import UnalignedConfig
from cutex.kernels.gemm.unaligned.few_config import FewRowsConfig
from cutex.ops import building
from cutex.ops.device import other_board, other_sms
from cutex.ops.matmul import choices
from cutex.ops.matmul.choices import CallClass
from cutex.problem.gemm import GemmProblem
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.compile import Compiled
    from cutex.compile.user_function import UserFunction
    from cutex.device.epilogue.epilogue_ops import EpilogueOp
    from cutex.kernels.gemm.layouts import OperandLayout
    from cutex.kernels.gemm.signature import GeneralConfig

    Layouts = tuple[OperandLayout, OperandLayout, OperandLayout]

# slots of A and B, of which one is worth less than slots for all parts of what is added to the only
# tile of a CTA (docs/facts/gemm.md#added-early)
LONG_RING = 7

building.preload(*(f"{package('gemm', name)}.general" for name in ARCHS))


def proposals(calls: CallClass, hopeful: bool = False) -> Iterator[GemmConfig]:
    """The config that the autotuner chose on this GPU, if there is one, then the model's
    ranking."""
    from cutex.bench import autotune
    from cutex.kernels.gemm import stages

    if calls.promoted:
        yield from promoted.ranked(calls.sizes, calls.target)
        return
    problem, target = problem_of(calls), calls.target
    batch = calls.sizes[3]
    if fold := calls.layouts[0].fold:
        yield from unaligned.ranked(problem, fold, majors_of(calls)[1], target)
        return
    if torch.cuda.is_available() and batch == 1:
        found = autotune.remembered(stages(calls.arch)[-1], problem)
        if isinstance(found, GemmConfig) and found.why_not(problem, target) is None:
            yield found
    yield from ranked(problem, target, batch, majors_of(calls), bits_of(calls), hopeful)


def problem_of(calls: CallClass) -> GemmProblem:
    """The problem of one matrix of `calls`, for configs and the cost model."""
    m, n, k, _ = calls.sizes
    dtype = calls.layouts[0].dtype
    return GemmProblem(m, n, k, dtype if dtype in ("bf16", "fp16") else "bf16")


def majors_of(calls: CallClass) -> tuple[bool, bool]:
    """Whether K is contiguous in a and in b."""
    return _majors(calls.layouts)


def bits_of(calls: CallClass) -> int:
    """The bits of an element of a and b."""
    return DTYPES[calls.layouts[0].dtype].bits


def _majors(layouts: Layouts) -> tuple[bool, bool]:
    return layouts[0].major == "row", layouts[1].major == "column"


@lru_cache(maxsize=4096)
def config_for(
    sizes: tuple[int, int, int, int],
    layouts: Layouts,
    ops: tuple[EpilogueOp, ...],
    arch_name: str,
    promoted: bool = False,
) -> GeneralConfig:
    """The config chosen by timing for such calls, or else the first of `candidates`."""
    calls = call_class(sizes, layouts, ops, arch_name, promoted)
    return _config_of(calls)


@lru_cache(maxsize=4096)
def _config_of(calls: CallClass) -> GeneralConfig:
    for look in (choices.remembered, choices.preferred, _shipped):
        found = look(calls)
        if found is not None and (config := fitted(found, calls)) is not None:
            return config
    return next(candidates(calls))


def _shipped(calls: CallClass) -> GemmConfig | None:
    found = choices.shipped(calls)
    return None if found is None else placed(found, calls)


def forget() -> None:
    """Make all choices be looked up again."""
    config_for.cache_clear()
    _config_of.cache_clear()


def call_class(
    sizes: tuple[int, int, int, int],
    layouts: Layouts,
    ops: tuple[EpilogueOp, ...],
    arch_name: str,
    promoted: bool = False,
) -> CallClass:
    """The class of calls of these sizes (M, N, K, batch), all of which take the same config."""
    m, n, k, batch = sizes
    k = DTYPES[layouts[0].dtype].bytes(k) // 2  # tiles are cut in units of 2 bytes
    rounded = sizes_class((m, n, k), _majors(layouts))
    # clamped where larger sizes make no difference
    m, n, k = (min(size, 1 << 20) for size in rounded)
    here = other_sms(arch_name), other_board(arch_name)
    return CallClass((m, n, k, batch), layouts, ops, arch_name, *here, promoted)


def candidates(calls: CallClass, hopeful: bool = False) -> Iterator[GeneralConfig]:
    """The configs of the general kernel that can run `calls`, fastest predicted first (with
    `hopeful`, by the fastest they may be); ValueError if there is none."""
    none = True
    for tiles in proposals(calls, hopeful):
        if (config := fitted(placed(tiles, calls), calls)) is not None:
            none = False
            yield config
    if none:
        m, n, k, _ = calls.sizes
        raise ValueError(f"M={m}, N={n}, K={k}: no config takes these sizes")


def placed(tiles: GemmConfig, calls: CallClass) -> GemmConfig:
    """`tiles`, placed by GPC if that pays. What was chosen by timing stays as it was timed."""
    if type(tiles) is not Sm90Config:
        return tiles
    return by_gpc(tiles, problem_of(calls), calls.target)


def unplaced(config: GeneralConfig, calls: CallClass) -> list[GeneralConfig]:
    """The same without its tiles being placed by GPC; none if they are not."""
    tiles = config.tiles
    if not isinstance(tiles, Sm90Config) or not tiles.by_gpc:
        return []
    found = fitted(by_number(tiles), calls)
    return [] if found is None else [found]


def fitted(tiles: GemmConfig, calls: CallClass) -> GeneralConfig | None:
    """The config of the general kernel with `tiles`, its epilogue parts sized for the operations;
    None if it cannot run `calls`."""
    from cutex.kernels.gemm.signature import GeneralConfig

    kind: type[GeneralConfig] = GeneralConfig
    if calls.promoted:
        from cutex.kernels.gemm.scaled.fp8.sm90.kernel import Fp8Signature

        kind = Fp8Signature
    ops, out = calls.ops, calls.layouts[2]
    if isinstance(tiles, Sm90Config):
        # NOTE: what is stored whole has a slot for nothing to add, and all registers in use at once
        if tiles.swap_ab and tiles.stored_whole and (ops or DTYPES[out.dtype].bits != 16):
            if tiles.odd_rows:
                return None
            tiles = in_parts(tiles, calls.target)
        if tiles.stored_whole and adds_a_matrix(ops):
            return None  # no second slot, by which TMA would load what is added
        if ops and tiles.in_turns:
            tiles = by_warpgroups(tiles, calls.target)
        if ops:
            tiles = with_slots(tiles, calls.arch)
    if isinstance(tiles, Sm100Config) and tiles.swap_ab and (ops or not out.tma):
        # NOTE: a thread then has a column of out, and an address for each row of it
        tiles = replace(tiles, epi_n=16)
    for slots in range(tiles.epi_stages, 0, -1) if tiles.epi_stages else (0,):
        config = kind(replace(tiles, epi_stages=slots), *calls.layouts, ops)
        if config.why_not(None, arch(calls.arch)) is None:
            return config
    return None


def adds_a_matrix(ops: tuple[EpilogueOp, ...]) -> bool:
    """Whether a matrix is added, which TMA loads by the slots of out if there are two."""
    from cutex.device.epilogue.epilogue_ops import Add

    return any(isinstance(op, Add) for op in ops)


def with_slots(tiles: Sm90Config, arch_name: str) -> Sm90Config:
    """`tiles` with smaller sub-tiles of out, so that fewer registers are in use at a time, and as
    many slots for them as fit in smem, so that a matrix loaded through them is loaded early; two at
    least, if the ring can spare one of its own."""
    if tiles.epi_n == 64 and tiles.epi_stages == 1:
        tiles = replace(tiles, epi_n=32)
    more = [replace(tiles, epi_stages=n) for n in (4, 3, 2)]
    if tiles.epi_stages == 1 and tiles.parts_in_order:
        more.append(replace(more[-1], num_stages=tiles.num_stages - 1))
    found = next((x for x in more if x.why_not(None, arch(arch_name)) is None), tiles)
    parts = tiles.parts_of_rows
    if tiles.one_tile and tiles.num_stages >= LONG_RING and 1 < found.epi_stages < parts:
        every = replace(found, epi_stages=parts, num_stages=found.num_stages - 1)
        return every if every.why_not(None, arch(arch_name)) is None else found
    return found


@lru_cache(maxsize=4096)
def kernel_for(config: GeneralConfig, arch_name: str) -> Compiled:
    from cutex.compile import compile

    module, name = kernel_of(config, arch_name)
    kernel = getattr(import_module(module), name)(config)
    cache = all(f.cacheable for f in user_functions(config.ops))
    compiled = compile(kernel, dtype_of(config), arch_name, cache=cache)
    BUILT.count += not compiled.from_cache
    return compiled


def kernel_of(config: GeneralConfig, arch_name: str) -> tuple[str, str]:
    """The module and the class of the kernel that takes `config`."""
    if isinstance(config.tiles, Fp8Config):
        return choices.PROMOTING, "Fp8Gemm"
    if isinstance(config.tiles, UnalignedConfig):
        return "cutex.kernels.gemm.unaligned.sm90.kernel", "Unaligned"
    if isinstance(config.tiles, FewRowsConfig):
        return "cutex.kernels.gemm.unaligned.sm90.few", "FewRows"
    if isinstance(config.tiles, Sm90Config) and config.tiles.k_shares > 1:
        return choices.IN_SHARES, "InShares"
    return f"{package('gemm', arch_name)}.general", "General"


def dtype_of(config: GeneralConfig) -> str:
    """The dtype for which the kernel of `config` is compiled: a's, or a recipe."""
    tiles = config.tiles
    return tiles.recipe if isinstance(tiles, Fp8Config) else config.a.dtype


def job(config: GeneralConfig, arch_name: str) -> building.Job:
    """The compilation of a kernel, in this process or, without a function of the user's, in
    another."""
    general = worker.Job(*kernel_of(config, arch_name), config, dtype_of(config), arch_name)
    there = None if config.ops and user_functions(config.ops) else general
    return building.Job(there, lambda: kernel_for(config, arch_name))


@dataclass
class Built:
    """The number of kernels that this process had to compile because they were not on disk."""

    count: int = 0


BUILT = Built()


def user_functions(ops: Iterable[EpilogueOp]) -> list[UserFunction]:
    """The user's own functions among `ops`."""
    from cutex.device.epilogue.epilogue_ops import Elementwise

    return [op.function for op in ops if isinstance(op, Elementwise)]
