"""SVG text, with only the standard library.

Colours are CSS variables with the light theme's value as fallback, so that a picture follows its
page; as a file of its own, as in a README, it has a style that follows the reader's theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

LIGHT = {
    "ink": "#0b0b0b", "soft": "#52514e", "grid": "#e1e0d9", "page": "#fcfcfb",
    "c0": "#2a78d6", "c1": "#c9541f", "c2": "#12805a", "c3": "#8a6100", "c4": "#7a4fc0",
    "c5": "#a82a6c", "c6": "#0f7384", "c7": "#5f6410",
}  # fmt: skip
DARK = {
    "ink": "#f4f4f2", "soft": "#c3c2b7", "grid": "#383835", "page": "#1a1a19",
    "c0": "#5a9bea", "c1": "#f08a58", "c2": "#3fbf8f", "c3": "#d9a62e", "c4": "#ab8ae6",
    "c5": "#ea82b8", "c6": "#56c4d4", "c7": "#bcc250",
}  # fmt: skip
HUES = 8
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
CHARACTER = 0.56  # a character's mean width, relative to the font size


def variables(theme: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in theme.items())


def alone(svg: str) -> str:
    """A chart as a file of its own, for a light and a dark theme."""
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
    """A picture: marks, later ones on top; y grows downwards."""

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

    def dot(
        self, x: float, y: float, hue: int | str, tip: str = "", *, hollow: bool = False,
        crowded: bool = False,
    ) -> None:  # fmt: skip
        """A dot with a ring of the page's colour; `crowded`, where dots lie over each other, it has
        none, which would hide the hues below, and lets them through."""
        if crowded:
            inside = f"<title>{escape(tip)}</title>" if tip else ""
            self.marks.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour(hue)}" '
                f'fill-opacity=".75">{inside}</circle>'
            )
            return
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
    """Return `text`, cut to about `width`."""
    room = int(width / (size * CHARACTER))
    return text if len(text) <= room else text[: max(1, room - 1)].rstrip(" ,") + "…"
