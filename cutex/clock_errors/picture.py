"""A picture of the end of one tile and the start of the next, by the simulator's clock.

It is drawn from the stored records of the ladders (docs/time.md), without a GPU or the DSL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from cutex.clock_errors.rows import traces_file
from cutex.problem import Problem, problem_class
from cutex.problem.stage import AnyStage
from cutex.sim.timing import stored
from cutex.sim.timing.gpus import gpu, of_arch
from cutex.sim.timing.picture import UNITS, Bar, joined, one_of_each
from cutex.sim.timing.predict import predict
from cutex.sim.timing.stored import Recorded
from cutex.sim.timing.timed import Whole
from cutex.sim.timing.units import Interval
from cutex.svg import Canvas, colour, fits

ARCHS = ("sm_90a", "sm_100a")
SPAN = 9000.0  # cycles that a picture shows, two thirds of them before the end of a tile
TICK = 1000
WIDTH, LEFT, TOP, ROW = 1320.0, 130.0, 24.0, 19.0
PALE = ".45"  # opacity of a wait, in the colour of the unit that ends it


@dataclass(frozen=True)
class Kind:
    """A kind of bar: its words in the legend, and its colour."""

    label: str
    hue: int | str
    pale: bool = True


WORK = Kind("the warp works", 2, pale=False)
UNIT = Kind("a unit works", 0, pale=False)
LOADS, MMA, STORES = Kind("waits for loads", 0), Kind("for MMAs", 1), Kind("for stores", 5)
TMEM, BARRIER = Kind("for tensor memory", 3), Kind("at a barrier", "soft")
WARPS = Kind("for a warp", 4)
KINDS = (UNIT, WORK, LOADS, MMA, STORES, TMEM, BARRIER, WARPS)
WAITS = {
    "TMA": LOADS, "MMA": MMA, "MMA queue": MMA, "TMA store": STORES, "stores": STORES,
    "global memory": LOADS, "tensor memory": TMEM, "cluster": BARRIER,
}  # fmt: skip


def kind(bar: Bar) -> Kind:
    """The kind of a bar; a wait is named after what ends it: a unit, a barrier's number, or a
    role."""
    if bar.kind != "wait":
        return WORK if bar.kind == "work" else UNIT
    return BARRIER if bar.label.startswith("barrier") else WAITS.get(bar.label, WARPS)


def timelines(op: str, arch: str, ladder: Sequence[AnyStage]) -> str:
    """HTML: one picture for each stage with a stored record; empty without records."""
    file = traces_file(op, arch)
    if not file.is_file():
        return ""
    records = stored.load(file)
    problems = problem_class(op)
    problem = problems.of(problems.cases["confirm"][-1])
    parts = []
    for one in ladder:
        if (traced := records.get(f"{op}/{arch}/{one.number}/{problem.size}")) is None:
            continue
        intervals = _intervals(problem, one, traced)
        title = f"{one.number} {one.title}: {one.idea}"
        parts.append(f"<figure>{svg(intervals, tile_end(intervals), title)}</figure>")
    if not parts:
        return ""
    return (
        f"<p>{SPAN:.0f} cycles around the end of a tile of {escape(problem.size)}, by the "
        "simulator's clock: the units of one SM, and one warp of each role and warpgroup, named as "
        f"in the code, with its number.</p><p>{_legend()}</p>{''.join(parts)}"
    )


def _intervals(problem: Problem, one: AnyStage, traced: Recorded) -> list[Interval]:
    whole = Whole(problem.work(one.fitted(problem).config())[0])
    return predict(traced, gpu(of_arch(one.arch)), whole, log=True, most_rounds=2).intervals


def tile_end(intervals: Sequence[Interval]) -> float:
    """The start of the first store of CTA 0; without stores, of the longest pause between its
    MMAs."""
    outs = sorted(i.start for i in intervals if i.track == "TMA out" and i.cta == 0)
    if outs:
        return outs[0]
    mma = sorted((i.start, i.end) for i in intervals if i.track == "tensor core" and i.cta == 0)
    gaps = [(b[0] - a[1], a[1]) for a, b in pairwise(mma)]
    return max(gaps, default=(0.0, SPAN))[1]


def svg(intervals: Sequence[Interval], around: float, title: str) -> str:
    """The tracks of CTA 0 during ``SPAN`` cycles, of which two thirds are before ``around``."""
    start = max(0.0, around - SPAN * 2 / 3)
    end, scale = start + SPAN, (WIDTH - LEFT) / SPAN
    tracks: dict[str, list[Interval]] = {}
    for i in intervals:
        if i.cta == 0 and i.end > start and i.start < end and i.end > i.start:
            tracks.setdefault(i.track, []).append(i)
    rows = [t for t in UNITS if t in tracks] + one_of_each(tracks)
    bottom = TOP + ROW * len(rows)
    canvas = Canvas(WIDTH, bottom + 18, title)
    canvas.text(0, 14, title, "ink", 13, font_weight="600")
    for cycle in range(0, int(SPAN) + 1, TICK):
        x = LEFT + cycle * scale
        canvas.line(x, TOP, x, bottom, "grid")
        anchor = "end" if cycle + TICK > SPAN else "middle"
        canvas.text(x, bottom + 13, str(cycle), size=10, text_anchor=anchor)
    canvas.text(0, bottom + 13, "cycles", size=10)
    for n, name in enumerate(rows):
        y = TOP + ROW * n
        canvas.text(0, y + 13, name, "ink", 12)
        for bar in joined(tracks[name], 1.0 / scale):
            first, last = max(bar.start, start), min(bar.end, end)
            x, width = LEFT + (first - start) * scale, (last - first) * scale
            found = kind(bar)
            opacity = {"fill_opacity": PALE} if found.pale else {}
            canvas.rect(x, y + 1, max(width, 0.5), ROW - 3, found.hue, **opacity)
            if bar.label and width > 40:
                canvas.text(x + 4, y + 13, fits(bar.label, width - 6, 10), "ink", 10)
    fixed = f' width="{WIDTH:g}" height="{canvas.height:g}"'
    return canvas.svg().replace(fixed, ' width="100%"', 1)  # as wide as the page


def _legend() -> str:
    """A square and a word for each kind of bar."""
    return " ".join(
        f'<span style="white-space:nowrap;margin-right:1em"><svg width="14" height="12">'
        f'<rect width="14" height="12" fill="{colour(k.hue)}"'
        f'{f""" fill-opacity="{PALE}" """ if k.pale else ""}/></svg> {escape(k.label)}</span>'
        for k in KINDS
    )
