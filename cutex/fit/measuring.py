"""python -m cutex.fit.measuring: time Hopper's configs for the fit (see --help).

  python -m cutex.fit.measuring --propose 300 > problems.txt       # what is least known
  python -m cutex.fit.measuring problems.txt --out timed.jsonl     # on a GPU
  python -m cutex.fit.measuring --merge timed.jsonl                # into results/configs
  python -m cutex.fit.costs --write                   # --write-nearby: choices change near them
  python -m cutex.fit.shipping --write

A line of problems.txt is the name of a problem as cutex.sweep --list prints it, "MxNxK pass dtype",
and after it, if others are to be timed than what the model ranks first, a JSON list of configs.
Problems of the reporting half are refused: what is fitted on them cannot be judged by them.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cutex.arch import arch, local_arch
from cutex.bench import timing
from cutex.bench.progress import progress
from cutex.command import Parser, answered, in_clone, writable
from cutex.errors import BadOption
from cutex.fit.costs import FOLDER, TIMES, files, geometry, problem_of
from cutex.fit.proposals import ARCH, arranged, proposals
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.ops import building
from cutex.ops.device import launcher, other_board
from cutex.ops.matmul.plan import candidates, config_for, fitted, job, kernel_for
from cutex.ops.matmul.tuner import Timer, time_on_gpu
from cutex.problem import any_shapes
from cutex.problem.any_shapes import DTYPES
from cutex.problem.layer import PASSES, PEERS, LayerProblem
from cutex.results import slug

SAMPLING = timing.Sampling(rounds=7, warm_up_seconds=0.02, sample_us=1500.0, eager_calls=1)
NAME = re.compile(r"(\d+)x(\d+)x(\d+) (\w+) (\w+)\s*(\[.*\])?$")
USUAL = asdict(Sm90Config())


@dataclass(frozen=True)
class TimingRequest:
    """A problem and the configs to time; empty: the model's top candidates."""

    name: str
    problem: LayerProblem
    configs: tuple[Sm90Config, ...]

    @property
    def row(self) -> dict[str, Any]:
        m, n, k = self.problem.mnk
        row = {"m": m, "n": n, "k": k, "pass": self.problem.direction}
        return row if self.problem.dtype == "bf16" else row | {"dtype": self.problem.dtype}


def asked(file: Path) -> list[TimingRequest]:
    """The problems that the lines of `file` name. Raises BadOption for a line that is none."""
    reported = any_shapes.reported()
    found = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = NAME.match(line.strip())
        if match is None or match[4] not in PASSES or match[5] not in DTYPES:
            raise BadOption(f"{file} line {number}: {line!r} is no 'MxNxK pass dtype'")
        name = " ".join(line.split()[:3])
        if name in reported:
            raise BadOption(f"{file} line {number}: {name} is of the half that is for reporting")
        try:
            rows = json.loads(match[6] or "[]")
            configs = tuple(Sm90Config.from_row(row) for row in rows)
            found[name] = TimingRequest(name, _problem(*match.group(1, 2, 3, 4, 5)), configs)
        except (ValueError, TypeError) as error:
            raise BadOption(f"{file} line {number}: {error}") from None
    if not found:
        raise BadOption(f"{file} names no problem")
    return list(found.values())


def _problem(m: str, n: str, k: str, direction: str, dtype: str) -> LayerProblem:
    sizes = int(m), int(n), int(k)
    tokens, out, into = {
        "forward": sizes,
        "dgrad": (sizes[0], sizes[2], sizes[1]),
        "wgrad": (sizes[2], sizes[0], sizes[1]),
    }[direction]
    return LayerProblem(tokens, out, into, direction, dtype)


def configs_of(one: TimingRequest, first: int) -> list[GeneralConfig]:
    """The kernels to time: those asked for that can run the problem, or today's choice and the
    `first` of the ranking."""
    found, calls = arranged(*one.problem.inputs("meta"), *one.problem.outputs("meta"))
    if one.configs:
        fitting = [fitted(tiles, calls) for tiles in one.configs]
        return [c for c in fitting if c is not None]
    chosen = config_for(found.sizes, (found.a, found.b, found.out), found.ops, ARCH)
    return list(dict.fromkeys((chosen, *islice(candidates(calls), first))))


def measured(
    one: TimingRequest,
    configs: Sequence[GeneralConfig],
    device: str = "cuda",
    timer: Timer = time_on_gpu,
) -> dict[str, Any]:
    """The row of a problem: microseconds of each config and of cuBLAS, in turns. Raises
    RuntimeError for a config whose result is wrong, and ValueError for a problem that the general
    kernel does not read as it is."""
    problem = one.problem
    copies = timing.copies_to_rotate(problem.bytes, arch(ARCH).l2_bytes, "cold")
    operands = [(*problem.inputs(device, copy=i), *problem.outputs(device)) for i in range(copies)]
    expected: torch.Tensor | None = None
    variants: dict[str, Any] = {"cublas": PEERS["cublas"](problem)}
    found, _ = arranged(*operands[0])
    if not found.as_given or found.a.fold:
        raise ValueError(f"{one.name}: TMA cannot step through its operands")
    for i, config in enumerate(configs):
        launch = launcher(kernel_for(config, ARCH), found.tensors, config.tiles.workspace)
        *_, out = operands[0]
        launch(*operands[0])
        if expected is None:
            if not (verdict := problem.check(*operands[0])).ok:
                raise RuntimeError(f"{one.name}: {config.tiles}: {verdict.message}")
            expected = out.clone()
        # NOTE: only the order of sums differs: two units of the largest's rounding to 8 bits
        elif not float((out - expected).abs().max()) <= float(expected.abs().max()) / 64:
            raise RuntimeError(f"{one.name}: {config.tiles} has another result than the first")
        out.fill_(torch.nan)
        variants[str(i)] = launch
    us = {name: round(us, 3) for name, us in timer(variants, operands, SAMPLING).items()}
    others = {"cublas": us.pop("cublas")}
    board = other_board(ARCH)
    of_board = {"board": board} if board else {}
    return (
        one.row
        | of_board
        | {"others": others, "us": us, "configs": [differing(c.tiles) for c in configs]}
    )


def differing(tiles: GemmConfig) -> dict[str, Any]:
    """The fields of `tiles` that are not the defaults."""
    return {f: v for f, v in asdict(tiles).items() if v != USUAL[f]}


def measure(problems: Sequence[TimingRequest], first: int, out: Path, seconds: float | None) -> int:
    """Build the kernels of `problems`, time them, and append a row each to `out`. Return how many
    failed, of which stderr says why."""
    failed = 0
    configs = {one.name: configs_of(one, first) for one in problems}
    build(configs.values())
    begin = time.monotonic()
    with (
        progress("problems are timed", len(problems)) as step,
        out.open("a", encoding="utf-8") as file,
    ):
        for i, one in enumerate(problems):
            if seconds is not None and time.monotonic() - begin > seconds:
                print(f"stopped after {seconds:g} s; {len(problems) - i} are left", file=sys.stderr)
                break
            try:
                row = measured(one, configs[one.name])
            except Exception as error:  # NOTE: one problem must not cost those behind it
                failed += 1
                print(f"{one.name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
            else:
                print(json.dumps(row), file=file, flush=True)
            step()
    return failed


def build(configs: Iterable[Sequence[GeneralConfig]]) -> list[Path]:
    """Compile the configs in parallel, and return the folders of the kernels."""
    all_of_them = list(dict.fromkeys(c for of_problem in configs for c in of_problem))
    with progress("kernels are built", len(all_of_them)) as step:
        built = building.build([job(c, ARCH) for c in all_of_them], ended=step)
    done = [c for c, ok in zip(all_of_them, built, strict=True) if ok]
    return [kernel_for(c, ARCH).object_path.parent for c in done]


def times_of(file: Path) -> Path:
    """The file in results/configs of the board on which `measure` wrote `file`, a new one if there
    is none."""
    board = next((row.get("board", "") for row, _ in timed(file)), "")
    for times in files():
        with times.open(encoding="utf-8") as lines:
            if json.loads(next(lines)).get("board", "") == board:
                return times
    times = FOLDER / f"gemm-nvidia-{slug(board)}.jsonl"
    about = f"microseconds of the general kernel's configs, and of others, on {board}"
    times.write_text(
        json.dumps({"about": about, "board": board, "configs": []}) + "\n", encoding="utf-8"
    )
    return times


def merge(file: Path, times: Path = TIMES) -> int:
    """Append the rows of one run in `file` to results/configs, as those of a further card; return
    how many. Raises BadOption, and adds none, for lines that are no such rows or are there
    already."""
    head, *rows = map(json.loads, times.read_text(encoding="utf-8").splitlines())
    numbers = {geometry(Sm90Config.from_row(row)): i for i, row in enumerate(head["configs"])}
    known = {_identity(row) for row in rows}
    card = max((row["card"] for row in rows), default=0) + 1
    added = []
    for row, tiles in timed(file):
        if (board := row.pop("board", "")) != head.get("board", ""):
            raise BadOption(f"{file}: times on {board or 'an H200'} do not belong in {times.name}")
        for one in tiles:
            if geometry(one) not in numbers:
                numbers[geometry(one)] = len(head["configs"])
                head["configs"].append(differing(one))
        us = {str(numbers[geometry(tiles[int(i)])]): t for i, t in row["us"].items()}
        added.append({"card": card} | row | {"us": us})
        if _identity(added[-1]) in known:
            m, n, k, direction, dtype = problem_of(row)
            raise BadOption(f"{file}: {m}x{n}x{k} {direction} {dtype} is in {times.name} already")
    text = "".join(json.dumps(row) + "\n" for row in (head, *rows, *added))
    scratch = times.with_suffix(".tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(times)
    return len(added)


def timed(file: Path) -> Iterator[tuple[dict[str, Any], list[Sm90Config]]]:
    """The rows that `measure` wrote, without their configs, and these. Raises BadOption for a line
    that is none."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            tiles = [Sm90Config.from_row(fields) for fields in row.pop("configs")]
            sizes = all(isinstance(x, int) for x in problem_of(row)[:3])
            times = [*row["us"].values(), *row["others"].values()]
            if not sizes or not all(isinstance(t, float) and t > 0 for t in times):
                raise ValueError("sizes are whole numbers, times numbers above 0")
            if not row["others"] or {*row["us"]} != {str(i) for i in range(len(tiles))}:
                raise ValueError("it has no time for each config and another library")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadOption(f"{file} line {number} is no row of a timed problem: {error}") from None
        yield row, tiles


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return *problem_of(row), *sorted(row["us"].items())


def _parser() -> Parser:
    p = Parser(
        prog="python -m cutex.fit.measuring",
        description="Time configs of Hopper's general GEMM kernel beside cuBLAS on this GPU, for "
        "the fit of the cost model that chooses among them.",
    )
    p.add_argument("problems", nargs="?", metavar="FILE", help="a problem a line: MxNxK pass dtype")
    p.add_argument("--first", type=int, default=6, metavar="N", help="configs each; default: 6")
    p.add_argument(
        "--propose",
        type=int,
        metavar="N",
        help="time nothing: print N problems of the fitting half, and for each the configs that "
        "may be faster than the choice and were not timed",
    )
    p.add_argument("--seed", type=int, default=0, help="of --propose; default: 0")
    p.add_argument("--out", default="timed.jsonl", metavar="FILE", help="default: timed.jsonl")
    p.add_argument("--seconds", type=float, metavar="S", help="stop after so many")
    p.add_argument(
        "--preflight",
        action="store_true",
        help="time nothing: compile the kernels and print where they are; needs no GPU",
    )
    p.add_argument("--merge", metavar="FILE", help="add the rows of FILE to results/configs")
    return p


@answered
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.merge:
        in_clone(TIMES)
        times = times_of(Path(args.merge))
        print(f"{merge(Path(args.merge), times)} rows added to {times}")
        return 0
    if args.first < 1 or (args.propose is not None and args.propose < 1):
        raise BadOption("--first and --propose take numbers of at least 1")
    if args.seconds is not None and not args.seconds > 0:
        raise BadOption(f"--seconds {args.seconds:g}: a number above 0 is needed")
    if args.propose:
        in_clone(TIMES)
        for one in proposals(args.propose, args.seed, args.first):
            tiles = json.dumps([differing(c) for c in (one.choice, *one.others)])
            print(f"{one.entry.name} {tiles}")
        return 0
    if not args.problems:
        raise BadOption("a FILE of problems is needed, or --propose")
    problems = asked(Path(args.problems))
    if args.preflight:
        for folder in build(configs_of(one, args.first) for one in problems):
            print(folder)
        return 0
    here = local_arch()
    if here is None or here.name != ARCH:
        raise BadOption("there is no Hopper GPU here; --preflight needs none")
    return 1 if measure(problems, args.first, writable("--out", args.out), args.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
