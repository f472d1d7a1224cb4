"""Products whose first operand has any stride between rows of K, and products of few columns."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

import cutex
from cutex.arch import arch
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.unaligned.choose import ranked
from cutex.kernels.gemm.unaligned.config import UnalignedConfig
from cutex.kernels.gemm.unaligned.few_config import FewRowsConfig
from cutex.ops import simulated
from cutex.ops.device import launcher
from cutex.ops.matmul.arrange import arrange
from cutex.ops.matmul.checks import Call
from cutex.ops.matmul.choices import config_of, shipped
from cutex.ops.matmul.plan import call_class, candidates, fitted, kernel_for
from cutex.orders import ORDERS
from cutex.problem.gemm import GemmProblem
from cutex.problem.layer import LayerProblem
from cutex.problem.matmul import MatmulProblem, View

ARCH = "sm_90a"
SLOW = pytest.mark.slow
TILES = UnalignedConfig(tile_m=64, tile_n=64, num_stages=3, epi_n=64, epi_stages=1, warpgroups=1)
# M, N, K; the elements between rows of K beyond M; whether K is contiguous in B; further fields
CASES = {
    "eight rows together": ((37, 40, 72), 0, False, {"fold": 8}),
    "sixteen, three warpgroups, a pair that shares B": (
        (203, 8, 208), 0, False,
        {"tile_m": 192, "warpgroups": 3, "tile_n": 8, "epi_n": 8, "cluster_m": 2},
    ),
    "an even stride, B by K": (
        (131, 136, 208), 3, True, {"tile_m": 128, "warpgroups": 2, "tile_n": 128}
    ),
    "fewer rows than a box": ((5, 264, 144), 0, False, {}),
    "K split in two": ((131, 104, 528), 0, False, {"split_k": 2, "num_stages": 5}),
    "stream-K": (
        (133, 264, 528), 0, False,
        {"stream_k": 1, "tile_n": 96, "epi_n": 32, "num_stages": 4, "cluster_m": 2},
    ),
}  # fmt: skip
DEFAULT = ("eight rows together", "sixteen, three warpgroups, a pair that shares B")
# tokens, out and in features, the pass, further fields of a tile of 128x8
FEW = {
    "dgrad, 4x1": ((600, 136, 8), "dgrad", {"cluster_m": 4}),
    "wgrad": ((136, 200, 8), "wgrad", {"tile_m": 64, "warpgroups": 1}),
    "forward, 2x1": ((200, 8, 136), "forward", {"cluster_m": 2}),
    "three boxes of 8": ((136, 200, 24), "wgrad", {"tile_n": 24, "epi_n": 24}),
    "one column, K split in four": (
        (600, 64, 1096), "forward",
        {"tile_m": 64, "warpgroups": 1, "tile_n": 64, "epi_n": 16, "columns": 1, "split_k": 4},
    ),
    "two columns that share A": (
        (1000, 264, 88), "dgrad",
        {"tile_n": 64, "epi_n": 64, "columns": 1, "cluster_n": 2, "split_k": 2},
    ),
}  # fmt: skip


def small(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Whole numbers from -4 to 4, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16)


def run(a: torch.Tensor, b: torch.Tensor, tiles: GemmConfig) -> torch.Tensor:
    """a @ b by a kernel of `tiles`, in the simulator; b and a are read as they are."""
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=a.dtype)
    found = arrange(Call(a, b), out, ARCH)
    assert found.as_given and not found.notes
    calls = call_class(found.sizes, (found.a, found.b, found.out), (), ARCH)
    config = fitted(tiles, calls)
    assert config is not None, tiles.why_not(None, arch(ARCH))
    with simulated(ARCH):
        launcher(kernel_for(config, ARCH), [a, b, out], config.tiles.workspace)(a, b, out)
    return out


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "case", [x if x in DEFAULT else pytest.param(x, marks=SLOW) for x in CASES]
)
def test_a_product_of_any_stride_comes_out_exact(case: str) -> None:
    (m, n, k), beyond, b_by_k, more = CASES[case]
    # NOTE: what lies between the rows of K is NaN, and must reach no result
    memory = torch.full((k, m + beyond), torch.nan, dtype=torch.bfloat16)
    memory[:, :m] = small((k, m), 0)
    a = memory[:, :m].mT
    b = small((n, k), 1).mT if b_by_k else small((k, n), 1)
    out = run(a, b, replace(TILES, **more))
    assert out.float().equal((a.float() @ b.float()).to(out.dtype).float())


@pytest.mark.parametrize(
    "case", [x if x == "dgrad, 4x1" else pytest.param(x, marks=SLOW) for x in FEW]
)
def test_a_product_of_few_columns_comes_out_exact(case: str) -> None:
    sizes, direction, more = FEW[case]
    problem = LayerProblem(*sizes, direction)
    a, b = (x.float().mul(2).round().clamp(-4, 4).to(x.dtype) for x in problem.inputs())
    tiles = Sm90Config(tile_n=8, num_stages=3, epi_n=8, epi_stages=1, warpgroups=2)
    out = run(a, b, replace(tiles, **more))
    assert out.float().equal((a.float() @ b.float()).to(out.dtype).float())


# M, N, K; the elements between rows of K beyond M; fields of FewRowsConfig
FEW_ROWS = {
    "a cluster of four, K that is no multiple of 16": (
        (5, 72, 264), 2, {"tile_n": 32, "split_k": 4, "warps": 4, "steps": 3},
    ),
    "sixteen rows": ((13, 40, 1000), 0, {"tile_m": 16, "tile_n": 16, "warps": 8, "steps": 4}),
    "one row, fewer steps than warps": ((1, 200, 8), 1, {"warps": 16}),
    "a vector of sums for each of some threads": (
        (8, 16, 344), 1, {"tile_n": 16, "split_k": 8, "warps": 4, "steps": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [x if "four" in x else pytest.param(x, marks=SLOW) for x in FEW_ROWS]
)
def test_few_rows_come_out_exact(case: str) -> None:
    (m, n, k), beyond, more = FEW_ROWS[case]
    memory = torch.full((k, m + beyond), torch.nan, dtype=torch.bfloat16)
    memory[:, :m] = small((k, m), 0)
    a, b = memory[:, :m].mT, small((k, n), 1)
    out = run(a, b, FewRowsConfig(**more))
    assert out.float().equal((a.float() @ b.float()).to(out.dtype).float())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_few_rows_are_within_twice_torchs_error(seed: int) -> None:
    """Any K and base, with operations, in any order of events."""
    problem, order = few_rows(seed), random.Random(seed).choice(ORDERS)
    with simulated(ARCH, order=order, seed=seed):
        wrong = problem.run("cpu", cutex.matmul)
    assert wrong is None, f"{wrong}: {problem}"


def few_rows(seed: int) -> MatmulProblem:
    """A random product of up to 15 rows of any stride."""
    draw = random.Random(f"few rows {seed}")
    m, n, k = draw.randint(1, 15), 8 * draw.randint(1, 40), draw.randint(1, 900)
    dtype = draw.choice((torch.bfloat16, torch.float16))
    out = View(after=draw.choice((0, 0, 3)))
    more: dict[str, Any] = draw.choice(
        [
            {}, {"bias": "column"}, {"bias": "row", "alpha": 0.5}, {"activation": "gated_silu"},
            {"activation": "gelu", "residual": True}, {"out": out, "beta": 0.5}, {"amax": True},
        ]
    )  # fmt: skip
    a = View(transposed=True, before=draw.randint(0, 3), after=draw.randint(0, 9))
    out_dtype = draw.choice((dtype, torch.float32)) if not more else dtype
    return MatmulProblem(
        m, n, k, dtype=dtype, dtype_b=dtype, out_dtype=out_dtype, a=a, seed=seed, **more
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [({"tile_m": 24}, "8 or 16"), ({"split_k": 3}, "1, 2, 4 or 8"), ({"warps": 5}, "4, 8 or 16"),
     ({"num_stages": 2}, "has none"), ({"steps": 9}, "1 to 8")],
)  # fmt: skip
def test_a_config_of_few_rows_that_does_not_fit_says_why(more: dict, why: str) -> None:
    reason = FewRowsConfig(**more).why_not(None, arch(ARCH))
    assert reason is not None and why in reason


def test_more_rows_than_a_tile_are_not_few() -> None:
    reason = FewRowsConfig().why_not(GemmProblem(9, 64, 64), arch(ARCH))
    assert reason is not None and "M=9" in reason


UNREAD = {
    "K is no multiple of 8": lambda x: x[:71].mT,
    "the base is no multiple of 16 bytes": lambda x: x[:, 1:].mT,
    "M is not contiguous": lambda x: x.mT[::2],
    "a batch": lambda x: torch.stack((x, x)).mT,
}


@pytest.mark.parametrize("why", UNREAD)
def test_what_the_kernel_does_not_read_is_copied(why: str) -> None:
    a = UNREAD[why](torch.zeros((72, 37), dtype=torch.bfloat16))
    b = a.new_zeros((a.shape[-1], 40))
    found = arrange(Call(a, b), a.new_empty((*a.shape[:-1], 40)), ARCH)
    assert "copied" in found.notes["a"] and not found.a.fold


def test_other_elements_and_other_archs_are_copied() -> None:
    for dtype, target in (("fp32", ARCH), ("bf16", "sm_100a")):
        a = torch.empty((72, 37), dtype=DTYPES[dtype].torch, device="meta").mT
        b = a.new_empty((72, 40))
        assert "copied" in arrange(Call(a, b), a.new_empty((37, 40)), target).notes["a"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"fold": 4}, "fold=4"),
        ({"k_bytes": 256}, "k_bytes=256"),
        ({"tile_m": 128}, "64 for each"),
        ({"cluster_n": 2}, "cluster_n"),
        ({"split_k": 2, "num_stages": 1}, "must hold the sums"),
    ],
)
def test_a_config_that_does_not_fit_says_why(more: dict, why: str) -> None:
    reason = replace(TILES, **more).why_not(None, arch(ARCH))
    assert reason is not None and why in reason


def test_a_choice_kept_on_disk_is_read_as_the_kernel_takes_it() -> None:
    a = torch.empty((72, 37), dtype=torch.bfloat16, device="meta").mT
    b, out = a.new_empty((72, 40)), a.new_empty((37, 40))
    found = arrange(Call(a, b), out, ARCH)
    calls = call_class(found.sizes, (found.a, found.b, found.out), (), ARCH)
    tiles = next(candidates(calls)).tiles
    assert config_of(calls, asdict(tiles)) == tiles and shipped(calls) is None


@pytest.mark.parametrize("mnk", [(11019, 64, 10880), (1553, 1424, 2768)])
def test_the_choice_covers_the_gpu(mnk: tuple[int, int, int]) -> None:
    m, n, k = mnk
    a = torch.empty((k, m), dtype=torch.bfloat16, device="meta").mT
    b, out = a.new_empty((k, n)), a.new_empty((m, n))
    found = arrange(Call(a, b), out, ARCH)
    calls = call_class(found.sizes, (found.a, found.b, found.out), (), ARCH)
    tiles = next(candidates(calls)).tiles
    assert isinstance(tiles, UnalignedConfig) and tiles.fold == 16
    ctas = -(-m // tiles.tile_m) * -(-n // tiles.tile_n) * tiles.split_k
    assert tiles.stream_k or ctas > 60


def test_on_fewer_sms_a_grid_has_no_more_ctas() -> None:
    pcie = replace(arch(ARCH), num_sms=114)
    found = ranked(GemmProblem(1553, 1424, 2768), 16, False, pcie)
    persistent = [c for c in found if isinstance(c, UnalignedConfig)]
    assert persistent and all(0 < c.num_ctas <= 114 for c in persistent)


def test_few_rows_take_the_kernel_of_few_rows_and_cover_the_gpu() -> None:
    a = torch.empty((6337, 5), dtype=torch.bfloat16, device="meta").mT
    b, out = a.new_empty((6337, 3360)), a.new_empty((5, 3360))
    found = arrange(Call(a, b), out, ARCH)
    calls = call_class(found.sizes, (found.a, found.b, found.out), (), ARCH)
    tiles = next(candidates(calls)).tiles
    assert isinstance(tiles, FewRowsConfig) and found.a.fold == 1 and not found.notes
    assert config_of(calls, asdict(tiles)) == tiles
    assert -(-3360 // tiles.tile_n) * tiles.split_k > 60


@pytest.mark.parametrize(("m", "split"), [(961, True), (400, False)])
def test_few_columns_of_n_are_cut_by_k_where_m_is_large(m: int, split: bool) -> None:
    a = torch.empty((m, 13312), dtype=torch.bfloat16, device="meta")
    b, out = a.new_empty((128, 13312)).mT, a.new_empty((m, 128))
    found = arrange(Call(a, b), out, ARCH)
    calls = call_class(found.sizes, (found.a, found.b, found.out), (), ARCH)
    every = [c.tiles for c in candidates(calls)]
    by_n = [c for c in every if c.columns and not c.swap_ab]
    assert split == any(c.tile_n == 128 and c.split_k == 4 for c in by_n) == bool(by_n)


def test_no_more_ctas_stream_a_tile_than_add_up_in_time() -> None:
    """Their sums are added one after the other."""
    a = torch.empty((3584, 44), dtype=torch.bfloat16, device="meta").mT
    b, out = a.new_empty((3584, 8)), a.new_empty((44, 8))
    found = arrange(Call(a, b), out, ARCH)
    calls = call_class(found.sizes, (found.a, found.b, found.out), (), ARCH)
    tiles = next(candidates(calls)).tiles
    assert tiles.split_k == 8 and tiles.cluster_m == 1 and not tiles.stream_k
