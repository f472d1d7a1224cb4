"""A picture of the end of one tile and the start of the next, as the simulator's clock has it.

Drawn from the stored records of the ladders (docs/time.md), so it needs neither a GPU nor the DSL.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from cutex.bench.clock_errors import traces_file
from cutex.problem import DEFAULT_OP, problem_class
from cutex.problem.stage import AnyStage
from cutex.sim.timing import stored
from cutex.sim.timing.gpus import gpu, of_arch
from cutex.sim.timing.picture import UNITS, joined, one_of_each
from cutex.sim.timing.predict import predict
from cutex.sim.timing.timed import Whole
from cutex.sim.timing.units import Interval

ARCHS = ("sm_90a", "sm_100a")
SIZES = {"m": 4096, "n": 4096, "k": 4096}
SPAN = 9000.0  # cycles that a picture shows, two thirds of them before the end of a tile
WIDTH, LEFT, ROW = 1200, 190, 15
COLOURS = {
    "work": "#3a7d44", "unit": "#33658a", "MMA": "#f6ae2d", "TMA": "#86bbd8", "stores": "#c9ada7",
    "TMA store": "#c9ada7",
}  # fmt: skip
OTHER = "#d9d9d9"  # of waits for anything else


def timelines(arch: str, ladder: Sequence[AnyStage]) -> str:
    """HTML: one picture for each stage of which there is a record; nothing without records."""
    file = traces_file(DEFAULT_OP, arch)
    if not file.is_file():
        return ""
    records = stored.load(file)
    problem = problem_class(DEFAULT_OP).of(SIZES)
    parts = []
    for one in ladder:
        traced = records.get(f"{one.op}/{arch}/{one.number}/{problem.size}")
        if traced is None:
            continue
        config = one.default
        whole = Whole(*problem.work(config))
        timed = predict(traced, gpu(of_arch(arch)), whole, log=True, most_rounds=2)
        end = _tile_end(timed.intervals)
        title = f"{one.number} {one.title}: {one.idea}"
        parts.append(f"<figure>{svg(timed.intervals, end, title)}</figure>")
    if not parts:
        return ""
    return (
        f"<p>{SPAN:.0f} cycles around the end of a tile of {problem.size}, by the simulator's "
        "clock: the units of one SM, and one warp of each role and warpgroup. Green: the warp "
        "works; blue: a unit does; yellow: it waits for MMAs; light blue: for TMA; brown: for its "
        f"stores; grey: for others.</p>{''.join(parts)}"
    )


def _tile_end(intervals: Sequence[Interval]) -> float:
    """When the first MMA of the longest pause between MMAs of CTA 0 begins, or the first store."""
    outs = sorted(i.start for i in intervals if i.track == "TMA out" and i.cta == 0)
    if outs:
        return outs[0]
    mma = sorted((i.start, i.end) for i in intervals if i.track == "tensor core" and i.cta == 0)
    gaps = [(b[0] - a[1], a[1]) for a, b in pairwise(mma)]
    return max(gaps, default=(0.0, SPAN))[1]


def svg(intervals: Sequence[Interval], around: float, title: str) -> str:
    """The tracks of CTA 0, ``SPAN`` cycles of them."""
    start = max(0.0, around - SPAN * 2 / 3)
    scale = (WIDTH - LEFT) / SPAN
    tracks: dict[str, list[Interval]] = {}
    for i in intervals:
        if i.cta == 0 and i.end > start and i.start < start + SPAN and i.end > i.start:
            tracks.setdefault(i.track, []).append(i)
    rows = [t for t in UNITS if t in tracks] + one_of_each(tracks)
    height = ROW * (len(rows) + 1) + 4
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" font-size="11" '
        'fill="currentColor">',
        f"<title>{escape(title)}</title>",
        f'<text x="0" y="11" font-weight="bold">{escape(title)}</text>',
    ]
    for n, name in enumerate(rows):
        y = ROW * (n + 1) + 2
        parts.append(f'<text x="0" y="{y + 11}">{escape(name)}</text>')
        for bar in joined(tracks[name], 1.0 / scale):
            x = LEFT + (max(bar.start, start) - start) * scale
            width = (min(bar.end, start + SPAN) - max(bar.start, start)) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 3}" '
                f'fill="{_colour(bar.kind, bar.told)}"><title>{escape(bar.told)}</title></rect>'
            )
    return "".join([*parts, "</svg>"])


def _colour(kind: str, told: str) -> str:
    return COLOURS.get(told if kind == "wait" else kind, OTHER)
