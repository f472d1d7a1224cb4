"""The report as one HTML page: nothing to fetch, a little script to sort and choose, two themes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from cutex.analysis import roofline
from cutex.arch import ARCHS, Arch
from cutex.problem import OPS, problem_class
from cutex.problem.stage import Stage, ladders
from cutex.report import charts
from cutex.report.look import SCRIPT, style
from cutex.results import Peer, Result, Timing, history, tflops
from cutex.svg import colour

DATA = {
    "normal": "Gaussian data",
    "uniform": "uniform data",
    "int": "small integers",
    "zeros": "zeros",
}
CACHE = {"cold": "cold L2", "hot": "hot L2"}
PEER_TITLES = {name: p.title for op in OPS for name, p in problem_class(op).peers.items()}
PEER_HUES = {name: hue for hue, name in enumerate(PEER_TITLES, start=1)}
NEWEST = 300  # rows of history; more would make the page heavy
WIDTHS = (("wide", 1000), ("narrow", 360))  # each chart is drawn for two kinds of screen

Sizes = tuple[Any, ...]
Rows = Sequence[Result]


def page(results: Iterable[Result]) -> str:
    """The whole page, as text."""
    rows = sorted(results, key=lambda r: r.run)
    sections = {
        "ladders": ("Ladders", _ladders(rows)),
        "roofline": ("Roofline", _rooflines(rows)),
        "sweeps": ("Sizes", _sweeps(rows)),
        "peers": ("Beside peers", _peers(rows)),
        "history": ("History", _history(rows)),
        "environment": ("Environment", _environments(rows)),
    }
    links = "".join(f'<a href="#{name}">{title}</a>' for name, (title, _) in sections.items())
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{text}</section>'
        for name, (title, text) in sections.items()
    )
    span = f"{len(rows)} results" + (f", {rows[0].run[:10]} to {rows[-1].run[:10]}" if rows else "")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>cutex</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{style()}</style></head><body><header><h1>cutex</h1><p>{span}</p>"
        f'<nav>{links}</nav><button id="theme" type="button">Light or dark</button></header>'
        f"<main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def said(text: object) -> str:
    return escape(str(text))


def kinds(rows: Rows) -> dict[tuple[Any, ...], list[Result]]:
    """Timed rows by what makes figures comparable."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for r in history.timed(rows):
        found.setdefault(history.kind(r), []).append(r)
    return found


def caption(kind: tuple[Any, ...]) -> str:
    _, _, device_name, dtype, init, cache_state = kind
    data, cache = DATA.get(init, init), CACHE.get(cache_state, cache_state)
    return f"{device_name}, {dtype}, {data}, {cache}"


def rate(row: Result, took: Timing) -> float:
    return tflops(row.case.flops, took.median_us)


def baseline(op: str) -> str:
    """The peer that speeds are relative to."""
    return next(iter(problem_class(op).peers))


def heading(op: str, target: Arch) -> str:
    """Of an operator's ladder on an arch."""
    return target.title if len(OPS) == 1 else f"{problem_class(op).title} on {target.title}"


def all_ladders() -> Iterator[tuple[str, Arch, list[Stage]]]:
    """Every operator, every arch that it has a ladder for, and that ladder."""
    for op in OPS:
        found = ladders(op)
        for target in ARCHS.values():
            if target.name in found.archs:
                yield op, target, found.stages(target.name)


# ---- ladders


def newest(rows: Rows) -> dict[tuple[int, Sizes], Result]:
    """The newest row of each stage and sizes."""
    return {(r.stage, r.sizes): r for r in sorted(rows, key=lambda r: r.run)}


def main_sizes(rows: Rows) -> list[Result]:
    """One row of each size: those with the most stages first, the larger first among them."""
    stages: dict[Sizes, set[int]] = {}
    for r in rows:
        stages.setdefault(r.sizes, set()).add(r.stage)
    one = {r.sizes: r for r in rows}
    return sorted(one.values(), key=lambda r: (-len(stages[r.sizes]), -r.case.flops, r.sizes))


def ladder_bars(ladder: Sequence[Stage], rows: Rows, sizes: Sizes) -> list[charts.Bar]:
    """A bar for each stage of the ladder, then one for each peer of its last run."""
    found = newest([r for r in rows if r.sizes == sizes])
    bars = []
    for s in ladder:
        r = found.get((s.number, sizes))
        label = f"{s.number} {s.title}"
        if r is None or r.tflops is None:
            bars.append(charts.Bar(label, s.idea, None, "not timed"))
            continue
        ratio = r.ratio(baseline(r.op))
        text = f"{r.tflops:.0f}" + (f" ({ratio:.2f}x)" if ratio is not None else "")
        bars.append(charts.Bar(label, s.idea, r.tflops, text))
    for row, peer in last_peers(list(found.values())):
        value = rate(row, peer.timing)
        title = PEER_TITLES.get(peer.name, peer.name)
        hue = _hue(peer.name)
        bars.append(charts.Bar(title, peer.version, value, f"{value:.0f}", hue))
    return bars


def last_peers(rows: Rows) -> list[tuple[Result, Peer]]:
    """Each peer as last timed, with the row it was timed beside."""
    found = {p.name: (r, p) for r in sorted(rows, key=lambda r: (r.run, r.stage)) for p in r.peers}
    return [found[name] for name in sorted(found)]


def _ladders(rows: Rows) -> str:
    parts = []
    for op, target, ladder in all_ladders():
        parts.append(f"<h3>{heading(op, target)} <small>{target.name}</small></h3>")
        of_arch = {
            kind: found
            for kind, found in kinds(rows).items()
            if kind[:2] == (op, target.name) and kind[3] in target.dense_tflops
        }
        if not of_arch:
            items = "".join(
                f"<li value={s.number}><b>{said(s.title)}</b> {said(s.idea)}</li>" for s in ladder
            )
            parts.append(f"<p>Not timed yet: no {target.board} has run it.</p><ol>{items}</ol>")
        for kind, found in of_arch.items():
            parts.append(_ladder(target, ladder, kind, found))
    return "".join(parts)


def _ladder(target: Arch, ladder: Sequence[Stage], kind: tuple[Any, ...], rows: Rows) -> str:
    sizes = main_sizes(rows)[:12]
    peak = target.dense_tflops[kind[3]]
    options = "".join(f"<option>{said(r.size)}</option>" for r in sizes)
    blocks = "".join(
        f'<div data-size="{said(r.size)}"><p class="size">{said(r.size)}</p>'
        f"{''.join(_bar(bar, peak) for bar in ladder_bars(ladder, rows, r.sizes))}</div>"
        for r in sizes
    )
    first = PEER_TITLES[baseline(kind[0])]
    return (
        f'<figure class="ladder"><figcaption>{said(caption(kind))}: TFLOPS, median, and speed '
        f"relative to {first} in the same run. A full bar is the stated dense peak, {peak:.0f}. "
        f"<label>Size <select>{options}</select></label></figcaption>{blocks}</figure>"
    )


def _bar(bar: charts.Bar, top: float) -> str:
    share = 0.0 if bar.value is None else min(100.0, 100 * bar.value / top)
    return (
        f'<div class="bar"><span class="what"><b>{said(bar.label)}</b> {said(bar.note)}</span>'
        f'<span class="track"><i style="width:{share:.1f}%;background:{colour(bar.hue)}">'
        f'</i></span><span class="text">{said(bar.text)}</span></div>'
    )


# ---- roofline


def _rooflines(rows: Rows) -> str:
    parts = []
    timed = [r for r in history.timed(rows) if r.problem["init"] == "normal"]
    for on in roofline.GPUS.values():
        mine = [r for r in timed if roofline.of_device(r.device_name) == on]
        if mine:
            parts.append(_roofline(on, mine))
    return "".join(parts) or "<p>No timed result on a GPU yet.</p>"


def _roofline(on: roofline.Gpu, rows: Rows) -> str:
    roofs = [charts.Roof("stated", on.dense_tflops, on.hbm_gbs, True)]
    best = roofline.reached(on, rows)
    if best is not None:
        slope = on.reached_gbs.rate if on.reached_gbs else None
        roofs.append(charts.Roof("reached", best.rate, slope, False))
    points = []
    fastest: dict[tuple[str, str, Sizes], tuple[float, Result]] = {}
    for r in rows:
        assert r.timing is not None
        times = [("ours", r.timing.median_us), *((p.name, p.timing.median_us) for p in r.peers)]
        for who, us in times:
            key = who, r.op, r.sizes
            if key not in fastest or us < fastest[key][0]:
                fastest[key] = us, r
    for (who, _, _), (us, r) in sorted(fastest.items(), key=lambda item: item[0][0] == "ours"):
        problem = r.case
        reached = tflops(problem.flops, us)
        name = f"stage {r.stage}" if who == "ours" else PEER_TITLES.get(who, who)
        points.append(
            charts.Point(
                intensity=problem.flops / problem.bytes,
                tflops=reached,
                tip=f"{name}, {r.size}: {reached:.0f} TFLOPS",
                hue=_hue(who),
                hollow=who != "ours",
            )
        )
    names = ["ours", *dict.fromkeys(who for who, _, _ in fastest if who != "ours")]
    copy = f"; memory reached: {on.reached_gbs.rate:.0f} GB/s, {on.reached_gbs.how}" if (
        on.reached_gbs) else ""  # fmt: skip
    ceiling = f"; tensor cores reached: {best.rate:.0f} TFLOPS, {best.how}" if best else ""
    text = (
        f"{on.name}: the fastest of each problem. Stated: {on.dense_tflops:.0f} TFLOPS dense, "
        f"{on.hbm_gbs:.0f} GB/s{ceiling}{copy}."
    )
    drawn = {
        name: charts.roofline(f"Roofline of {on.name}", roofs, points, width)
        for name, width in WIDTHS
    }
    return _figure(text, drawn, names)


def _figure(text: str, drawn: dict[str, str], names: Sequence[str]) -> str:
    both = "".join(f'<div class="{name}">{svg}</div>' for name, svg in drawn.items())
    return f"<figure><figcaption>{said(text)}{_legend(names)}</figcaption>{both}</figure>"


def _hue(who: str) -> int:
    return 0 if who == "ours" else PEER_HUES.get(who, 4)


def _legend(names: Sequence[str]) -> str:
    entries = "".join(
        f'<span><i style="background:{colour(_hue(name))}"></i>'
        f"{said(PEER_TITLES.get(name, name))}</span>"
        for name in names
    )
    return f'<span class="legend">{entries}</span>'


# ---- sizes


def _sweeps(rows: Rows) -> str:
    parts = []
    for kind, found in kinds(rows).items():
        best = history.best(found)
        families: dict[str, list[Result]] = {}
        for r in best:
            for title in r.case.series:
                families.setdefault(title, []).append(r)
        for title, members in families.items():
            if len(members) >= 2:
                parts.append(_sweep(kind, title, members))
    return "".join(parts) or (
        "<p>No sweep yet: two problems of one kind that differ in one size make a line.</p>"
    )


def _sweep(kind: tuple[Any, ...], title: str, rows: Rows) -> str:
    def sample(r: Result, took: Timing, who: str) -> charts.Sample:
        flops = r.case.flops
        low, value, high = (tflops(flops, us) for us in (took.p80_us, took.median_us, took.p20_us))
        at = r.case.series[title]
        return charts.Sample(at, low, value, high, f"{who}, {r.size}: {value:.0f} TFLOPS")

    rows = sorted(rows, key=lambda r: r.sizes)
    ours = [sample(r, r.timing, f"stage {r.stage}") for r in rows if r.timing is not None]
    lines = [charts.Series("ours", 0, ours)]
    for name in sorted({p.name for r in rows for p in r.peers}):
        samples = [
            sample(r, p.timing, PEER_TITLES.get(name, name))
            for r in rows
            for p in r.peers
            if p.name == name
        ]
        lines.append(charts.Series(name, _hue(name), samples))
    text = f"{caption(kind)}: the fastest stage at each size; bands are p20 to p80."
    drawn = {name: charts.sweep(f"TFLOPS over {title}", lines, title, w) for name, w in WIDTHS}
    return _figure(text, drawn, [line.name for line in lines])


# ---- tables


def table(name: str, head: Sequence[str], rows: Sequence[Sequence[tuple[str, Any]]]) -> str:
    """A table that sorts: each cell is its HTML and what it sorts by; numbers stand right."""
    numeric = [isinstance(key, int | float) for _, key in rows[0]]
    titles = "".join(
        f'<th{" class=n" if n else ""}><button type="button">{said(title)}</button></th>'
        for title, n in zip(head, numeric, strict=True)
    )
    lines = []
    for row in rows:
        cells = []
        for text, key in row:
            kind = ' class="n"' if isinstance(key, int | float) else ""
            cells.append(f'<td{kind} data-v="{said("" if key is None else key)}">{text}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table id="{name}"><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _text(value: object) -> tuple[str, Any]:
    return said(value), str(value)


def _number(value: float | None, form: str) -> tuple[str, Any]:
    return ("–", -1.0) if value is None else (format(value, form), round(value, 6))


def _peers(rows: Rows) -> str:
    best = history.best(rows)
    if not best:
        return "<p>No timed result on a GPU yet.</p>"
    names = sorted({p.name for r in best for p in r.peers})
    head = ["device", "problem", "L2", "stage", "us", "TFLOPS", "% of peak"]
    head += [f"x {name}" for name in names]
    lines = []
    for r in best[:NEWEST]:
        assert r.timing is not None
        line = [_text(r.device_name), (said(history.problem(r)), history.problem(r).rjust(60))]
        line += [_text(r.timing.cache_state), (f"{r.arch} {r.stage}", f"{r.arch} {r.stage:3}")]
        line += [_number(r.timing.median_us, ".1f"), _number(r.tflops, ".0f")]
        line += [_number(r.percent_of_peak, ".1f"), *(_number(r.ratio(n), ".3f") for n in names)]
        lines.append(line)
    return f"<p>{_means(best, names)}</p>{table('best', head, lines)}"


def _means(best: Rows, names: Sequence[str]) -> str:
    means = []
    for device in dict.fromkeys(r.device_name for r in best):
        for name in names:
            ratios = [x for r in best if r.device_name == device and (x := r.ratio(name))]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                title = PEER_TITLES.get(name, name)
                means.append(f"{mean:.3f} x {title} over {len(ratios)} problems on {device}")
    return "The fastest stage of each problem. Geometric means: " + said("; ".join(means)) + "."


def _history(rows: Rows) -> str:
    head = ["when", "commit", "device", "stage", "problem", "us", "p20-p80", "TFLOPS", "x peers",
            "$", "expected"]  # fmt: skip
    lines = []
    shown = [r for r in rows if r.timing is not None or not r.ok or r.expect or r.cost_usd]
    for r in shown[: -NEWEST - 1 : -1]:
        took = r.timing
        ratios = [(p.name, r.ratio(p.name)) for p in r.peers]
        lines.append(
            [
                _text(r.run[:16].replace("T", " ")),
                _text(r.environment.get("commit") or "–"),
                _text(r.device_name),
                (f"{r.arch} {r.stage}", f"{r.arch} {r.stage:3}"),
                (said(history.problem(r)), history.problem(r).rjust(60)),
                _number(took.median_us if took else None, ".1f") if r.ok else ("WRONG", -1.0),
                _text(f"{took.p20_us:.1f}-{took.p80_us:.1f}" if took else "–"),
                _number(r.tflops, ".0f"),
                (", ".join(f"{said(n)} {x:.2f}" for n, x in ratios if x), ratios[0][1] or 0.0)
                if ratios
                else ("–", -1.0),
                _number(r.cost_usd, ".3f"),
                _text(r.expect),
            ]
        )
    if not lines:
        return "<p>Nothing was timed or noted yet.</p>"
    left = len(shown) - len(lines)
    note = f"<p>The newest {len(lines)}; {left} older ones are in the ledger.</p>" if left else ""
    search = '<p><label>Show only <input type="search" data-filters="rows"></label></p>'
    return note + search + table("rows", head, lines)


def _environments(rows: Rows) -> str:
    """Each set of versions that figures were taken with, newest first."""
    found: dict[tuple[Any, ...], Result] = {}
    for r in rows:
        if r.timing is not None:
            versions = {k: v for k, v in r.environment.items() if k not in ("commit", "container")}
            found[(r.device_name, *sorted((k, str(v)) for k, v in versions.items()))] = r
    parts = []
    for r in sorted(found.values(), key=lambda r: r.run, reverse=True)[:20]:
        facts = {"device": r.device_name, **r.environment, "last run": r.run}
        for when, state in (("first round", r.gpu_before), ("last round", r.gpu_after)):
            if state:
                facts[when] = ", ".join(f"{name} {value:.0f}" for name, value in state.items())
        items = "".join(
            f"<dt>{said(k)}</dt><dd>{said('–' if v is None else v)}</dd>" for k, v in facts.items()
        )
        parts.append(f"<dl>{items}</dl>")
    method = (
        "<p>Correctness first, on small integers exactly and on the timed data within twice "
        "torch's own error. Then all variants in random turns, each sample one replay of a CUDA "
        "graph of several launches; cold: operands rotated over three times the L2. The data "
        "moves the clock, so every figure names its data.</p>"
    )
    return method + ("".join(parts) or "<p>No timed result on a GPU yet.</p>")
