"""Charts as SVG text, with nothing but the standard library.

Colours are CSS variables with the light theme's value as fallback, so that a chart follows its
page; standing alone, as in a README, it brings a style that follows the reader's theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

LIGHT = {
    "ink": "#0b0b0b", "soft": "#52514e", "grid": "#e1e0d9", "page": "#fcfcfb",
    "c0": "#2a78d6", "c1": "#c9541f", "c2": "#12805a", "c3": "#8a6100", "c4": "#7a4fc0",
}  # fmt: skip
DARK = {
    "ink": "#f4f4f2", "soft": "#c3c2b7", "grid": "#383835", "page": "#1a1a19",
    "c0": "#5a9bea", "c1": "#f08a58", "c2": "#3fbf8f", "c3": "#d9a62e", "c4": "#ab8ae6",
}  # fmt: skip
HUES = 5
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
CHARACTER = 0.56  # of the font size: a character's width, on average


def variables(theme: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in theme.items())


def alone(svg: str) -> str:
    """A chart as a file of its own, for light and dark readers."""
    style = (
        f"<style>svg{{{variables(LIGHT)}background:var(--page)}}"
        f"@media (prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}</style>"
    )
    head, _, rest = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


def colour(hue: int | str) -> str:
    """A hue by number, or "ink", "soft", "grid", "page"."""
    name = f"c{hue % HUES}" if isinstance(hue, int) else hue
    return f"var(--{name},{LIGHT[name]})"


@dataclass
class Canvas:
    """Marks in the order drawn; y grows downwards."""

    width: float
    height: float
    title: str
    marks: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, hue: int | str, **more: str) -> None:
        at = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.marks.append(f'<line {at} stroke="{colour(hue)}"{_attributes(more)}/>')

    def path(self, points: Sequence[tuple[float, float]], hue: int | str, **more: str) -> None:
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        more.setdefault("fill", "none")
        self.marks.append(f'<path d="{d}" stroke="{colour(hue)}"{_attributes(more)}/>')

    def area(self, points: Sequence[tuple[float, float]], hue: int | str) -> None:
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z"
        self.marks.append(f'<path d="{d}" fill="{colour(hue)}" fill-opacity=".18"/>')

    def rect(self, x: float, y: float, w: float, h: float, hue: int | str, **more: str) -> None:
        at = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, w):.1f}" height="{h:.1f}"'
        self.marks.append(f'<rect {at} fill="{colour(hue)}"{_attributes(more)}/>')

    def dot(self, x: float, y: float, hue: int | str, tip: str = "", hollow: bool = False) -> None:
        fill = colour("page") if hollow else colour(hue)
        ring = colour(hue) if hollow else colour("page")
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self.marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{ring}" '
            f'stroke-width="1.5">{inside}</circle>'
        )

    def text(
        self, x: float, y: float, what: str, hue: int | str = "soft", size: float = 12, **more: str
    ) -> None:
        attributes = f'x="{x:.1f}" y="{y:.1f}" fill="{colour(hue)}" font-size="{size:g}"'
        self.marks.append(f"<text {attributes}{_attributes(more)}>{escape(what)}</text>")

    def svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" '
            f'height="{self.height:g}" role="img" font-family="{FONT}">'
            f"<title>{escape(self.title)}</title>{''.join(self.marks)}</svg>"
        )


def _attributes(more: dict[str, str]) -> str:
    return "".join(f' {name.replace("_", "-")}="{escape(value)}"' for name, value in more.items())


def fits(text: str, width: float, size: float) -> str:
    """`text`, cut to about `width`."""
    room = int(width / (size * CHARACTER))
    return text if len(text) <= room else text[: max(1, room - 1)].rstrip(" ,") + "…"


# ---- bars


@dataclass(frozen=True)
class Bar:
    label: str
    note: str
    value: float | None  # None: not measured
    told: str  # what stands at the bar's end
    hue: int | str = 0


def bars(title: str, rows: Sequence[Bar], top: float, width: float = 760) -> str:
    """Horizontal bars from 0 to `top`, each with its label and note above it."""
    pitch, margin, told = 40.0, 2.0, 96.0
    canvas = Canvas(width, 8 + pitch * len(rows), title)
    scale = (width - margin - told) / top
    for i, row in enumerate(rows):
        y = 4 + pitch * i
        room = width - 14 - len(row.label) * 13 * 0.62
        canvas.marks.append(
            f'<text x="{margin:g}" y="{y + 12:g}" font-size="13" fill="{colour("ink")}">'
            f'<tspan font-weight="600">{escape(row.label)}</tspan> <tspan dx="5" '
            f'fill="{colour("soft")}">{escape(fits(row.note, room, 13))}</tspan></text>'
        )
        if row.value is None:
            canvas.text(margin, y + 30, row.told, "soft", 12.5)
            continue
        long = max(2.0, row.value * scale)
        canvas.rect(margin, y + 18, long, 14, row.hue, rx="2")
        canvas.text(margin + long + 6, y + 30, row.told, "ink", 12.5)
    return canvas.svg()


# ---- axes


@dataclass(frozen=True)
class Axis:
    """Maps a value to the canvas; linear from 0, or logarithmic."""

    low: float
    high: float
    start: float  # on the canvas
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
    """About five steps, of 1, 2 or 5 times a power of ten."""
    raw = span / 5
    power = 10 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 1 else f"{value:g}"


# ---- the roofline


@dataclass(frozen=True)
class Roof:
    """A ceiling of computing and the slope of the memory that leads up to it."""

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
    height = 300.0 if width < 500 else 360.0
    highest = max(r.tflops for r in roofs) * 1.6
    slopes = [r.gbs for r in roofs if r.gbs] or [1.0]
    left = min([p.intensity for p in points] + [20.0]) / 2
    right = max([p.intensity for p in points] + [2000.0]) * 2
    lowest = min([p.tflops for p in points] + [left * min(slopes) / 1e3]) / 1.5
    x = Axis(left, right, 50, width - 84, log=True)
    y = Axis(lowest, highest, height - 40, 12, log=True)
    label = -math.inf  # where the last ceiling's name stands
    canvas = Canvas(width, height, title)
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
        canvas.dot(x(p.intensity), y(p.tflops), p.hue, p.tip, p.hollow)
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
    canvas.text(x.start - 44, 10, y_title, size=11.5)


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
    height = 280.0 if width < 500 else 320.0
    xs = sorted({s.x for line in series for s in line.samples})
    top = max(s.high for line in series for s in line.samples) * 1.08
    x = Axis(xs[0], xs[-1], 62, width - 24, log=True)
    y = Axis(0, top, height - 40, 18)
    canvas = Canvas(width, height, title)
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
    canvas.text(6, 11, "TFLOPS", size=11.5)
    for line in reversed(series):  # ours, the first, on top
        upper = [(x(s.x), y(s.high)) for s in line.samples]
        lower = [(x(s.x), y(s.low)) for s in reversed(line.samples)]
        canvas.area(upper + lower, line.hue)
    for line in reversed(series):
        canvas.path([(x(s.x), y(s.value)) for s in line.samples], line.hue, stroke_width="2")
        for s in line.samples:
            canvas.dot(x(s.x), y(s.value), line.hue, s.tip)
    return canvas.svg()
