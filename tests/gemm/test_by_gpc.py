"""Clusters that claim their place among the tiles, by the SM they run on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cutlass import Int32
from mutations import mutate
from torch import Tensor

import cutex
from cutex import ops
from cutex.arch import arch
from cutex.compile import compile
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm90.config import CLAIM_WORDS, Sm90Config
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.tile_order import SMS, by_gpc, by_number
from cutex.ops import workspace
from cutex.ops.matmul import choices, tuner
from cutex.ops.matmul.plan import call_class, candidates, fitted, forget, unplaced
from cutex.problem.gemm import GemmProblem
from cutex.schedulers import by_gpc as scheduler
from cutex.schedulers.by_gpc import RUNS, WORDS, run_of_tpc, start_of_run
from cutex.sim import Hazards, SimError

SLOW = pytest.mark.slow
TILES = Sm90Config(
    tile_m=64, tile_n=64, num_stages=3, epi_n=64, epi_stages=1, warpgroups=1, by_gpc=True
)
KINDS = {
    "several rounds": {"num_ctas": 5},
    "pairs along N": {"cluster_n": 2},
    "alone": {},
    "as many as there are tiles, or less": {"num_ctas": 42},
    "pairs along M, C transposed": {"cluster_m": 2, "swap_ab": True, "raster_group": 4},
    "ping-pong, several rounds": {"warpgroups": 2, "pingpong": True, "num_ctas": 7},
}
each_kind = pytest.mark.parametrize(
    "changes",
    [
        pytest.param(x, id=name, marks=[] if i < 1 else SLOW)
        for i, (name, x) in enumerate(KINDS.items())
    ],
)


def test_runs_hold_the_tpcs_of_a_gpc_and_all_places() -> None:
    runs = [run_of_tpc(tpc) for tpc in range(SMS // 2)]
    assert [tpc for tpc, run in enumerate(runs) if run == 1] == [1, 9, 17, 25, 32, 39, 46, 53]
    starts = [start_of_run(run) for run in range(RUNS)] + [SMS // 2]
    assert [b - a for a, b in pairwise(starts)] == [runs.count(run) for run in range(RUNS)]
    assert CLAIM_WORDS == WORDS > RUNS


def integers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).bfloat16()


def launch(changes: dict[str, Any], kernel: Any = None, cache: bool = True, **order: Any) -> None:
    """Simulate two launches in a row, the second of which finds the words as the first did."""
    config = GeneralConfig(replace(TILES, **changes), b=OperandLayout(major="column"))
    m, n, k = (136, 136, 72) if changes == KINDS["several rounds"] else (328, 392, 136)
    x, y = integers(m, k), integers(n, k, seed=1).mT
    compiled = kernel or compile(General(config), "bf16", "sm_90a", cache=cache)
    sums, words = torch.zeros(4), torch.zeros(CLAIM_WORDS, dtype=torch.int32)
    for _ in range(2):
        out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        report = cutex.simulate(compiled, x, y, out, sums, words, **order)
        assert not report.findings, "\n".join(map(str, report.findings))
        assert torch.equal(out, (x.float() @ y.float()).bfloat16())
        assert not words.any(), "a word is left"


@each_kind
def test_each_tile_is_computed(changes: dict[str, Any]) -> None:
    launch(changes, order="random", seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "fifo", "starved", "peer-late"])
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_each_tile_is_computed_in_every_order(changes: dict[str, Any], order: str) -> None:
    launch(changes, order=order, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("run", [0, 1, RUNS - 1])
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_clusters_of_one_gpc_alone_find_other_places(
    changes: dict[str, Any], run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "run_here", lambda: Int32(run))
    launch(changes, cache=False, order="random", seed=3)


FAULTS = {
    "a claim claims nothing": (
        r"atom\.global\.add\.u32\s+(%r\d+), (\[\S+\]), 1;", r"atom.global.add.u32 \1, \2, 0;", ".",
    ),
    "a word stays": (r"st\.relaxed\.gpu\.global[^;]*;", "", "word"),
    "nobody waits until the claim is published": (r"fence\.acq_rel\.cluster;", "", "race|advisor"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_in_the_claims_is_found(
    fault: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "run_here", lambda: Int32(0))
    tiles = replace(TILES, cluster_n=2)
    general = General(GeneralConfig(tiles, b=OperandLayout(major="column")))
    compiled = compile(general, "bf16", "sm_90a", cache=False)
    with pytest.raises((AssertionError, Hazards, SimError), match=fault[2]):
        launch({"cluster_n": 2}, kernel=mutate(compiled, *fault[:2]))


@pytest.mark.slow
def test_matmul_finds_words_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a bias, an activation, and a matrix that is loaded by TMA; then again, by its
    plan; and a batch."""
    monkeypatch.setattr(choices, "preferred", lambda calls: TILES)
    forget()
    x, w, bias = integers(200, 584), integers(264, 584, seed=1), integers(264, seed=2)
    residual = integers(200, 264, seed=3)
    want = (x.float() @ w.float().T + bias.float()).relu() + residual.float()
    with ops.simulated(order="random", seed=1):
        for _ in range(2):
            out = cutex.matmul(x, w.mT, bias=bias, activation="relu", residual=residual)
            assert torch.equal(out, want.bfloat16())
        assert any(count == -CLAIM_WORDS for _, _, count in workspace._flags), "it claims"
        batch = integers(3, 136, 584)
        assert torch.equal(cutex.matmul(batch, w.mT), (batch.float() @ w.float().T).bfloat16())
    assert not any(x.any() for x in workspace._flags.values())
    forget()


def test_who_walks_for_long_over_whole_tiles_is_placed() -> None:
    h200, problem = arch("sm_90a"), GemmProblem(8192, 2048, 4096)
    tiles = replace(TILES, tile_m=128, tile_n=128, warpgroups=2, by_gpc=False)
    placed = by_gpc(tiles, problem, h200)
    assert placed.by_gpc and placed.raster_along == "m"
    assert by_number(placed) == tiles
    assert by_gpc(tiles, GemmProblem(8192, 2048, 256), h200) == tiles, "soon done"
    assert by_gpc(tiles, GemmProblem(1024, 1024, 8192), h200) == tiles, "few tiles"
    for changes in ({"columns": 1}, {"stream_k": 1}, {"split_k": 2}, {"cluster_m": 4}):
        other = replace(tiles, **changes)
        assert by_gpc(other, problem, h200) == other
        assert "by_gpc" in str(replace(other, by_gpc=True).why_not(None, h200))


def test_tuning_compares_both_orders() -> None:
    layouts = OperandLayout(), OperandLayout(major="column"), OperandLayout()
    calls = call_class((8192, 2048, 4096, 1), layouts, (), "sm_90a")
    first = next(candidates(calls))
    (other,) = unplaced(first, calls)
    assert first.tiles.by_gpc and other in tuner.worth_timing(calls, first)
    assert not other.tiles.by_gpc and unplaced(other, calls) == []
    assert fitted(other.tiles, calls) == other, "what was timed stays as it was"
