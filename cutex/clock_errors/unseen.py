"""python -m cutex.clock_errors.unseen: the clock on sampled kernels (see --help).

They are pairs of a problem and a config, sampled from those that were measured for the choice of
tiles (results/configs), M from 1 to 16384. Their times are microseconds of short runs in turns,
launch included, at a clock that is not known: with kernels that the power limit slows down it is up
to 10 % above the predicted one.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cutex.bench.clock import time_stage
from cutex.bench.progress import progress
from cutex.clock_errors.rows import Summary, board
from cutex.command import Parser, answered
from cutex.errors import BadOption
from cutex.fit.costs import dtype_of, measured_rows
from cutex.problem.gemm import GemmProblem
from cutex.problem.stage import stage

if TYPE_CHECKING:
    from cutex.kernels.gemm.sm90.config import Sm90Config

LARGEST = 4e11  # FLOPs
SLOWEST = 1.3  # times the best config that was measured of the same problem


@dataclass(frozen=True)
class SampledKernel:
    """One pair, and its time measured and predicted."""

    problem: GemmProblem
    config: Sm90Config
    measured_us: float
    predicted_us: float
    binds: str

    @property
    def error(self) -> float:
        return math.log(self.predicted_us / self.measured_us)

    @property
    def outside(self) -> bool:
        """Whether tiles reach far out of the operand that is cut into few."""
        m, n = self.config.computed(self.problem)
        sides = ((m, self.config.tile_m), (n, self.config.tile_n))
        return any(-size % tile > tile / 20 for size, tile in sides if size < 4 * tile)


KINDS: dict[str, Callable[[SampledKernel], bool]] = {
    "all": lambda d: True,
    "K split": lambda d: d.config.split_k > 1,
    "K split, loads shared": lambda d: (
        d.config.split_k > 1 and d.config.cluster_m * d.config.cluster_n > 1
    ),
    "rows outside of an operand": lambda d: d.config.split_k == 1 and d.outside,
    "one round of tiles": lambda d: d.config.one_tile,
    "ping-pong": lambda d: d.config.pingpong,
    "bound by the tensor core": lambda d: d.binds == "tensor core",
}


def sample(seed: int, count: int) -> Iterator[tuple[GemmProblem, Sm90Config, float]]:
    """`count` pairs and their microseconds, sampled by `seed`."""
    configs, rows = measured_rows()
    rng = random.Random(seed)
    rows = [r for r in rows if r["pass"] == "forward" and dtype_of(r) == "bf16"]
    rows = [r for r in rows if 2 * r["m"] * r["n"] * r["k"] < LARGEST]
    every = [
        (r["m"], r["n"], r["k"], configs[int(i)], us)
        for r in rows
        for i, us in r["us"].items()
        if us <= SLOWEST * min(r["us"].values()) and configs[int(i)].workspace is None
    ]
    if not 0 < count <= len(every):
        raise BadOption(f"--count {count}: from 1 to {len(every)} kernels can be sampled")
    for m, n, k, config, us in rng.sample(every, count):
        yield GemmProblem(m, n, k), config, us


def found(seed: int, count: int) -> list[SampledKernel]:
    """The sampled pairs with their predicted times; a pair takes some 3 s."""
    top, gpu = stage("gemm", "sm_90a", 9), board()
    sampled = []
    with progress("kernels are timed", count) as step:
        for problem, config, us in sample(seed, count):
            one = replace(top, default=config, chooses=False)
            report = time_stage(problem, one, gpu)
            sampled.append(SampledKernel(problem, config, us, report.us, report.binds))
            step()
    return sampled


def table(sampled: Iterable[SampledKernel]) -> str:
    """Markdown: the errors of microseconds by kind of kernel."""
    every = list(sampled)
    lines = [
        "| | kernels | mean % | median % | nine of ten % | largest % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, of_kind in KINDS.items():
        if errors := [d.error for d in every if of_kind(d)]:
            count, *others = str(Summary.of(errors)).split(" | ")
            mean = f"{100 * sum(errors) / len(errors):+.1f}"
            lines.append(f"| {name} | {' | '.join([count, mean, *others])} |")
    return "\n".join(lines)


@answered
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m cutex.clock_errors.unseen",
        description="Hold the simulator's clock against GEMM kernels sampled from those whose time "
        "was measured on H200s for the choice of tiles.",
    )
    parser.add_argument("--count", type=int, default=100, help="kernels, 3 s each; default: 100")
    parser.add_argument("--seed", type=int, default=0, help="of the sample; default: 0")
    args = parser.parse_args(argv)
    print(table(found(args.seed, args.count)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
