"""The charts of the report: bars, a roofline, sweeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cutex.svg import Canvas, colour, fits

HEAD = 24.0  # height of a chart's title


def _titled(width: float, height: float, title: str) -> Canvas:
    """A canvas with its title on top: the quantity, the size and the unit."""
    canvas = Canvas(width, height, title)
    canvas.text(2, 15, fits(title, width - 4, 13.5), "ink", 13.5, font_weight="600")
    return canvas


# ---- bars


@dataclass(frozen=True)
class Bar:
    label: str
    note: str
    value: float | None  # None: not measured
    text: str  # at the end of the bar
    hue: int | str = 0


def bars(title: str, rows: Sequence[Bar], top: float, width: float = 760) -> str:
    """Horizontal bars from 0 to `top`, each with its label and note above it."""
    pitch, margin, room = 40.0, 2.0, 96.0
    canvas = _titled(width, HEAD + 8 + pitch * len(rows), title)
    scale = (width - margin - room) / top
    for i, row in enumerate(rows):
        y = HEAD + 4 + pitch * i
        space = width - 14 - len(row.label) * 13 * 0.62
        canvas.marks.append(
            f'<text x="{margin:g}" y="{y + 12:g}" font-size="13" fill="{colour("ink")}">'
            f'<tspan font-weight="600">{escape(row.label)}</tspan> <tspan dx="5" '
            f'fill="{colour("soft")}">{escape(fits(row.note, space, 13))}</tspan></text>'
        )
        if row.value is None:
            canvas.text(margin, y + 30, row.text, "soft", 12.5)
            continue
        long = max(2.0, row.value * scale)
        canvas.rect(margin, y + 18, long, 14, row.hue, rx="2")
        canvas.text(margin + long + 6, y + 30, row.text, "ink", 12.5)
    return canvas.svg()


# ---- axes


@dataclass(frozen=True)
class Axis:
    """Maps a value to the canvas; linear from 0, or logarithmic."""

    low: float
    high: float
    start: float  # position of `low` on the canvas, px
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _round_step(self.high - self.low)
            count = int((self.high - self.low) / step + 1e-9)
            return [self.low + i * step for i in range(count + 1)]
        decades = math.log10(self.high / self.low)
        found = []
        for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1):
            for digit in (1, 2, 5) if decades < 3 else (1,):
                value = digit * 10.0**power
                if self.low <= value * 1.0001 and value <= self.high * 1.0001:
                    found.append(value)
        return found


def _round_step(span: float) -> float:
    """The step for about five ticks: 1, 2 or 5 times a power of ten."""
    raw = span / 5
    power = 10 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 1 else f"{value:g}"


# ---- the roofline


@dataclass(frozen=True)
class Roof:
    """The peak of one unit, TFLOPS, and the rate of the memory that leads up to it, GB/s."""

    name: str
    tflops: float
    gbs: float | None
    stated: bool


@dataclass(frozen=True)
class Point:
    intensity: float  # FLOP per byte
    tflops: float
    tip: str
    hue: int
    hollow: bool = False


def roofline(title: str, roofs: Sequence[Roof], points: Sequence[Point], width: float) -> str:
    """Attainable TFLOPS against FLOP per byte, both logarithmic."""
    height = HEAD + (300.0 if width < 500 else 360.0)
    highest = max(r.tflops for r in roofs) * 1.6
    slopes = [r.gbs for r in roofs if r.gbs] or [1.0]
    left = min([p.intensity for p in points] + [20.0]) / 2
    right = max([p.intensity for p in points] + [2000.0]) * 2
    lowest = min([p.tflops for p in points] + [left * min(slopes) / 1e3]) / 1.5
    x = Axis(left, right, 50, width - 84, log=True)
    y = Axis(lowest, highest, height - 40, HEAD + 22, log=True)
    label = -math.inf  # the position of the last ceiling's name
    canvas = _titled(width, height, title)
    _grid(canvas, x, y, "FLOP per byte of memory traffic", "TFLOPS")
    for roof in sorted(roofs, key=lambda roof: -roof.tflops):
        dash = {} if roof.stated else {"stroke_dasharray": "5 4"}
        hue = "ink" if roof.stated else "soft"
        knee = roof.tflops * 1e3 / roof.gbs if roof.gbs else left
        line = [(max(knee, left), roof.tflops), (right, roof.tflops)]
        if roof.gbs and knee > left:
            start = max(left, lowest * 1e3 / roof.gbs)
            line.insert(0, (start, start * roof.gbs / 1e3))
        canvas.path([(x(a), y(b)) for a, b in line], hue, stroke_width="1.5", **dash)
        label = max(y(roof.tflops) + 4, label + 14)
        canvas.text(x.end + 5, label, f"{roof.tflops:.0f} {roof.name}", hue, 11.5)
    for p in points:
        canvas.dot(x(p.intensity), y(p.tflops), p.hue, p.tip, hollow=p.hollow)
    return canvas.svg()


def _grid(canvas: Canvas, x: Axis, y: Axis, x_title: str, y_title: str) -> None:
    for value in y.ticks():
        canvas.line(x.start, y(value), x.end, y(value), "grid")
        canvas.text(x.start - 6, y(value) + 4, number(value), size=11.5, text_anchor="end")
    last = -math.inf
    for value in x.ticks():
        at = x(value)
        if at - last >= 34:
            canvas.text(at, y.start + 16, number(value), size=11.5, text_anchor="middle")
            last = at
    canvas.line(x.start, y.start, x.end, y.start, "soft")
    canvas.text((x.start + x.end) / 2, y.start + 34, x_title, size=11.5, text_anchor="middle")
    canvas.text(x.start - 44, y.end - 10, y_title, size=11.5)


# ---- sweeps


@dataclass(frozen=True)
class Sample:
    x: float
    low: float
    value: float
    high: float
    tip: str


@dataclass(frozen=True)
class Series:
    name: str
    hue: int
    samples: Sequence[Sample]  # by x


def sweep(title: str, series: Sequence[Series], x_title: str, width: float) -> str:
    """One line with its band per series, over a logarithmic x; y from 0."""
    height = HEAD + (280.0 if width < 500 else 320.0)
    xs = sorted({s.x for line in series for s in line.samples})
    top = max(s.high for line in series for s in line.samples) * 1.08
    x = Axis(xs[0], xs[-1], 62, width - 24, log=True)
    y = Axis(0, top, height - 40, HEAD + 22)
    canvas = _titled(width, height, title)
    for value in y.ticks():
        canvas.line(50, y(value), width - 10, y(value), "grid")
        canvas.text(44, y(value) + 4, number(value), size=11.5, text_anchor="end")
    last = -math.inf
    for value in xs:
        if x(value) - last >= 38:
            canvas.text(x(value), y.start + 16, number(value), size=11.5, text_anchor="middle")
            last = x(value)
    canvas.line(50, y.start, width - 10, y.start, "soft")
    canvas.text(width / 2, y.start + 34, x_title, size=11.5, text_anchor="middle")
    canvas.text(6, y.end - 10, "TFLOPS", size=11.5)
    for line in reversed(series):  # ours, the first, on top
        upper = [(x(s.x), y(s.high)) for s in line.samples]
        lower = [(x(s.x), y(s.low)) for s in reversed(line.samples)]
        canvas.area(upper + lower, line.hue)
    for line in reversed(series):
        canvas.path([(x(s.x), y(s.value)) for s in line.samples], line.hue, stroke_width="2")
        for s in line.samples:
            canvas.dot(x(s.x), y(s.value), line.hue, s.tip)
    return canvas.svg()


# ---- ratios


@dataclass(frozen=True)
class Ratio:
    value: float
    tip: str
    hue: int


DOT = 9.5  # the width of a dot with its ring


def ratios(title: str, points: Sequence[Ratio], names: Sequence[str], width: float) -> str:
    """Draw ratios sorted from the lowest, a dot for each problem, over a line at 1; `names` is the
    legend of the hues."""
    height = HEAD + 300.0
    ordered = sorted(points, key=lambda p: p.value)
    low, high = min(0.9, ordered[0].value) * 0.98, max(1.1, ordered[-1].value) * 1.02
    x, y = (
        Axis(-0.5, len(ordered) - 0.5, 50, width - 12),
        Axis(low, high, height - 40, HEAD + 30, log=True),
    )
    canvas = _titled(width, height, title)
    marks = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 2.5, 3.0]
    for value in (mark for mark in marks if low <= mark <= high):
        canvas.line(50, y(value), width - 12, y(value), "ink" if value == 1 else "grid")
        canvas.text(44, y(value) + 4, f"{value:g}", size=11.5, text_anchor="end")
    crowded = len(ordered) > (width - 62) / DOT
    for i, p in enumerate(ordered):
        canvas.dot(x(i), y(p.value), p.hue, p.tip, crowded=crowded)
    canvas.text(width / 2, height - 18, f"{len(ordered)} problems, sorted", text_anchor="middle")
    at = 56.0
    for hue, name in enumerate(names):
        canvas.dot(at, HEAD + 8, hue)
        canvas.text(at + 8, HEAD + 12, name, size=11.5)
        at += 22 + 7 * len(name)
    return canvas.svg()
