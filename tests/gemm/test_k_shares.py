"""Shares of K whose sums a second kernel adds up (kernels/gemm/sm90/in_shares.py)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from mutations import mutate
from torch import Tensor

import cutex
from cutex import ops
from cutex.arch import arch
from cutex.compile import compile
from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm90.candidates import (
    LEAST_STEPS,
    SHARED_COLUMNS,
    SHARED_ROWS,
    candidates,
)
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.in_shares import InShares
from cutex.ops.matmul import choices
from cutex.ops.matmul.plan import forget
from cutex.problem.gemm import GemmProblem
from cutex.sim import Hazards, SimError

SLOW = pytest.mark.slow
TILES = Sm90Config(
    tile_m=64, tile_n=64, num_stages=3, epi_n=16, epi_stages=1, warpgroups=1, k_shares=3
)
KINDS = {
    "three shares": {},
    "17 shares, one without any of K": {"k_shares": 17},
    "pairs along M, C transposed": {"cluster_m": 2, "swap_ab": True, "k_shares": 2},
    "128x96, two warpgroups, fours": {
        "tile_m": 128, "tile_n": 96, "warpgroups": 2, "cluster_m": 2, "cluster_n": 2,
        "epi_n": 32,
    },
    "128x64, C transposed": {"tile_m": 128, "warpgroups": 2, "swap_ab": True, "k_shares": 5},
    "192x64, in boxes": {"tile_m": 192, "warpgroups": 3, "box_rows": 32},
    "odd rows": {"tile_n": 72, "epi_n": 72, "k_shares": 4},
}  # fmt: skip
PASSES = {"forward": ("row", "column"), "dgrad": ("row", "row"), "wgrad": ("column", "row")}


def integers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).bfloat16()


def launch(
    changes: dict[str, Any],
    majors: tuple[str, str] = PASSES["wgrad"],
    sizes: tuple[int, int, int] = (136, 88, 456),
    kernel: Any = None,
    times: int = 1,
    **order: Any,
) -> None:
    """Simulate launches in a row, each over what the one before left in the workspace."""
    tiles = replace(TILES, **changes)
    m, n, k = sizes
    x, y = integers(m, k), integers(k, n, seed=1)
    if majors[0] == "column":
        x = x.mT.contiguous().mT
    if majors[1] == "column":
        y = y.mT.contiguous().mT
    config = GeneralConfig(tiles, *(OperandLayout(major=major) for major in majors))
    compiled = kernel or compile(InShares(config), "bf16", "sm_90a")
    assert tiles.workspace is not None
    sums = torch.full((tiles.workspace.sums,), torch.nan)
    flags = torch.zeros(tiles.workspace.flags, dtype=torch.int32)
    for _ in range(times):
        out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        report = cutex.simulate(compiled, x, y, out, sums, flags, **order)
        assert not report.findings, "\n".join(map(str, report.findings))
        assert torch.equal(out, (x.float() @ y.float()).bfloat16())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(x, id=name, marks=[] if i < 1 else SLOW)
        for i, (name, x) in enumerate(KINDS.items())
    ],
)
def test_all_shares_are_added_up(changes: dict[str, Any]) -> None:
    launch(changes, order="random", seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "fifo", "starved", "peer-late"])
@pytest.mark.parametrize("majors", PASSES.values(), ids=PASSES.keys())
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_all_shares_are_added_up_in_every_order(
    changes: dict[str, Any], majors: tuple[str, str], order: str
) -> None:
    launch(changes, majors, (136, 72, 520), times=2, order=order, seed=2)


OF_SUMS = r"(\.entry \w*_sums[\s\S]*?)"  # from the second kernel's entry on
FAULTS = {
    "sums are read before they are written": (OF_SUMS + r"griddepcontrol\.wait;", r"\1"),
    "a share is left out": (
        OF_SUMS + r"add\.f32\s+(%r\d+), (%r\d+), %r\d+;", r"\1mov.b32 \2, \3;",
    ),
    "one share for all": (
        OF_SUMS + r"(mul\.wide\.s32[^;]*;[\s\S]*?mul\.wide\.s32\s+%rd\d+, %r\d+,) 4;",
        r"\1\2 0;",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_in_the_second_kernel_is_found(fault: tuple[str, str, str]) -> None:
    config = GeneralConfig(TILES, OperandLayout(major="column"))
    compiled = compile(InShares(config), "bf16", "sm_90a", cache=False)
    with pytest.raises((AssertionError, Hazards, SimError)):
        launch({}, kernel=mutate(compiled, *fault[:2]))


def test_what_takes_shares_is_plain_and_has_room() -> None:
    h200 = arch("sm_90a")
    assert TILES.why_not(GemmProblem(512, 320, 4096), h200) is None
    reason = TILES.why_not(GemmProblem(512, 384, 4096), h200)
    assert reason is not None and "k_shares=3: 48 tiles each" in reason
    for changes in (
        {"columns": 1},
        {"stream_k": 1},
        {"split_k": 2},
        {"by_gpc": True},
        {"pingpong": True, "warpgroups": 2},
    ):
        assert "k_shares=3" in str(replace(TILES, **changes).why_not(None, h200))
    for out in ({"major": "column"}, {"batched": True}, {"dtype": "fp32"}, {"tma": False}):
        reason = GeneralConfig(TILES, out=OperandLayout(**out)).why_not(None, h200)
        assert reason is not None and "16 bits by rows" in reason


def test_a_small_c_and_a_long_k_have_such_candidates() -> None:
    """As many shares as there are CTAs for, none of them without any of K."""
    problem = GemmProblem(256, 824, 12992)
    found = [c for c in candidates(problem, arch("sm_90a"), (False, False)) if c.k_shares > 1]
    assert {(c.tile_m, c.tile_n) for c in found} >= set(product(SHARED_ROWS, SHARED_COLUMNS))
    for c in found:
        each = ceil_div(ceil_div(problem.k, 64), c.k_shares)
        assert each >= LEAST_STEPS and (c.k_shares - 1) * each * 64 < problem.k
    large = GemmProblem(4096, 4096, 12992)
    assert not any(c.k_shares > 1 for c in candidates(large, arch("sm_90a"), (False, False)))


def test_the_columns_of_shared_tiles_are_fitted_to_those_of_c() -> None:
    """Where K is contiguous along them; elsewhere TMA loads boxes of 32."""
    problem = GemmProblem(276, 256, 12800)
    found = [c for c in candidates(problem, arch("sm_90a"), (True, False)) if c.k_shares > 1]
    assert {c.tile_n for c in found if c.swap_ab} == {48, 56, 64, 72, 96, 128}
    assert {c.tile_n for c in found if not c.swap_ab} == {64, 96, 128}


@pytest.mark.slow
def test_a_call_with_more_sums_than_room_is_refused() -> None:
    compiled = compile(InShares(GeneralConfig(TILES)), "bf16", "sm_90a")
    needs = TILES.workspace
    assert needs is not None
    sums, flags = torch.zeros(needs.sums), torch.zeros(needs.flags, dtype=torch.int32)
    x, y = integers(512, 512), integers(512, 384)
    with pytest.raises(ValueError, match="out has N=384, this kernel takes at most 320"):
        cutex.simulate(compiled, x, y, x.new_empty(512, 384), sums, flags)


@pytest.mark.slow
def test_matmul_takes_them_where_nothing_else_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain call, the same by its plan, and one with a bias, which takes other tiles."""
    monkeypatch.setattr(choices, "preferred", lambda calls: TILES)
    forget()
    x, w, bias = integers(136, 584), integers(88, 584, seed=1), integers(88, seed=2)
    want = x.float() @ w.float().T
    with ops.simulated(order="random", seed=1):
        for _ in range(2):
            assert torch.equal(cutex.matmul(x, w.mT), want.bfloat16())
        assert torch.equal(cutex.matmul(x, w.mT, bias=bias), (want + bias).bfloat16())
        x[3, 7], w[5, 9] = torch.nan, torch.inf
        out = cutex.matmul(x, w.mT)
        assert out[3].isnan().all() and not out[2, :5].isnan().any()
    forget()
