"""The configs of stages 4 to 9 of sm_90a other than their defaults."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.kernels.gemm.sm90 import mma
from cutex.kernels.gemm.sm90.load import LOOKS, Pace
from cutex.kernels.gemm.sm90.stage9 import Stage9
from cutex.problem.gemm import GemmProblem
from cutex.sim import simulate
from cutex.sim.errors import BarrierMisuse, Hazards
from cutex.sim.machine.machine import Machine

SLOW = pytest.mark.slow
PERSISTENT = {"num_ctas": 4}
COOPERATIVE = {
    "128x256": {"tile_n": 256, "num_stages": 4, "epi_stages": 2},
    "256x128, 1x2": {"tile_m": 256, "tile_n": 128, "num_stages": 4, "cluster_n": 2},
    "256x208, 240 registers": {"tile_m": 256, "tile_n": 208, "num_stages": 3, "epi_n": 16},
    "192x128, three warpgroups": {
        "tile_m": 192, "tile_n": 128, "num_stages": 4, "warpgroups": 3
    },
    "64x224, one warpgroup": {
        "tile_m": 64, "tile_n": 224, "num_stages": 3, "warpgroups": 1, "epi_n": 32
    },
    "bands along n": {"tile_n": 128, "raster_along": "n", "raster_group": 3},
    "2x2": {"tile_n": 128, "cluster_m": 2, "cluster_n": 2},
}  # fmt: skip
PINGPONG = {
    "128x192, 1x2": {"cluster_m": 1, "cluster_n": 2},
    "192x128": {"tile_m": 192, "tile_n": 128},
    "64x256": {"tile_m": 64, "tile_n": 256},
    "128x208": {"tile_n": 208, "epi_n": 16},
    "128x128, two slots of C": {"tile_n": 128, "num_stages": 6, "epi_stages": 2},
}
SMALL = {
    "pingpong": False, "cluster_m": 1, "swap_ab": True, "num_stages": 6, "epi_n": 16
}  # fmt: skip
SWAPPED = {
    "64x16": {**SMALL, "tile_m": 64, "tile_n": 16, "warpgroups": 1, "k_bytes": 256},
    "128x64, 1x2": {**SMALL, "tile_n": 64, "epi_n": 64, "cluster_n": 2},
    "128x64, split in two": {**SMALL, "tile_n": 64, "epi_n": 64, "split_k": 2},
    "128x64, split in four": {**SMALL, "tile_n": 64, "epi_n": 32, "split_k": 4},
}


SPREAD = {
    "64x16 on 5": {**SMALL, "tile_m": 64, "tile_n": 16, "warpgroups": 1, "num_ctas": 5},
    "128x32 on 3": {**SMALL, "tile_n": 32, "num_ctas": 3, "epi_n": 32},
}


COLUMN = {
    "64x16": {**SMALL, "tile_m": 64, "tile_n": 16, "warpgroups": 1, "k_bytes": 256},
    "128x16, 1x2": {**SMALL, "tile_n": 16, "cluster_n": 2},
    "128x32, 2x1": {**SMALL, "tile_n": 32, "cluster_m": 2, "epi_n": 32},
    "128x16, 2x2": {**SMALL, "tile_n": 16, "cluster_m": 2, "cluster_n": 2},
    "64x32 in parts of 16": {**SMALL, "tile_m": 64, "tile_n": 32, "warpgroups": 1},
    "128x64, 1x2": {**SMALL, "tile_n": 64, "cluster_n": 2, "epi_n": 64},
}


def check(number: int, mnk: tuple[int, int, int], changes: dict, order: str, seed: int) -> None:
    ninth = stage("sm_90a", number)
    config = replace(ninth.config(), **changes)
    problem = GemmProblem(*mnk, init="int")
    a, b = problem.inputs()
    c = problem.output()
    report = simulate(
        compile(ninth.kernel(config), problem.dtype, ninth.arch), a, b, c, order=order, seed=seed
    )
    assert not report.findings, "\n".join(map(str, report.findings))
    found = problem.check(a, b, c, tile=(config.tile_m, config.tile_n))
    assert found.ok, found.message


@pytest.mark.slow
@pytest.mark.parametrize("changes", COOPERATIVE.values(), ids=COOPERATIVE.keys())
def test_cooperative_tiles_come_out_exact_when_few_ctas_walk_many(changes: dict) -> None:
    check(7, (600, 520, 200), {**PERSISTENT, "cluster_n": 1, **changes}, "random", 1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", PINGPONG.values(), ids=PINGPONG.keys())
def test_pingpong_tiles_come_out_exact_when_few_ctas_walk_many(changes: dict) -> None:
    check(8, (600, 520, 200), {**PERSISTENT, **changes}, "random", 2)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("k", [pytest.param(64, marks=SLOW), 200, pytest.param(1032, marks=SLOW)])
@pytest.mark.parametrize("changes", SWAPPED.values(), ids=SWAPPED.keys())
@pytest.mark.parametrize("m", [1, 16, 100])
def test_swapped_and_split_come_out_exact(m: int, changes: dict, k: int) -> None:
    """k=64 is less than one step for each part of a split, which then adds zeros."""
    check(9, (m, 264, k), changes, "random", 3)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "random"])
@pytest.mark.parametrize("changes", SPREAD.values(), ids=SPREAD.keys())
def test_spread_tiles_overlap_and_come_out_exact(changes: dict, order: str) -> None:
    check(9, (13, 312, 712), {**changes, "spread": True}, order, 4)


COLUMNS = [  # each swapped or not, by turns; the rest with -m slow
    pytest.param(name, swap_ab, order, marks=[SLOW] if order == "eager" or swap_ab == i % 2 else [])
    for i, name in enumerate(COLUMN)
    for swap_ab in (True, False)
    for order in ("eager", "random")
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "swap_ab", "order"), COLUMNS)
def test_a_column_of_tiles_comes_out_exact(changes: str, swap_ab: bool, order: str) -> None:
    mnk = (13, 712, 1032) if swap_ab else (712, 16, 1032)
    check(9, mnk, {**COLUMN[changes], "swap_ab": swap_ab, "columns": 1}, order, 4)


ROUND = {
    "128x64 in three columns": {**SMALL, "tile_n": 64, "epi_n": 64, "columns": 3},
    "128x80, 1x2": {**SMALL, "tile_n": 80, "cluster_n": 2, "columns": 1},
    "64x48, 2x1, in four": {
        **SMALL, "tile_m": 64, "tile_n": 48, "warpgroups": 1, "cluster_m": 2, "columns": 4
    },
    "128x48, 1x2, in two": {**SMALL, "tile_n": 48, "cluster_n": 2, "columns": 2},
    "192x32, three warpgroups, in five": {
        **SMALL, "tile_m": 192, "tile_n": 32, "warpgroups": 3, "columns": 5, "num_stages": 4
    },
    "64x80, split in three, in two": {
        **SMALL, "tile_m": 64, "tile_n": 80, "warpgroups": 1, "split_k": 3, "columns": 2
    },
    "128x32, split in two, in five": {**SMALL, "tile_n": 32, "split_k": 2, "columns": 5},
    "192x144, split in four, in two": {
        **SMALL, "tile_m": 192, "tile_n": 144, "warpgroups": 3, "split_k": 4, "columns": 2,
        "num_stages": 5,
    },
    "192x48, 1x4": {
        **SMALL, "tile_m": 192, "tile_n": 48, "warpgroups": 3, "cluster_n": 4, "columns": 1
    },
    "64x96, 4x1, in two": {
        **SMALL, "tile_m": 64, "tile_n": 96, "warpgroups": 1, "cluster_m": 4, "columns": 2
    },
    "64x80, 4x1, B in turn, in two": {
        **SMALL, "tile_m": 64, "tile_n": 80, "warpgroups": 1, "cluster_m": 4, "columns": 2
    },
    "64x64, 4x2, in two": {
        **SMALL, "tile_m": 64, "tile_n": 64, "epi_n": 64, "warpgroups": 1, "cluster_m": 4,
        "cluster_n": 2, "columns": 2,
    },
    "64x24, 2x4, B in turn, two rows, not swapped": {
        **SMALL, "tile_m": 64, "tile_n": 24, "epi_n": 24, "warpgroups": 1, "cluster_m": 2,
        "cluster_n": 4, "rows": 2, "swap_ab": False,
    },
    "64x40, 2x1, B in turn, two rows, not swapped": {
        **SMALL, "tile_m": 64, "tile_n": 40, "epi_n": 40, "warpgroups": 1, "cluster_m": 2,
        "rows": 2, "swap_ab": False,
    },
    "64x80, 2x1, two rows, not swapped": {
        **SMALL, "tile_m": 64, "tile_n": 80, "warpgroups": 1, "cluster_m": 2, "rows": 2,
        "swap_ab": False,
    },
    "192x48, a row split in three, not swapped": {
        **SMALL, "tile_m": 192, "tile_n": 48, "warpgroups": 3, "rows": 1, "swap_ab": False,
        "split_k": 3, "num_stages": 5,
    },
    "64x32, three rows, not swapped": {
        **SMALL, "tile_m": 64, "tile_n": 32, "warpgroups": 1, "rows": 3, "swap_ab": False
    },
    "64x40, three rows, not swapped": {
        **SMALL, "tile_m": 64, "tile_n": 40, "epi_n": 40, "warpgroups": 1, "rows": 3,
        "swap_ab": False,
    },
    "192x24, 1x4, not swapped": {
        **SMALL, "tile_m": 192, "tile_n": 24, "epi_n": 24, "warpgroups": 3, "cluster_n": 4,
        "rows": 1, "swap_ab": False,
    },
    "128x136, two rows split in two, not swapped": {
        **SMALL, "tile_n": 136, "epi_n": 136, "rows": 2, "split_k": 2, "num_stages": 5,
        "swap_ab": False,
    },
    "64x48, 2x1, split in two, in four": {
        **SMALL, "tile_m": 64, "tile_n": 48, "warpgroups": 1, "cluster_m": 2, "split_k": 2,
        "columns": 4,
    },
    "128x80, 1x2, split in four": {
        **SMALL, "tile_n": 80, "cluster_n": 2, "split_k": 4, "columns": 1
    },
    "64x40, 4x1, B in turn, split in two, not swapped": {
        **SMALL, "tile_m": 64, "tile_n": 40, "epi_n": 40, "warpgroups": 1, "cluster_m": 4,
        "split_k": 2, "rows": 1, "swap_ab": False,
    },
    "256x160": {
        **SMALL, "tile_m": 256, "tile_n": 160, "columns": 1, "num_stages": 3, "epi_n": 32
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("changes", ROUND.values(), ids=ROUND.keys())
def test_one_round_of_tiles_in_columns_comes_out_exact(changes: dict) -> None:
    check(9, (150, 264, 392), changes, "random", 5)


ODD = {
    "128x88, 4x1": {**SMALL, "tile_n": 88, "epi_n": 88, "cluster_m": 4, "num_ctas": 8},
    "64x120, 1x2": {
        **SMALL, "tile_m": 64, "tile_n": 120, "epi_n": 120, "warpgroups": 1, "cluster_n": 2,
        "num_ctas": 6,
    },
    "64x168, 2x1, in boxes": {
        **SMALL, "tile_m": 64, "tile_n": 168, "epi_n": 168, "warpgroups": 1, "cluster_m": 2,
        "num_ctas": 6, "box_rows": 32,
    },
    "128x40, ping-pong": {
        **SMALL, "tile_n": 40, "epi_n": 40, "warpgroups": 2, "pingpong": True, "num_ctas": 3
    },
    "192x56, split in two": {
        **SMALL, "tile_m": 192, "tile_n": 56, "epi_n": 56, "warpgroups": 3, "split_k": 2
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(x, id=name, marks=[SLOW] if i else [])
        for i, (name, x) in enumerate(ODD.items())
    ],
)
def test_an_odd_multiple_of_eight_columns_is_stored_transposed(changes: dict) -> None:
    check(9, (150, 264, 200), changes, "random", 5)


IN_TURNS = {
    "128x40": {**SMALL, "tile_n": 40, "epi_n": 40, "warpgroups": 2, "num_ctas": 3},
    "256x24, C as it is": {
        **SMALL, "tile_m": 256, "tile_n": 24, "epi_n": 24, "warpgroups": 2, "swap_ab": False,
        "num_stages": 4, "num_ctas": 3,
    },
    "192x48, 2x1": {
        **SMALL, "tile_m": 192, "tile_n": 48, "epi_n": 48, "warpgroups": 3, "cluster_m": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(x, id=name, marks=[SLOW] if i else [])
        for i, (name, x) in enumerate(IN_TURNS.items())
    ],
)
def test_warpgroups_that_take_turns_at_a_slot_store_exactly(changes: dict) -> None:
    check(9, (150, 264, 72), {**changes, "in_turns": True}, "random", 5)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "starved", "peer-late"])
def test_turns_do_not_depend_on_the_order_of_events(order: str) -> None:
    for changes in IN_TURNS.values():
        check(9, (150, 264, 72), {**changes, "in_turns": True}, order, 6)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "starved", "peer-late", "random"])
@pytest.mark.parametrize("more", [{"columns": 2}, {"num_ctas": 8}], ids=["a round", "a walk"])
def test_loads_in_turn_do_not_depend_on_the_order_of_events(more: dict, order: str) -> None:
    """80 rows of B do not divide into four parts of whole swizzle atoms, nor seven steps of K into
    rounds of four turns."""
    changes = {"tile_m": 64, "tile_n": 80, "warpgroups": 1, "cluster_m": 4, "num_stages": 3}
    check(9, (150, 600, 392), {**SMALL, **changes, **more}, order, 6)


SPLIT = {
    "64x160 in two, as many slots as parts": {
        **SMALL, "tile_m": 64, "tile_n": 160, "warpgroups": 1, "epi_n": 32, "epi_stages": 3,
        "split_k": 2, "columns": 1, "num_stages": 4,
    },
    "192x48 in three, fewer slots, one row": {
        **SMALL, "tile_m": 192, "tile_n": 48, "warpgroups": 3, "rows": 1, "swap_ab": False,
        "split_k": 3, "num_stages": 5,
    },
    "64x32 in four, two of which store nothing": {
        **SMALL, "tile_m": 64, "tile_n": 32, "warpgroups": 1, "split_k": 4, "columns": 5,
    },
    "64x48 in two, of clusters that share B": {
        **SMALL, "tile_m": 64, "tile_n": 48, "warpgroups": 1, "cluster_m": 2, "split_k": 2,
        "columns": 4,
    },
    "64x48 in three, of clusters that share A": {
        **SMALL, "tile_m": 64, "tile_n": 48, "warpgroups": 1, "cluster_n": 2, "split_k": 3,
        "columns": 2,
    },
    "64x48 in two, of clusters that share both, in a walk": {
        **SMALL, "tile_m": 64, "tile_n": 48, "warpgroups": 1, "cluster_m": 2, "cluster_n": 2,
        "split_k": 2,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", ["random", "starved", *(pytest.param(x, marks=SLOW) for x in ("eager", "peer-late"))]
)
@pytest.mark.parametrize("changes", SPLIT.values(), ids=SPLIT.keys())
def test_sums_of_a_split_do_not_depend_on_the_order_of_events(changes: dict, order: str) -> None:
    check(9, (150, 152, 712), changes, order, 7)


def test_sums_sent_before_the_ring_is_free_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutClusterBarrier:
        def __getattr__(self, name: str):
            return getattr(real, name) if "cluster_" not in name else lambda: None

    real = cute.arch
    changes = {**SPLIT["64x160 in two, as many slots as parts"], "num_stages": 4}
    ninth, problem = stage("sm_90a", 9), GemmProblem(64, 152, 712, init="int")
    kernel = ninth.kernel(replace(ninth.config(), **changes))
    monkeypatch.setattr(cute, "arch", WithoutClusterBarrier())
    compiled = compile(kernel, problem.dtype, ninth.arch, cache=False)
    monkeypatch.undo()
    found = "race|no mbarrier was initialised"  # the second where a CTA has not begun
    for order in ("eager", "starved", "peer-late"):
        with pytest.raises((Hazards, BarrierMisuse), match=found):
            simulate(compiled, *problem.inputs(), problem.output(), order=order, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [7, 8, 9])
@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=SLOW) for x in (1, 2))])
def test_a_walk_of_several_tiles_does_not_depend_on_the_order_of_events(
    number: int, seed: int
) -> None:
    check(number, (600, 800, 64 * 7), {"num_ctas": 2}, "random", seed)


class Paced(Stage9):
    """Keeps a pace however few bytes it reads: steps of 1248 ns for 312 rows."""

    @property
    def name(self) -> str:
        return "sm90_gemm_paced"

    @property
    def pace(self) -> Pace:
        return Pace(bytes_per_ns=64, least_bytes=0)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("clock", ["goes on", "stands still"])
@pytest.mark.parametrize("order", ["eager", "random"])
@pytest.mark.parametrize("changes", [{"spread": True, "num_ctas": 5}, {"columns": 1}])
def test_a_pace_changes_no_result_and_a_clock_that_stands_still_no_end(
    changes: dict, order: str, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def stopped(machine: Machine) -> int:
        looks.append(machine)
        return 1

    if clock == "stands still":
        monkeypatch.setattr(Machine, "clock", stopped)
    ninth = stage("sm_90a", 9)
    config = replace(ninth.config(), **{**SWAPPED["64x16"], **changes})
    problem = GemmProblem(13, 312, 128 * 16, init="int")
    a, b = problem.inputs()
    c = problem.output()
    report = simulate(compile(Paced(config), problem.dtype, ninth.arch), a, b, c, order=order)
    assert not report.findings, "\n".join(map(str, report.findings))
    assert problem.check(a, b, c, tile=(config.tile_m, config.tile_n)).ok
    if clock == "stands still":
        assert len(looks) > 10 * LOOKS, "for each of 10 K tiles beside a ring of 6"


class Hasty(Stage9):
    """Does not wait for the MMA before it releases a slot."""

    @property
    def name(self) -> str:
        return "sm90_gemm_hasty"


def test_a_slot_released_before_its_mma_is_done_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_group = warpgroup.wait_group
    hasty = SimpleNamespace(wait_group=lambda groups: wait_group(max(groups, 1)))
    monkeypatch.setattr(mma, "warpgroup", hasty)
    ninth = stage("sm_90a", 9)
    config = replace(ninth.config(), **{**COLUMN["128x64, 1x2"], "columns": 1})
    problem = GemmProblem(13, 712, 1032, init="int")
    a, b = problem.inputs()
    with pytest.raises(Hazards, match="while it is still being read by the wgmma"):
        simulate(compile(Hasty(config), problem.dtype, ninth.arch), a, b, problem.output())
