"""Stream-K on Hopper: shares of steps as a partition, and the kernel that exchanges sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from mutations import mutate
from torch import Tensor

import cutex
from cutex import ops
from cutex.arch import arch
from cutex.compile import compile
from cutex.kernels.gemm.choose import predictions
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm90 import cost_model
from cutex.kernels.gemm.sm90.candidates import MOST_STREAMED
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.general import General
from cutex.ops import workspace
from cutex.ops.matmul import choices
from cutex.ops.matmul.plan import forget
from cutex.problem.gemm import GemmProblem
from cutex.schedulers.raster import Raster, RasterOrder
from cutex.schedulers.stream_k import FINISH, LEAST, Segment, Shares, StreamedWalk, whole_rounds
from cutex.sim import Hazards

SLOW = pytest.mark.slow
SLOW_ORDERS = [pytest.param(order, marks=SLOW) for order in ("fifo", "peer-late", "random")]

TILES = Sm90Config(
    tile_n=128, num_stages=3, epi_n=64, epi_stages=2, warpgroups=2, num_ctas=5, stream_k=1
)

# ---- the partition


def segments(walk: StreamedWalk) -> list[Segment]:
    return [walk.segment(turn) for turn in range(walk.turns)]


def walks(tiles: int, k_tiles: int, clusters: int, rounds: int) -> list[StreamedWalk]:
    whole = whole_rounds(tiles, clusters, rounds)
    shares = Shares(tiles - whole * clusters, k_tiles, clusters)
    order = RasterOrder(Raster(), tiles, 1)
    return [StreamedWalk(order, shares, whole, cluster) for cluster in range(clusters)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("rounds", [1, 2, 100])
@pytest.mark.parametrize("k_tiles", [1, 3, 8, 9, 16, 67])
def test_every_step_comes_once_and_who_waits_was_launched_later(k_tiles: int, rounds: int) -> None:
    for clusters in (1, 2, 7, 66):
        for tiles in (1, 2, 5, 13, 66, 150):
            every = walks(tiles, k_tiles, clusters, rounds)
            steps = [
                (s.index, k, walk.cluster)
                for walk in every
                for s in segments(walk)
                for k in range(s.first, s.first + s.count)
            ]
            assert sorted(x[:2] for x in steps) == [
                (tile, k) for tile in range(tiles) for k in range(k_tiles)
            ]
            owner = {(tile, k): cluster for tile, k, cluster in steps}
            for walk in every:
                mine = segments(walk)
                left = [s for s in mine if s.first > 0]
                assert len(left) <= 1, "there is one place for its sums"
                assert left in ([], [s for s in mine if s.index >= walk.rounds * clusters][:1])
                for s in mine:
                    if s.first == 0 or s.first + s.count == k_tiles:
                        assert s.count >= min(LEAST, k_tiles)
                    others = {owner[s.index, k] for k in range(k_tiles)} - {walk.cluster}
                    if s.first == 0 and others:
                        assert s == mine[-1] and max(others) < walk.cluster


def test_shares_differ_by_little() -> None:
    """They differ by a step, and by the steps left to a neighbour: the front of a tile counts as
    FINISH more."""
    shares = Shares(21, 336, 66)
    cuts = [step.tile * 336 + step.k_tile for step in map(shares.cut, range(67))]
    fronts = [sum(a <= tile * 336 < b for tile in range(21)) for a, b in pairwise(cuts)]
    steps = [b - a + FINISH * front for (a, b), front in zip(pairwise(cuts), fronts, strict=True)]
    assert max(steps) - min(steps) <= FINISH + LEAST + 1


# ---- the kernel


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def launch(
    config: GeneralConfig, *tensors: Tensor, times: int = 1, kernel: Any = None, **order: Any
) -> None:
    """Simulate on a workspace of its own; `kernel` replaces the compiled one."""
    needs = config.tiles.workspace
    assert needs is not None
    compiled = kernel or compile(General(config), "bf16", "sm_90a")
    sums = torch.full((needs.sums,), torch.nan)
    flags = torch.zeros(needs.flags, dtype=torch.int32)
    for _ in range(times):
        report = cutex.simulate(compiled, *tensors, sums, flags, **order)
        assert not report.findings, "\n".join(map(str, report.findings))
        told = [x for x in report.advisories if x.rule != "parked wait"]
        assert not told, "\n".join(map(str, told))
        assert not flags.any(), "the next launch finds the flags as this one did"
    assert sums.isfinite().any(), "some tile is cut"


KINDS = {
    "192x64, three warpgroups": {"tile_m": 192, "tile_n": 64, "warpgroups": 3},
    "2x2, by all": {"tile_n": 64, "cluster_m": 2, "cluster_n": 2, "num_ctas": 12, "stream_k": 9},
    "128x128": {},
    "128x72, odd rows": {"tile_n": 72, "epi_n": 72, "epi_stages": 1},
    "64x96, one warpgroup": {"tile_m": 64, "tile_n": 96, "warpgroups": 1, "epi_n": 32},
    "256x208, 240 registers": {"tile_m": 256, "tile_n": 208, "epi_n": 16, "num_ctas": 3},
    "256x80, many to a tile": {"tile_m": 256, "tile_n": 80, "epi_n": 16, "num_ctas": 17},
    "1x2": {"tile_n": 64, "cluster_n": 2, "num_ctas": 8},
    "4x1, loads in turn": {
        "tile_m": 64, "tile_n": 48, "warpgroups": 1, "epi_n": 16, "cluster_m": 4, "num_ctas": 12
    },
    "2x1, two rounds": {"tile_n": 64, "cluster_m": 2, "num_ctas": 6, "stream_k": 2},
}  # fmt: skip


@pytest.mark.parametrize("swap_ab", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(x, id=name, marks=[] if i < 1 else SLOW)
        for i, (name, x) in enumerate(KINDS.items())
    ],
)
def test_tiles_that_are_cut_come_out_exact(changes: dict, swap_ab: bool) -> None:
    tiles = replace(TILES, swap_ab=swap_ab, **changes)
    m, n = (200, 328) if swap_ab else (328, 200)
    x, y = integers(m, 840), integers(n, 840, seed=1).mT
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    config = GeneralConfig(tiles, b=OperandLayout(major="column"))
    launch(config, x, y, out, order="random", seed=1)
    assert torch.equal(out, (x.float() @ y.float()).bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "starved", *SLOW_ORDERS])
def test_two_launches_in_a_row_are_right_in_every_order(order: str) -> None:
    """Three tiles, and six clusters of two CTAs."""
    tiles = replace(TILES, tile_n=64, cluster_n=2, num_ctas=12)
    x, y = integers(136, 840), integers(840, 200, seed=1)
    out = torch.full((136, 200), torch.nan, dtype=torch.bfloat16)
    launch(GeneralConfig(tiles), x, y, out, times=2, order=order, seed=3)
    assert torch.equal(out, (x.float() @ y.float()).bfloat16())


@pytest.mark.slow
def test_more_share_a_tile_than_a_warp_has_lanes() -> None:
    tiles = replace(TILES, tile_m=64, tile_n=64, warpgroups=1, num_ctas=80)
    x, y = integers(64, 64 * 330), integers(64 * 330, 128, seed=1)
    out = torch.full((64, 128), torch.nan, dtype=torch.bfloat16)
    launch(GeneralConfig(tiles), x, y, out, times=2, order="starved", seed=1)
    assert torch.equal(out, (x.float() @ y.float()).bfloat16())


FAULTS = {
    "a flag says nothing of the sums": (r"st\.release\.gpu", "st.relaxed.gpu", "race"),
    "a flag is read, and nothing else known": (r"ld\.acquire\.gpu", "ld.relaxed.gpu", "race"),
    "nobody waits for a flag": (r"ld\.acquire\.gpu\S* +(%r\d+), [^;]*;", r"mov.b32 \1, 1;", "race"),
    "flags stay": (r"st\.relaxed\.gpu[^;]*;", "", "flags"),
    "sums overwrite what wgmma reads": (r"bar\.sync\s+5,[^;]*;", "", "race"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_in_the_exchange_is_found(fault: tuple[str, str, str]) -> None:
    tiles = replace(TILES, tile_n=64)
    config = GeneralConfig(tiles)
    kernel = mutate(compile(General(config), "bf16", "sm_90a"), *fault[:2])
    x, y, out = integers(128, 840), integers(840, 128, seed=1), torch.empty(128, 128).bfloat16()
    with pytest.raises((AssertionError, Hazards), match=fault[2]):
        launch(config, x, y, out, kernel=kernel)


# ---- cutex.matmul


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call of cutex.matmul uses TILES, in the simulator."""
    monkeypatch.setattr(choices, "preferred", lambda calls: replace(TILES, tile_n=64))
    forget()
    with ops.simulated(order="random", seed=1):
        yield
    forget()


@pytest.mark.slow
def test_matmul_finds_a_workspace_for_it(streamed: None) -> None:
    """A call with a bias, an activation, and a matrix that is loaded by TMA; then again, by its
    plan."""
    x, w, bias = integers(200, 584), integers(264, 584, seed=1), integers(264, seed=2)
    residual = integers(200, 264, seed=3)
    want = (x.float() @ w.float().T + bias.float()).relu() + residual.float()
    for _ in range(2):
        out = cutex.matmul(x, w.mT, bias=bias, activation="relu", residual=residual)
        assert torch.equal(out, want.bfloat16())
    assert not any(x.any() for x in workspace._flags.values())


@pytest.mark.slow
def test_a_batch_and_fp8_are_streamed(streamed: None) -> None:
    x, y = integers(2, 200, 600), integers(2, 600, 72, seed=1)
    assert torch.equal(cutex.matmul(x, y), (x.float() @ y.float()).bfloat16())
    x, y = integers(200, 1120), integers(200, 1120, seed=1).mT
    x, y = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
    out = cutex.matmul(x, y, out_dtype=torch.float32)
    assert torch.equal(out, x.float() @ y.float())


# ---- the choice


def test_streamed_tiles_are_candidates_where_they_could_gain() -> None:
    """Where cuBLAS splits K through memory: few rows, and weights whose tiles fill no round."""
    h200 = arch("sm_90a")
    for mnk, tile in (((160, 5376, 21504), (256, 80, 1, 2)), ((384, 3072, 8192), (128, 192, 1, 2))):
        problem = GemmProblem(*mnk)
        cut = [c for c in predictions(problem, h200) if c.stream_k]
        assert tile in [(c.tile_m, c.tile_n, c.cluster_m, c.cluster_n) for c in cut if c.swap_ab]
        assert 0 < len(cut) <= MOST_STREAMED
        counts = cost_model.columns([cost_model.count(c, problem, h200) for c in cut])
        assert all(10 < us < 200 for us in cost_model.modelled(counts))
    assert not any(c.stream_k for c in predictions(GemmProblem(8192, 8192, 8192), h200))
