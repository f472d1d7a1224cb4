"""python -m cutex.roofline: the limit that binds a problem on a GPU, and its shortest possible
time.

A limit is stated (the vendor's data sheet) or reached (measured by somebody). A kernel is at best
as fast as its slowest limit allows; the rest of its time is its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cutex.arch import BOARDS, Arch, arch
from cutex.command import Parser, answered
from cutex.problem import DEFAULT_OP, OPS, Problem, problem_class
from cutex.problem.work import FMA, LEVELS, MUFU, TENSOR
from cutex.results import Result, folder_given, gbs, notice, read_all, tflops


@dataclass(frozen=True)
class Ceiling:
    """A rate that was reached, and the kernel that reached it."""

    rate: float
    how: str


@dataclass(frozen=True)
class Gpu:
    """A board: its stated limits, and the rates reached on it, in TFLOPS and GB/s."""

    facts: Arch
    reached_tflops: Ceiling | None = None  # of 16-bit MMAs, measured on Gaussian data
    reached_gbs: Ceiling | None = None

    @property
    def name(self) -> str:
        return self.facts.board

    @property
    def num_sms(self) -> int:
        return self.facts.num_sms

    @property
    def hbm_gbs(self) -> float:
        return self.facts.hbm_gbs

    @property
    def dense_tflops(self) -> float:
        """The stated peak of 16-bit MMAs."""
        return self.facts.mma_tflops["f16"]


H100 = BOARDS["H100 80GB HBM3"]
USUAL = Path("results")  # which need not be there

GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu(
            arch("sm_100a"),
            Ceiling(1723, "published, a B200 on Modal"),
            Ceiling(5982, "a copy, published, a B200 on Modal"),
        ),
        Gpu(arch("sm_90a"), None, Ceiling(4270, "a copy, one H200")),
        Gpu(H100),
    )
}


def gpu(name: str) -> Gpu:
    """Return the GPU of that name. Raises ValueError, with one sentence, for one that cutex does
    not have."""
    try:
        return GPUS[name.lower().rstrip("!")]
    except KeyError:
        known = ", ".join(g.name for g in GPUS.values())
        raise ValueError(f"--gpu {name!r} is not one of {known}") from None


def of_device(device_name: str) -> Gpu | None:
    """The GPU for a driver's name such as "NVIDIA H200"."""
    return next((g for g in GPUS.values() if g.name in device_name.upper().split()), None)


@dataclass(frozen=True)
class Limit:
    """The least time that one resource allows, in microseconds."""

    resource: str  # a unit of cutex.problem.work
    rate: float
    unit: str  # "TFLOPS" | "GB/s" | "G/s"
    us: float
    how: str
    stated: bool


def limits(problem: Problem, on: Gpu, results: Iterable[Result] = ()) -> list[Limit]:
    """The limits of `problem`, stated ones first; rates in the ledger count as reached."""
    needs = problem.needs
    amounts = {TENSOR: (sum(needs.mma.values()), "TFLOPS", 1e6), FMA: (needs.fp32, "TFLOPS", 1e6),
               MUFU: (needs.exponentials, "G/s", 1e3)}  # fmt: skip
    amounts |= {LEVELS[level]: (n, "GB/s", 1e3) for level, n in needs.bytes.items()}
    hows = {TENSOR: "stated dense peak", MUFU: "MUFU; more if FMA pipes compute some of them"}

    def limit(resource: str, us: float, how: str, stated: bool) -> Limit:
        amount, unit, scale = amounts[resource]
        return Limit(resource, amount / us / scale, unit, us, how, stated)

    found = [limit(x, us, hows.get(x, "stated"), True) for x, us in needs.us(on.facts).items()]
    kinds = list(needs.mma)
    best = reached(on, results, kinds[0]) if len(kinds) == 1 else None
    if best is not None:
        found.append(limit(TENSOR, amounts[TENSOR][0] / best.rate / 1e6, best.how, False))
    if on.reached_gbs is not None and (traffic := needs.bytes.get("hbm")):
        rate, how = on.reached_gbs.rate, on.reached_gbs.how
        found.append(limit("memory", traffic / rate / 1e3, how, False))
    return found


def reached(on: Gpu, results: Iterable[Result], kind: str = "f16") -> Ceiling | None:
    """The highest rate of one kind of MMA that any kernel reached on Gaussian data, ours, a peer's
    or published."""
    best = on.reached_tflops if kind == "f16" else None
    for r in results:
        if r.timing is None or not r.ok or of_device(r.device_name) != on:
            continue
        if r.problem["init"] != "normal" or list(r.case.needs.mma) != [kind]:
            continue
        flops = r.case.flops
        times = [(r.timing.median_us, f"stage {r.stage}")]
        times += [(p.timing.median_us, p.name) for p in r.peers]
        for us, who in times:
            rate = tflops(flops, us)
            if best is None or rate > best.rate:
                best = Ceiling(rate, f"{who}, {r.size}, in the ledger")
    return best


def binding(found: Sequence[Limit]) -> Limit:
    """The limit that allows the least; exponentials are none (`Work`)."""
    return max((x for x in found if x.resource != MUFU), key=lambda limit: limit.us)


def waves(problem: Problem, on: Gpu) -> tuple[int, float]:
    """The tiles of the output, and the number of waves of all SMs, of which a fraction costs a
    whole one."""
    tiles = problem.grid(problem.wave_tile)
    return tiles, tiles / on.num_sms


# ---- the command


def describe(problem: Problem, on: Gpu, results: Sequence[Result] = ()) -> str:
    found = limits(problem, on, results)
    lines = [
        f"{problem.op} {problem.size} {problem.dtype} on {on.name}: "
        f"{problem.flops / 1e9:.4g} GFLOP, {problem.bytes / 1e6:.4g} MB, "
        f"{problem.flops / problem.bytes:.0f} FLOP per byte",
        "",
        f"{'limit':<14}{'rate':>14}{'at best us':>12}  from",
    ]
    bound = {binding([x for x in found if x.stated == stated]) for stated in (True, False) if
             any(x.stated == stated for x in found)}  # fmt: skip
    for x in found:
        mark = "   <- binds" if x in bound else ""
        rate = f"{x.rate:.0f} {x.unit}"
        lines.append(f"{x.resource:<14}{rate:>14}{x.us:>12.1f}  {x.how}{mark}")
    stated = binding([x for x in found if x.stated])
    tiles, turns = waves(problem, on)
    tile = "x".join(map(str, problem.wave_tile))
    filled = turns / -(-tiles // on.num_sms)
    lines += [
        "",
        f"bound by {stated.resource}: at best {stated.us:.1f} us, "
        f"{tflops(problem.flops, stated.us):.0f} TFLOPS, {gbs(problem.bytes, stated.us):.0f} GB/s"
        + _practice(problem, found),
        f"{tiles} tiles of {tile} on {on.num_sms} SMs are {turns:.2f} waves: "
        f"{100 * filled:.0f} % of the SMs' turns are filled",
    ]
    return "\n".join([*lines, *_measured(problem, on, results, stated.us)])


def _practice(problem: Problem, found: Sequence[Limit]) -> str:
    known = [x for x in found if not x.stated]
    if {x.resource for x in known} != {x.resource for x in found if x.resource != MUFU}:
        return ""
    us = binding(known).us
    return f"; by what has been reached, {us:.1f} us, {tflops(problem.flops, us):.0f} TFLOPS"


def _measured(
    problem: Problem, on: Gpu, results: Sequence[Result], best_us: float
) -> Sequence[str]:
    mine = [
        r
        for r in results
        if r.ok and r.timing and of_device(r.device_name) == on
        and (r.op, r.sizes) == (problem.op, problem.sizes)
        and (r.problem["dtype"], r.problem["init"]) == (problem.dtype, "normal")
    ]  # fmt: skip
    if not mine:
        return ["the ledger has no time of this problem on this GPU"]
    fastest = min(mine, key=lambda r: r.timing.median_us if r.timing else 0.0)
    assert fastest.timing is not None
    us = fastest.timing.median_us
    return [
        f"measured: stage {fastest.stage}, {us:.1f} us, {100 * best_us / us:.0f} % of the limit "
        f"({fastest.run[:10]}, commit {fastest.environment.get('commit')})"
    ]


def parser() -> Parser:
    p = Parser(
        prog="python -m cutex.roofline",
        description="Say which limit binds a problem on a GPU, and what the best time could be.",
    )
    p.add_argument("--op", choices=OPS, default=DEFAULT_OP, help="default: %(default)s")
    for op in OPS:
        problem_class(op).add_options(p.add_argument_group(f"sizes of {op}"))
    p.add_argument("--dtype", default="bf16", help="default: bf16")
    p.add_argument("--gpu", default="b200", metavar="|".join(GPUS), help="default: b200")
    p.add_argument(
        "--results", type=Path, default=USUAL, metavar="DIR",
        help="ledgers, of what was measured; default: results",
    )  # fmt: skip
    return p


@answered
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        on, kind = gpu(args.gpu), problem_class(args.op)
        for other in OPS:
            if other != args.op and problem_class(other).sizes_given(args):
                raise ValueError(f"the sizes are of {other}: give --op {other}")
        wanted = kind.sizes_given(args) or kind.cases["cuda"]
        problems = [kind.of(sizes, args.dtype) for sizes in wanted]
        folder = args.results if args.results == USUAL else folder_given(args.results)
        rows = [r for r in read_all(folder, notice) if r.known]
        texts = [describe(problem, on, rows) for problem in problems]
    except ValueError as error:
        print(f"cutex: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(texts))
    return 0
