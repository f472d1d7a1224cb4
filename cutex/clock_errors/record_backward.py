"""Our records of the backward on a B200, which `python -m cutex.clock_errors.backward` times.

    python -m cutex.clock_errors.record_backward [HEAD_DIM ...]

compiles the chosen kernels of those head dims of its cases, or of all, simulates a CTA of each on 6
and on 14 blocks of queries, and writes these records over ours in its file. FlashAttention-4's stay
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutex.bench.clock import launched
from cutex.clock_errors.backward import BLOCK, CASES, STEPS, TRACES, WALKED, Case, key
from cutex.command import Parser, answered, refuse
from cutex.kernels.attention.backward import stages
from cutex.problem.attention.backward import BackwardProblem
from cutex.sim.host.capture import HostFunction
from cutex.sim.timing import stored
from cutex.sim.timing.lengths import Lengths
from cutex.sim.timing.stored import Recorded
from cutex.sim.timing.trace import Few, Traced, machine_code

HEADS = 3  # at least WALKED: the first tiles are those of the first keys of one head each


class Walked(Few):
    """Simulates one CTA of each launch; where CTAs take over others' tiles, it takes WALKED."""

    def tiles_of(self, clusters: int, at_once: int) -> list[int]:
        return list(range(min(clusters, WALKED)))


def record(case: Case, causal: bool, steps: int, heads: int) -> list[Traced]:
    """The records of the launches of a backward of `steps` blocks of queries."""
    tokens = steps * BLOCK
    problem = BackwardProblem(
        1, tokens, tokens, heads, heads, head_dim=case.head_dim, head_dim_v=case.head_dim_v,
        causal=causal,
    )  # fmt: skip

    def traced(
        host: HostFunction, programs: Any, arguments: list[Any], regions: Any
    ) -> list[Traced]:
        few = Walked(programs, regions, machine_code(host), 0.0)
        host(arguments, few.record_only)
        return few.traced

    return launched(problem, stages("sm_100a")[-1].fitted(problem), traced)


def records(case: Case, causal: bool) -> dict[str, Traced | Lengths]:
    """Our records of a case, by name: of the launches before and behind the main one those of one
    head."""
    found: dict[str, Traced | Lengths] = {}
    for steps in STEPS:
        found[key("cutex", case, causal, f"main {steps}")] = record(case, causal, steps, HEADS)[1]
    before, _, behind = record(case, causal, STEPS[1], 1)
    return found | {
        key("cutex", case, causal, number): one for number, one in enumerate((before, behind))
    }


@answered
def main(argv: Sequence[str] | None = None) -> int:
    known = {case.dims: case for case in CASES}
    parser = Parser(
        prog="python -m cutex.clock_errors.record_backward",
        description="Record the traces of attention's backward kernels that the clock is held "
        "against.",
    )
    parser.add_argument("dims", nargs="*", metavar="HEAD_DIM", help=f"{', '.join(known)}")
    dims: list[str] = parser.parse_args(argv).dims
    for name in dims:
        if name not in known:
            return refuse(f"{name}: takes {', '.join(known)}")
    kept = stored.load(TRACES)
    found: dict[str, Recorded] = {name: kept[name] for name in kept}
    for case in (known[name] for name in dims or known):
        for causal in (False, True):
            found |= records(case, causal)
            print(case.dims, "causal" if causal else "full", flush=True)
    stored.save(found, TRACES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
