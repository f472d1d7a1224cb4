"""Hopper's cost model, against measurements on H200s: results/configs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cutex.arch import arch
from cutex.device.epilogue.epilogue_ops import Add
from cutex.dtypes import DTYPES
from cutex.fit import costs as fit
from cutex.fit.trees import grown
from cutex.kernels.gemm.choose import sizes_class
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.sm90 import cost_model
from cutex.kernels.gemm.sm90.candidates import walked
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.cost_model import MEASURED as MODEL
from cutex.kernels.gemm.sm90.cost_model import candidates, predictions
from cutex.kernels.gemm.sm90.partial_rows import LINES_KEPT, lines_again
from cutex.measured.nearby import file_of
from cutex.measured.trees import trees
from cutex.ops.matmul.plan import call_class, fitted
from cutex.ops.matmul.plan import candidates as of_calls
from cutex.problem import any_shapes
from cutex.problem.gemm import GemmProblem
from cutex.problem.models import corpus
from cutex.schedulers.raster import Raster

H200 = arch("sm_90a")
MEASURED = Path(__file__).parents[2] / "results" / "configs" / "gemm-nvidia-h200.jsonl"
MAJORS = {"forward": (True, True), "dgrad": (True, False), "wgrad": (False, False)}

Times = dict[Sm90Config, float]


class Timed(NamedTuple):
    """A problem that was timed, with the microseconds of the candidate configs: measured, and
    predicted by the model."""

    row: dict[str, Any]
    times: Times
    predicted: Times

    @property
    def chosen(self) -> Sm90Config:
        return min(self.predicted, key=self.predicted.__getitem__)


def test_lines_that_two_streamed_tiles_have_parts_of_are_read_twice() -> None:
    """64 columns are a line; rows of 2304 begin at one, those of 2312 within one but for each
    eighth (docs/facts/gemm.md#streamed-lines)."""
    majors = MAJORS["dgrad"]
    found = candidates(GemmProblem(8, 2304, 14528), H200, majors)
    config = next(c for c in found if c.stream_k and c.swap_ab and c.tile_m * c.cluster_m == 64)

    def again(columns: int, majors: tuple[bool, bool] = majors) -> float:
        return lines_again(config, GemmProblem(8, columns, 14528), 1, majors)

    operand = 2 * 14528 * 2312
    assert again(2304) == 0 == again(2312, MAJORS["forward"])
    assert again(2312) == (operand - LINES_KEPT) * 112 / 128
    wide = replace(config, tile_m=3 * 64 // config.cluster_m, warpgroups=0)
    assert 3 * lines_again(wide, GemmProblem(8, 2312, 14528), 1, majors) == again(2312)


def test_a_config_may_be_far_ahead_of_all_that_were_measured() -> None:
    """The first of a small gradient cuts K into shares, which no measured pair corrects, and all
    others take more than NEAR times as long."""
    majors = MAJORS["wgrad"]
    problem = GemmProblem(*sizes_class((8, 256, 13646), majors))
    found = candidates(problem, H200, majors)
    times = dict(zip(found, predictions(found, problem, H200, 1, majors), strict=True))
    first = min(times, key=times.__getitem__)
    assert first.k_shares > 1
    assert all(times[c] > cost_model.NEAR * times[first] for c in found if c.k_shares == 1)


def test_tiles_overlap_only_across_rows() -> None:
    few = GemmProblem(16, 8192, 512)
    spread = [any(c.spread for c in candidates(few, H200, x)) for x in MAJORS.values()]
    assert spread == [True, False, False]


def test_clusters_that_share_b_are_followed_by_clusters_of_the_same_rows() -> None:
    share_b = [c for c in walked("sm_90a") if c.cluster_m > 1]
    assert len(share_b) > 50
    for config in share_b:
        raster = Raster(config.raster_group, config.raster_along)
        rows = {raster.cluster(i, 5, 11)[0] for i in range(raster.group)}
        assert rows == {0}, config


@pytest.fixture(scope="module")
def measured() -> list[Timed]:
    return timed(28)


@pytest.fixture(scope="module")
def some_measured() -> list[Timed]:
    return timed(112)


def timed(each: int) -> list[Timed]:
    """Every `each`-th of the measured problems."""
    head, *rows = map(json.loads, MEASURED.read_text().splitlines())
    configs = [Sm90Config.from_row(row) for row in head["configs"]]
    found = []
    for row in rows[::each]:
        majors = MAJORS[row["pass"]]
        problem = GemmProblem(*sizes_class(fit.sizes_of(row), majors))  # as the choice sees it
        bits = DTYPES[fit.dtype_of(row)].bits
        allowed = {geometry(c) for c in candidates(problem, H200, majors)}
        times = {configs[int(i)]: us for i, us in row["us"].items()}
        times = {c: us for c, us in times.items() if geometry(c) in allowed}
        if len(times) > 1:
            predicted = predictions(list(times), problem, H200, 1, majors, bits)
            found.append(Timed(row, times, dict(zip(times, predicted, strict=True))))
    return found


def geometry(c: Sm90Config) -> tuple[Any, ...]:
    """A config without its number of slots."""
    return (
        *(c.tile_m, c.tile_n, c.k_bytes, c.cluster_m, c.cluster_n, c.split_k),
        *(c.swap_ab, c.pingpong, c.columns, c.rows, c.spread),
    )


@pytest.mark.slow
def test_what_the_model_ranks_first_is_close_to_the_best_that_was_timed(measured) -> None:
    assert len(measured) > 160
    losses = [x.times[x.chosen] / min(x.times.values()) - 1 for x in measured]
    assert sum(losses) / len(losses) <= 0.02
    assert sum(loss > 0.1 for loss in losses) <= 0.06 * len(losses)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("least", "most", "mean"),
    [(1, 64, 1.10), (65, 128, 1.10), (129, 384, 1.05), (1025, 1 << 20, 1.0)],
)
def test_the_choice_is_faster_than_others_in_the_mean(some_measured, least, most, mean) -> None:
    """Faster than the best of cuBLAS and quack, in the same run."""
    ratios = [
        min(x.row["others"].values()) / x.times[x.chosen]
        for x in some_measured
        if least <= x.row["m"] <= most
    ]
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) >= mean


def test_predicted_times_are_within_a_tenth(some_measured) -> None:
    """The root mean square error of the configs within a quarter of the best."""
    errors = []
    for x in some_measured:
        best = min(x.times.values())
        errors += [math.log(x.predicted[c] / us) for c, us in x.times.items() if us < 1.25 * best]
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) <= 0.1


@pytest.fixture(scope="module")
def pairs() -> fit.Pairs:
    return fit.read()


@pytest.mark.slow  # reads the measured pairs
def test_what_is_known_of_pairs_is_what_was_measured(pairs: fit.Pairs) -> None:
    """cutex/measured keeps what --write or --write-nearby makes of results/configs and the present
    costs and trees."""
    places, errors = fit.known(fit.Model(), trees(MODEL), pairs)
    with np.load(file_of(MODEL)) as file:
        assert np.array_equal(file["places"], places)
        assert np.abs(file["errors"] - errors).max() < 2e-3


@pytest.mark.slow
def test_the_choice_is_good_where_nothing_of_the_problem_was_measured(pairs: fit.Pairs) -> None:
    """Errors of neighbours are those of other problems; the costs were fitted on all of them."""
    verdict = fit.judge(pairs, fit.held_out(fit.Model(), pairs, passes=0))
    found = re.match(r"(\d+) problems: ([\d.]+) times .*?([\d.]+)% below 0.97", verdict)
    assert found is not None, verdict
    assert int(found[1]) > 1000 and float(found[2]) >= 1.09 and float(found[3]) <= 5, verdict


@pytest.mark.slow
def test_the_trees_are_those_that_the_fit_grows() -> None:
    grown, kept = fit.trees_of(fit.Model(), fit.read(fitted=True)), trees(MODEL)
    assert np.array_equal(grown.features, kept.features)
    assert np.allclose(grown.values, kept.values, atol=1e-5)


@pytest.mark.parametrize(
    ("mnk", "tile"),
    [
        ((1300, 1024, 6976), (128, 88, 4, 1, True)),
        ((1300, 1024, 2048), (64, 168, 2, 1, True)),
        ((1425, 704, 3328), (64, 120, 1, 2, True)),
        ((1643, 1472, 2496), (128, 152, 1, 1, False)),
    ],
)
def test_tiles_are_fitted_to_whole_rounds(mnk: tuple[int, int, int], tile: tuple) -> None:
    """Those of one round that leave the fewest columns to a tile, on 132 SMs and on fewer."""
    h200 = arch("sm_90a")
    for target in (h200, replace(h200, num_sms=114)):
        found = [c for c in candidates(GemmProblem(*mnk), target) if c.tile_n % 16 == 8]
        tiles = {(c.tile_m, c.tile_n, c.cluster_m, c.cluster_n, c.swap_ab) for c in found}
        assert (tile in tiles) == (target is h200)
        persistent = [c for c in found if not (c.one_tile or c.stream_k or c.split_k > 1)]
        assert persistent and all((c.num_ctas or 132) <= target.num_sms for c in persistent)


@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
def test_tiles_far_outside_are_loaded_in_boxes(direction: str) -> None:
    """By boxes alone where K is contiguous in both operands, either way elsewhere; a box of 64 rows
    along which K is not contiguous is then outside of nothing."""
    target, problem, majors = arch("sm_90a"), GemmProblem(2334, 1040, 6096), fit.MAJORS[direction]
    usual = Sm90Config(tile_m=128, warpgroups=2, swap_ab=True)  # N is 8 tiles and 16 rows
    boxes: dict[Any, set[int]] = {}
    for c in candidates(problem, target, majors):
        if c.tile_m == usual.tile_m and c.swap_ab and c.tile_n > 32 and not c.spread:
            boxes.setdefault(fit.tiling(c), set()).add(c.box_rows)
    assert boxes and set(map(frozenset, boxes.values())) == {
        frozenset({32} if direction == "forward" else {0, 32})
    }
    config = replace(usual, tile_n=176, num_stages=4)
    boxed = replace(config, box_rows=32)
    whole, parts = (
        cost_model.count(c, problem, target, 1, majors).outside for c in (config, boxed)
    )
    assert parts < whole - 64


def test_operations_take_no_tile_that_is_stored_whole_and_transposed() -> None:
    """It has no slot for a matrix to add, and all its columns in registers at once."""
    layouts = OperandLayout(), OperandLayout(major="column"), OperandLayout()
    plain = call_class((1300, 1024, 6976, 1), layouts, (), "sm_90a")
    added = replace(plain, ops=(Add("d", "bf16", whole=True),))
    odd = next(c.tiles for c in of_calls(plain) if c.tiles.swap_ab and c.tiles.odd_rows)
    assert fitted(odd, added) is None
    assert not any(c.tiles.swap_ab and c.tiles.odd_rows for c in of_calls(added))


def test_the_only_tile_of_a_cta_has_a_slot_for_each_part_of_what_is_added() -> None:
    """If that takes no more than one slot of a long ring (docs/facts/gemm.md#added-early)."""
    layouts = OperandLayout(), OperandLayout(major="column"), OperandLayout()
    plain = call_class((408, 1448, 2320, 1), layouts, (), "sm_90a")
    tiles = next(of_calls(plain)).tiles
    added = fitted(tiles, replace(plain, ops=(Add("c", "bf16", whole=True),))).tiles
    assert tiles.one_tile and tiles.epi_stages < tiles.parts_of_rows == added.epi_stages
    assert added.num_stages == tiles.num_stages - 1


def test_later_runs_are_neighbours_only(
    pairs_of_a_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--write-nearby` keeps the costs and the trees, and `fitted` leaves out what came after."""
    monkeypatch.setattr(fit, "files", lambda: [pairs_of_a_file])
    monkeypatch.setattr(fit, "file_of", lambda name: tmp_path / f"{name}.npz")
    source = Path(cost_model.__file__).read_bytes(), trees(MODEL)
    assert fit.main(["--write-nearby"]) == 0
    assert (Path(cost_model.__file__).read_bytes(), trees(MODEL)) == source
    every, fitted = fit.read(), fit.read(fitted=True)
    assert 0 < len(fitted.times) < len(every.times)
    with np.load(tmp_path / f"{MODEL}.npz") as file:
        kept = every.over_best < math.log(fit.KEPT)
        assert np.array_equal(file["places"], every.places[kept].astype(np.float16))


@pytest.fixture
def pairs_of_a_file(tmp_path: Path) -> Path:
    """A file of the first problems of an H200's, and one of a later run."""
    first, *lines = fit.TIMES.read_text(encoding="utf-8").splitlines(keepends=True)
    head, late = json.loads(first), json.loads(lines[2])
    file = tmp_path / fit.TIMES.name
    late["card"] = head[fit.FITTED_RUNS] + 1
    head = json.dumps(head) + "\n"
    file.write_text("".join((head, *lines[:2], json.dumps(late) + "\n")), encoding="utf-8")
    return file


def test_trees_find_steps_of_several_features() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (4000, 4))
    y = 0.3 * (x[:, 0] > 0.5) * (x[:, 1] > 0.25) - 0.2 * (x[:, 2] > 0.75)
    found = grown(x, y, np.ones(len(x)))
    others = rng.uniform(0, 1, (500, 4))
    steps = 0.3 * (others[:, 0] > 0.5) * (others[:, 1] > 0.25) - 0.2 * (others[:, 2] > 0.75)
    assert np.sqrt(((found.predict(others) - steps) ** 2).mean()) < 0.04
    assert np.ptp(found.predict(np.full((1, 4), 9.0)) - found.predict(np.full((1, 4), 1.0))) == 0


def test_only_problems_that_are_for_fitting_were_measured() -> None:
    reported = any_shapes.reported().keys()
    rows = [row for file in fit.files() for row in fit.measured_rows(file)[1]]
    names = {f"{r['m']}x{r['n']}x{r['k']} {r['pass']} {r.get('dtype', 'bf16')}" for r in rows}
    fitted = {e.name for dtype in ("bf16", "e4m3") for e in corpus(dtype) if e.fits}
    assert len(rows) > 2000 and len(names & fitted) > 200 and not names & reported
