"""python -m cutex.report: a page of all results, and the ladders in README.md, from results/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cutex.arch import ARCHS, Arch
from cutex.bench import timing
from cutex.problem.gemm import GemmProblem
from cutex.report import charts
from cutex.report.page import (
    CACHE,
    DATA,
    PEER_TITLES,
    caption,
    kinds,
    ladder_bars,
    main_sizes,
    page,
    size,
)
from cutex.results import Result, read_all
from cutex.results.history import kind as kind_of

BEGIN = "<!-- ladders: written by python -m cutex.report from results/ -->"
END = "<!-- end of ladders -->"

PICTURES = "docs"  # beside the README

Mnk = tuple[int, int, int]


def ladders(results: Iterable[Result]) -> str:
    """Markdown: for each arch one table per GPU and kind of data, or the bare ladder if untimed."""
    timed: dict[str, dict[tuple[str, str, str, str], list[Result]]] = {name: {} for name in ARCHS}
    for r in results:
        if r.op == "gemm" and r.ok and r.timing is not None and r.arch in timed:
            kind = r.device_name, r.problem["dtype"], r.problem["init"], r.timing.cache_state
            timed[r.arch].setdefault(kind, []).append(r)
    parts = []
    for target in ARCHS.values():
        parts.append(f"### {target.title} ({target.name})")
        if timed[target.name]:
            parts.append(f"![The ladder as bars]({PICTURES}/{_picture(target)})")
        for kind, found in timed[target.name].items():
            parts += _timed_table(target, kind, found)
        if not timed[target.name]:
            parts += _untimed_table(target)
    return "\n\n".join(parts)


def _timed_table(
    target: Arch, kind: tuple[str, str, str, str], results: list[Result]
) -> tuple[str, str]:
    from cutex.kernels.gemm import stages

    device_name, dtype, init, cache_state = kind
    newest: dict[tuple[int, Mnk], Result] = {}
    for r in sorted(results, key=lambda r: r.run):
        newest[r.stage, r.mnk] = r
    sizes = list(dict.fromkeys(r.mnk for r in results))
    peers = sorted({peer.name for r in newest.values() for peer in r.peers})
    baseline = "cublas" if "cublas" in peers else None

    def cell(r: Result | None) -> str:
        if r is None or r.tflops is None:
            return "–"
        ratio = r.ratio(baseline) if baseline else None
        return f"{r.tflops:.0f}" + (f" ({ratio:.2f})" if ratio is not None else "")

    rows = [
        [str(s.number), s.idea, *(cell(newest.get((s.number, mnk))) for mnk in sizes)]
        for s in stages(target.name)
    ]
    for name in peers:
        cells, version = [], ""
        for mnk in sizes:
            same = [r for (_, size), r in newest.items() if size == mnk]
            last = max(same, key=lambda r: (r.run, r.stage))
            peer = next((p for p in last.peers if p.name == name), None)
            if peer is None:
                cells.append("–")
                continue
            rate = timing.tflops(GemmProblem(**last.problem).flops, peer.timing.median_us)
            version = peer.version
            cells.append(f"{rate:.0f}")
        rows.append(["", f"{PEER_TITLES.get(name, name)} ({version})", *cells])
    dates = sorted({r.run[:10] for r in newest.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    unit = "TFLOPS (and ratio to cuBLAS in the same run)" if baseline else "TFLOPS"
    caption = (
        f"{unit}, median, on one {device_name}: {dtype}, {DATA[init]}, {CACHE[cache_state]}, "
        f"{when}. Stated dense peak: {target.dense_tflops[dtype]:.0f}."
    )
    return caption, _table(["stage", "what it adds", *("x".join(map(str, s)) for s in sizes)], rows)


def _untimed_table(target: Arch) -> tuple[str, str]:
    from cutex.kernels.gemm import stages

    caption = f"Not timed yet: no {target.board} has run it. The tests check it in the simulator."
    rows = [[str(s.number), s.idea] for s in stages(target.name)]
    return caption, _table(["stage", "what it adds"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", "---", *("---:" for _ in head[2:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def rewrite(readme: str, results: Iterable[Result]) -> str:
    """`readme` with the part between the marks made anew; ValueError without marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN} with {END} after it to write between")
    return f"{before}{BEGIN}\n\n{ladders(results)}\n\n{END}{after}"


def pictures(results: Iterable[Result]) -> dict[str, str]:
    """The ladder of each arch that was timed, as SVG by file name: its main kind and size."""
    rows = list(results)
    drawn = {}
    for target in ARCHS.values():
        of_arch = [
            found for kind, found in kinds(rows).items() if kind[:2] == ("gemm", target.name)
        ]
        if of_arch:
            found = max(of_arch, key=len)
            (mnk, *_) = main_sizes(found)
            title = f"{target.title}: TFLOPS at {size(mnk)}, {caption(kind_of(found[0]))}"
            bars = ladder_bars(target, found, mnk)
            top = max(bar.value or 0.0 for bar in bars)
            drawn[_picture(target)] = charts.alone(charts.bars(title, bars, top))
    return drawn


def _picture(target: Arch) -> str:
    return f"ladder-{target.name}.svg"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m cutex.report",
        description="Write report.html, and the ladders into README.md, from the ledgers.",
    )
    p.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    p.add_argument("--readme", type=Path, default=Path("README.md"), metavar="FILE")
    p.add_argument("--html", type=Path, default=Path("report.html"), metavar="FILE")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    rows = read_all(args.results)
    try:
        text = rewrite(args.readme.read_text(), rows)
        for name, svg in pictures(rows).items():
            picture = args.readme.parent / PICTURES / name
            picture.parent.mkdir(exist_ok=True)
            picture.write_text(svg)
        args.readme.write_text(text)
        args.html.write_text(page(rows))
    except (OSError, ValueError) as error:
        print(f"cutex: {args.readme}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.readme} and {args.html}")
    return 0
