"""python -m cutex.fit.costs: fit the cost model to measured times (see --help).

The costs minimise the weighted squares of the errors' logarithms (Gauss-Newton steps in logarithms
of the costs, regularised towards the current ones; errors above LARGE count linearly). Configs
close to the best of their problem weigh most: it is between them that the model chooses.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cutex.arch import BOARDS, Arch
from cutex.arch import arch as arch_named
from cutex.command import Parser, answered
from cutex.dtypes import DTYPES as ELEMENTS
from cutex.errors import BadOption
from cutex.fit.trees import grown
from cutex.kernels.gemm.choose import sizes_class
from cutex.kernels.gemm.sm90 import cost_model
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.cost_model import ROUND, WALK, Costs, Counts, columns, count, modelled
from cutex.measured.nearby import estimate, file_of
from cutex.measured.trees import Trees, trees
from cutex.problem import any_shapes
from cutex.problem.gemm import GemmProblem
from cutex.whole_file import write_whole

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "results" / "configs"
TIMES = FOLDER / "gemm-nvidia-h200.jsonl"
MAJORS = {"forward": (True, True), "dgrad": (True, False), "wgrad": (False, False)}
FITTED_RUNS = "fitted_runs"  # later ones are neighbours only (--write-nearby)
# costs that no measured pair depends on
FIXED = {"WALK": {"paired", "even_sm_gbs", "waiting_us"}, "ROUND": set()}
CLOSE = (
    0.25  # logarithm of a time over the best of its problem, at which a weight has fallen to 1/e
)
LARGE = 0.08
FEW_OF_BOARD = 4.0  # weight of a pair on a board with few
DRAWN = 0.1  # weight of the regularisation towards the current costs
ROWS = (1, 17, 65, 129, 385, 1025, 1 << 30)
KEPT = 1.5  # pairs slower than this multiple of their problem's best do not affect the choice
FOLDS = 5
PASSES = 12


class Pairs(NamedTuple):
    """Measured pairs of a problem and a config: arrays with one element per pair."""

    counts: Counts
    places: np.ndarray  # (PAIR, DIMENSION)
    times: np.ndarray  # logarithms of microseconds
    over_best: np.ndarray  # logarithms of times over the best of the same problem on the same card
    over_others: np.ndarray  # logarithms of times over the best of other libraries
    problem: np.ndarray  # an index: the same for all cards
    config: np.ndarray
    chosen_from: np.ndarray  # whether the config is a candidate, not only one that was


def measured_rows(
    file: Path = TIMES, fitted: bool = False
) -> tuple[list[Sm90Config], list[dict[str, Any]]]:
    """The file's configs, and its rows except those of problems that are only for reporting.
    `fitted`: only those of the runs that costs and trees are fitted to (`write`)."""
    head, *rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    if fitted:
        rows = [r for r in rows if r["card"] <= head.get(FITTED_RUNS, r["card"])]
    reported = {
        (*e.problem.mnk, e.problem.direction, e.problem.dtype)
        for e in any_shapes.reported().values()
    }
    rows = [r for r in rows if problem_of(r) not in reported]
    return [Sm90Config.from_row(row) for row in head["configs"]], rows


def problem_of(row: dict[str, Any]) -> tuple[int, int, int, str, str]:
    """M, N, K in elements, the pass and the dtype of a measured row."""
    return row["m"], row["n"], row["k"], row["pass"], dtype_of(row)


def dtype_of(row: dict[str, Any]) -> str:
    """The dtype of A and B in a measured row."""
    return row.get("dtype", "bf16")


def sizes_of(row: dict[str, Any]) -> tuple[int, int, int]:
    """M, N, and K in units of 2 bytes, of a measured row."""
    return row["m"], row["n"], row["k"] * ELEMENTS[dtype_of(row)].bits // 16


def files() -> list[Path]:
    """The files of measured times, one for each board."""
    return sorted(FOLDER.glob("gemm-*.jsonl"))


def board_of(file: Path) -> Arch:
    """The facts of the board that the times of `file` were measured on."""
    with file.open(encoding="utf-8") as lines:
        head = json.loads(next(lines))
    return BOARDS[head["board"]] if "board" in head else arch_named("sm_90a")


def read(times: Sequence[Path] | None = None, fitted: bool = False) -> Pairs:
    """All pairs of the files whose config is, or was, a candidate for the problem; `fitted` as of
    measured_rows."""
    found: list[tuple[Any, ...]] = []
    numbers: dict[Any, int] = {}
    if times is None and not (times := files()):
        raise BadOption(f"{FOLDER}/ is not here: a clone of cutex has the times")
    for file in times:
        (configs, rows), on = measured_rows(file, fitted), board_of(file)
        for row in rows:
            found += _pairs(row, configs, on, numbers)
    counts, places, *rest = zip(*found, strict=True)
    return Pairs(columns(counts), np.array(places), *map(np.array, rest))


def _pairs(
    row: dict[str, Any], configs: Sequence[Sm90Config], on: Arch, numbers: dict[Any, int]
) -> list[tuple[Any, ...]]:
    """The fields of the pairs of one measured row, on the board `on`; `numbers` are the problems'
    so far."""
    found = []
    majors, bits = MAJORS[row["pass"]], ELEMENTS[dtype_of(row)].bits
    problem = GemmProblem(*sizes_class(sizes_of(row), majors))  # as the choice sees it
    name = row["m"], *problem.mnk, row["pass"], bits, on.board
    number = numbers.setdefault(name, len(numbers))
    allowed = {tiling(c) for c in cost_model.candidates(problem, on, majors, fitted=True)}
    chosen_from = {tiling(c) for c in cost_model.candidates(problem, on, majors)}
    times = {int(i): us for i, us in row["us"].items() if tiling(configs[int(i)]) in allowed}
    for i, us in times.items():
        spent = count(configs[i], problem, on, 1, majors)
        ratios = us / min(times.values()), us / min(row["others"].values())
        where = cost_model.place(configs[i], problem, spent, majors, bits)
        now = tiling(configs[i]) in chosen_from
        found.append((spent, where, math.log(us), *map(math.log, ratios), number, i, now))
    return found


# a config's fields but for its numbers of slots, which tiles alone decide
geometry = attrgetter(
    *(f.name for f in fields(Sm90Config) if f.name not in ("num_stages", "epi_stages", "epi_n"))
)


def tiling(config: Sm90Config) -> tuple[Any, ...]:
    """The geometry of `config`, however its tiles are loaded and stored, and in whatever order."""
    usual = Sm90Config()
    group, along = usual.raster_group, usual.raster_along
    ordered = replace(config, raster_group=group, raster_along=along, by_gpc=False)
    return geometry(replace(ordered, box_rows=0, in_turns=False))


@dataclass(frozen=True)
class Model:
    """The costs of both kinds of configs: one round of tiles, and persistent CTAs."""

    round: Costs = ROUND
    walk: Costs = WALK

    def errors(self, pairs: Pairs) -> np.ndarray:
        """The logarithms of measured over modelled time, one per pair."""
        return pairs.times - np.log(modelled(pairs.counts, self.round, self.walk))

    def values(self) -> dict[tuple[str, str], float]:
        """The logarithms of the fitted costs, by kind and name."""
        both = {"ROUND": asdict(self.round), "WALK": asdict(self.walk)}
        return {
            (kind, name): math.log(value)
            for kind, costs in both.items()
            for name, value in costs.items()
            if name not in FIXED[kind]
        }

    def with_values(self, values: dict[tuple[str, str], float]) -> Model:
        of = {kind: {n: math.exp(v) for (k, n), v in values.items() if k == kind} for kind in FIXED}
        return Model(replace(self.round, **of["ROUND"]), replace(self.walk, **of["WALK"]))


def part(pairs: Pairs, which: np.ndarray) -> Pairs:
    """The pairs that the mask `which` selects."""
    counts = Counts(*(x[which] for x in pairs.counts))
    return Pairs(counts, *(x[which] for x in pairs[1:]))


def fitted(start: Model, pairs: Pairs, passes: int = PASSES) -> Model:
    """The model with the least weighted error on `pairs`."""
    names = list(start.values())
    first = at = np.array(list(start.values().values()))
    weights = np.exp(-((pairs.over_best / CLOSE) ** 2)) + 0.03

    def errors(values: np.ndarray) -> np.ndarray:
        return start.with_values(dict(zip(names, values, strict=True))).errors(pairs)

    def cost(values: np.ndarray, e: np.ndarray) -> float:
        size = np.abs(e)
        squares = np.where(size < LARGE, e * e / 2, LARGE * (size - LARGE / 2))
        return float((weights * squares).sum() + DRAWN * ((values - first) ** 2).sum() / 2)

    e, damping = errors(at), 1e-3
    least = cost(at, e)
    for _ in range(passes):
        steps = 1e-4 * np.eye(len(at))
        slopes = np.stack([(errors(at + step) - e) / 1e-4 for step in steps], axis=1)
        heavy = weights * np.minimum(1, LARGE / np.maximum(np.abs(e), 1e-9))
        normal = slopes.T @ (slopes * heavy[:, None]) + DRAWN * np.eye(len(at))
        down = slopes.T @ (heavy * e) + DRAWN * (at - first)
        for _ in range(8):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), down)
            there = at - move.clip(-0.5, 0.5)
            errors_there = errors(there)
            if (now := cost(there, errors_there)) < least:
                at, e, least, damping = there, errors_there, now, damping / 3
                break
            damping *= 4
        else:
            break
    return start.with_values(dict(zip(names, at, strict=True)))


def of_features(pairs: Pairs, model: Model) -> np.ndarray:
    """The features of each pair's error (cost_model.features)."""
    of = cost_model.terms(pairs.counts, model.round, model.walk)
    return cost_model.features(pairs.places, pairs.counts, of)


def trees_of(model: Model, pairs: Pairs) -> Trees:
    """The trees of the model's errors."""
    weights = np.exp(-((pairs.over_best / CLOSE) ** 2)) + 0.05
    weights *= np.where(pairs.counts.memory < 1, FEW_OF_BOARD, 1)
    return grown(of_features(pairs, model), model.errors(pairs).clip(-0.6, 0.6), weights)


def known(model: Model, trees: Trees, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """The places, and the errors that the trees leave, that are kept in cutex/measured."""
    kept = pairs.chosen_from & (pairs.over_best < math.log(KEPT))
    left = model.errors(pairs) - trees.predict(of_features(pairs, model))
    return pairs.places[kept].astype(np.float16), left[kept].clip(-1, 1).astype(np.float16)


def held_out(model: Model, pairs: Pairs, passes: int = 4) -> np.ndarray:
    """The predicted logarithm of each pair's time, by cross-validation: a model fitted on the other
    folds, corrected by their errors nearby."""
    folds = np.random.default_rng(0).integers(0, FOLDS, pairs.problem.max() + 1)[pairs.problem]
    expected = np.empty_like(pairs.times)
    for fold in range(FOLDS):
        others, here = part(pairs, folds != fold), folds == fold
        of_fold = fitted(model, others, passes)
        trees = trees_of(of_fold, others)
        places, errors = known(of_fold, trees, others)
        places, errors = places.astype(np.float32), errors.astype(np.float32)
        for some in np.array_split(np.flatnonzero(here), 8):
            near = estimate(pairs.places[some].astype(np.float32), places, errors)
            here_pairs = part(pairs, some)
            left = trees.predict(of_features(here_pairs, of_fold))
            expected[some] = pairs.times[some] - of_fold.errors(here_pairs) + left + near
    return expected


def judge(pairs: Pairs, expected: np.ndarray) -> str:
    """A summary of how good a choice among each problem's measured configs is, if made by the
    predictions `expected`."""
    losses, ratios, rows = [], [], []
    for number in range(pairs.problem.max() + 1):
        here = np.flatnonzero(pairs.problem == number)
        of_config = {c: here[pairs.config[here] == c] for c in np.unique(pairs.config[here])}
        if len(of_config) < 2:
            continue
        means = {c: pairs.over_others[i].mean() for c, i in of_config.items()}
        taken = min(of_config, key=lambda c: expected[of_config[c]].mean())
        losses.append(means[taken] - min(means.values()))
        ratios.append(-means[taken])
        rows.append(round(2 ** pairs.places[here[0]][0]))
    lost, ratio = np.exp(losses) - 1, np.exp(ratios)
    by_rows = [
        f"{least} {np.exp(np.mean(of)):.3f}"
        for least, most in pairwise(ROWS)
        if (of := [r for r, m in zip(ratios, rows, strict=True) if least <= m < most])
    ]
    return (
        f"{len(lost)} problems: {math.exp(np.mean(ratios)):.4f} times the best of the others, "
        f"{(ratio < 0.97).mean():.1%} below 0.97, {(ratio < 0.9).mean():.1%} below 0.90; "
        f"{lost.mean():.2%} lost to the best measured, {(lost > 0.05).mean():.1%} above 5 %\n"
        f"by the least M: {', '.join(by_rows)}"
    )


def write_nearby(model: Model, trees: Trees, pairs: Pairs) -> None:
    """Write the places, and the errors that are left there, into cutex/measured."""
    places, errors = known(model, trees, pairs)
    with file_of(cost_model.MEASURED).open("wb") as file:
        np.savez_compressed(file, places=places, errors=errors)


def write(model: Model, pairs: Pairs) -> None:
    """Write the costs into cost_model.py, trees, places and errors into cutex/measured, and into
    the head of each file of times the number of its last run, as FITTED_RUNS."""
    trees = trees_of(model, pairs)
    trees.save(cost_model.MEASURED)
    write_nearby(model, trees, pairs)
    for file in files():
        first, *rows = file.read_text(encoding="utf-8").splitlines(keepends=True)
        head = json.loads(first) | {FITTED_RUNS: max(json.loads(row)["card"] for row in rows)}
        write_whole(file, "".join((json.dumps(head) + "\n", *rows)))
    source = Path(cost_model.__file__)
    text = source.read_text(encoding="utf-8")
    for name, costs in (("ROUND", model.round), ("WALK", model.walk)):
        lines = "".join(f"    {field}={value!r},\n" for field, value in asdict(costs).items())
        text = re.sub(
            rf"{name} = Costs\(\n(.*?\n)??\)\n", f"{name} = Costs(\n{lines})\n", text, flags=re.S
        )
    write_whole(source, text)


def rounded(model: Model) -> Model:
    """`model` with costs rounded to three digits."""
    both = ({n: float(f"{v:.3g}") for n, v in asdict(x).items()} for x in (model.round, model.walk))
    return Model(*(Costs(**costs) for costs in both))


@answered
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m cutex.fit.costs",
        description="Fit the cost model of Hopper's GEMM to results/configs, and say how good its "
        "choices are on problems that it was not fitted on.",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="change cost_model.py and cutex/measured, not only look",
    )
    parser.add_argument(
        "--write-nearby",
        action="store_true",
        help="keep the costs and the trees, and add what they leave of pairs timed since: the "
        "choice changes only near them",
    )
    args = parser.parse_args(argv)
    pairs = read()
    if args.write_nearby:
        write_nearby(Model(), trees(cost_model.MEASURED), pairs)
        return 0
    print(f"{len(pairs.times)} pairs; held out by problem, in {FOLDS} folds:")
    print(judge(pairs, held_out(Model(), pairs)))
    if args.write:
        write(rounded(fitted(Model(), pairs)), pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
