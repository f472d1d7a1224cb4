"""A launch's time as a picture in one SVG file: the tracks of one CTA from start to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutex.sim.timing.units import Interval
from cutex.svg import Canvas, alone, fits

UNITS = ("tensor core", "TMA in", "TMA out")
# NOTE: so narrow that its text can be read in a column of 500 px
WIDTH, LEFT, ROW, TOP, TEXT = 640.0, 112.0, 24.0, 62.0, 12.0
HUES: dict[str, int | str] = {"work": 2, "unit": 0, "wait": "grid"}
LEGEND = (
    ("work", "the warp works"),
    ("wait", "it waits for what is named"),
    ("unit", "a unit works"),
)
TICKS = (50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


@dataclass
class Bar:
    """Neighbouring intervals of one kind on a track, drawn as one; ``label`` its text."""

    start: float
    end: float
    kind: str
    label: str


def draw(intervals: Sequence[Interval], title: str) -> str:
    """The SVG of CTA 0: its units, and one warp of each role and warpgroup."""
    tracks: dict[str, list[Interval]] = {}
    for interval in intervals:
        if interval.cta == 0 and interval.end > interval.start:
            tracks.setdefault(interval.track, []).append(interval)
    rows = [unit for unit in UNITS if unit in tracks] + one_of_each(tracks)
    end = max((i.end for row in rows for i in tracks[row]), default=1.0)
    scale = (WIDTH - LEFT - 12) / end
    canvas = Canvas(WIDTH, TOP + ROW * len(rows) + 34, title)
    canvas.text(4, 16, fits(title, WIDTH - 8, 14), "ink", 14, font_weight="600")
    _legend(canvas)
    for n, row in enumerate(rows):
        y = TOP + ROW * n
        canvas.text(4, y + 16, row, "ink", TEXT)
        for bar in joined(tracks[row], 1 / scale):
            x, width = LEFT + bar.start * scale, (bar.end - bar.start) * scale
            canvas.rect(x, y + 2, max(width, 0.6), ROW - 4, HUES[bar.kind])
            if bar.label and width > 24:
                canvas.text(x + 4, y + 16, fits(bar.label, width - 6, TEXT), "soft", TEXT)
    step = next((t for t in TICKS if end / t <= 8), TICKS[-1])
    for cycle in range(0, int(end) + 1, step):
        x = LEFT + cycle * scale
        canvas.line(x, TOP, x, TOP + ROW * len(rows), "soft", stroke_opacity=".25")
        canvas.text(x, TOP + ROW * len(rows) + 16, str(cycle), size=TEXT, text_anchor="middle")
    canvas.text(4, TOP + ROW * len(rows) + 16, "cycles", size=TEXT)
    return alone(canvas.svg())


def _legend(canvas: Canvas) -> None:
    x = 4.0
    for kind, words in LEGEND:
        canvas.rect(x, 30, 14, 12, HUES[kind])
        canvas.text(x + 20, 40, words, size=TEXT)
        x += 40 + 6.6 * len(words)


def one_of_each(tracks: dict[str, list[Interval]]) -> list[str]:
    """The tracks of one warp of each role and warpgroup, by warpgroup."""
    found: dict[tuple[str, int], str] = {}
    for name in tracks:
        role, _, number = name.rpartition(" ")
        if name not in UNITS and number.isdecimal():
            found.setdefault((role, int(number) // 4), name)
    return [found[key] for key in sorted(found, key=lambda k: (k[1], k[0]))]


def joined(intervals: Sequence[Interval], gap: float) -> list[Bar]:
    """The intervals of a track in order; those of a kind that are less than ``gap`` cycles apart
    are one.
    """
    found: list[Bar] = []
    for i in sorted(intervals, key=lambda i: i.start):
        label = i.name if i.kind == "wait" else ""
        last = found[-1] if found else None
        if last and (last.kind, last.label) == (i.kind, label) and i.start - last.end <= gap:
            last.end = max(last.end, i.end)
        else:
            found.append(Bar(i.start, i.end, i.kind, label))
    return found
