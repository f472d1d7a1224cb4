"""The report as one HTML page, without other files: a short script to sort and choose, two
themes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cutex.analysis import roofline
from cutex.arch import Arch
from cutex.problem.stage import AnyStage
from cutex.report import charts
from cutex.report.look import SCRIPT, style
from cutex.report.predictions import Predicted, predicted
from cutex.report.rows import (
    Rows,
    Sizes,
    all_ladders,
    baseline,
    caption,
    heading,
    kinds,
    ladder_bars,
    main_sizes,
    peak,
    peer_hue,
    peer_title,
)
from cutex.results import Result, Timing, history, tflops
from cutex.results.rate import rate, rate_of
from cutex.svg import colour

DOCTYPE = "<!doctype html>"
TIMELINES = Path("results/timing")
DRAW = "python -m cutex.clock --timelines"  # writes them
NEWEST = 300  # rows of history; more would make the page heavy
WIDTHS = (("wide", 1000), ("narrow", 360))  # each chart is drawn for two kinds of screen


def page(results: Iterable[Result], models: Sequence[tuple[str, str]] = ()) -> str:
    """The whole page, as text; `models` has titles and HTML of the sweeps over models' layers."""
    rows = sorted(results, key=lambda r: r.run)
    of_models = {"models": ("Models", "".join(f"<h3>{t}</h3>{x}" for t, x in models))}
    sections = {
        "ladders": ("Ladders", _ladders(rows)),
        "roofline": ("Roofline", _rooflines(rows)),
        "sweeps": ("Sizes", _sweeps(rows)),
        **(of_models if models else {}),
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
        f'{DOCTYPE}<html lang="en"><head><meta charset="utf-8"><title>cutex</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{style()}</style></head><body><header><h1>cutex</h1><p>{span}</p>"
        f'<nav>{links}</nav><button id="theme" type="button">Light or dark</button></header>'
        f"<main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def said(text: object) -> str:
    return escape(str(text))


# ---- ladders


def _ladders(rows: Rows) -> str:
    parts = []
    for op, target, ladder in all_ladders():
        parts.append(f"<h3>{heading(op, target)} <small>{target.name}</small></h3>")
        of_arch = {
            kind: found
            for kind, found in kinds(rows).items()
            if (kind.op, kind.arch) == (op, target.name)
        }
        if not of_arch:
            parts.append(_untimed(op, target, ladder))
        for kind, found in of_arch.items():
            parts.append(_ladder(target, ladder, kind, found))
        picture = TIMELINES / f"timeline-{op}-{target.name}.html"
        if picture.is_file():
            parts.append(picture.read_text(encoding="utf-8"))
        else:
            parts.append(f"<p><code>{DRAW}</code> draws where its time goes.</p>")
    return "".join(parts)


def _untimed(op: str, target: Arch, ladder: Sequence[AnyStage]) -> str:
    """The stages of a ladder that no GPU has run, with predicted rates and bands if there are."""
    found = predicted(op, target.name)
    if not found:
        items = "".join(
            f"<li value={s.number}><b>{said(s.title)}</b> {said(s.idea)}</li>" for s in ladder
        )
        return f"<p>Not timed yet: no {target.board} has run it.</p><ol>{items}</ol>"
    blocks, sizes = [], list(dict.fromkeys(p.size for p in found))
    for size in sizes:
        of_size = {p.stage: p for p in found if p.size == size}
        bars = [predicted_bar(s, of_size.get(s.number)) for s in ladder]
        one = next(iter(of_size.values())).rate
        drawn = "".join(_bar(bar, one.peak) for bar in bars)
        blocks.append(
            f'<div data-size="{said(size)}"><p class="size">{said(size)}: {one.unit}; a full bar '
            f"is the stated peak, {one.peak:.0f}</p>{drawn}</div>"
        )
    options = "".join(f"<option>{said(size)}</option>" for size in sizes)
    return (
        f'<figure class="ladder"><figcaption>Predicted, not measured: no {target.board} has run '
        "it. By the simulator's clock on Gaussian data, with the band in which it should be. "
        f"<label>Size <select>{options}</select></label></figcaption>{''.join(blocks)}</figure>"
    )


def predicted_bar(stage: AnyStage, found: Predicted | None) -> charts.Bar:
    """The bar of a predicted stage."""
    label = f"{stage.number} {stage.title}"
    if found is None:
        return charts.Bar(label, stage.idea, None, "not predicted")
    return charts.Bar(label, stage.idea, found.rate.value, str(found))


def _ladder(target: Arch, ladder: Sequence[AnyStage], kind: history.Kind, rows: Rows) -> str:
    sizes = main_sizes(rows)[:12]
    rates = {r.sizes: x for r in sizes if (x := rate_of(r))}
    options = "".join(f"<option>{said(r.size)}</option>" for r in sizes)
    blocks = "".join(
        f'<div data-size="{said(r.size)}"><p class="size">{said(r.size)}: '
        f"{rates[r.sizes].unit}</p>"
        f"{''.join(_bar(b, rates[r.sizes].peak) for b in ladder_bars(ladder, rows, r.sizes))}</div>"
        for r in sizes
    )
    first = peer_title(baseline(kind.op), kind.op)
    return (
        f'<figure class="ladder"><figcaption>{said(caption(kind))}: TFLOPS (GB/s and '
        f"microseconds where memory binds), median, and speed relative to {first} in the same run. "
        f"A full bar is the stated peak: {peak(rows[0]):.0f} TFLOPS, or "
        f"{target.hbm_gbs:.0f} GB/s. "
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
        here = [r for r in timed if roofline.of_device(r.device_name) == on]
        mine = [r for r in here if peak(r) <= on.dense_tflops]  # the roof is of 16-bit types
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
        name = f"stage {r.stage}" if who == "ours" else peer_title(who, r.op)
        points.append(
            charts.Point(
                intensity=problem.flops / problem.bytes,
                tflops=reached,
                tip=f"{name}, {r.size}: {reached:.0f} TFLOPS",
                hue=peer_hue(who),
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
        name: charts.roofline(f"TFLOPS over FLOP per byte, {on.name}", roofs, points, width)
        for name, width in WIDTHS
    }
    return _figure(text, drawn, names)


def _figure(text: str, drawn: dict[str, str], names: Sequence[str]) -> str:
    both = "".join(f'<div class="{name}">{svg}</div>' for name, svg in drawn.items())
    return f"<figure><figcaption>{said(text)}{_legend(names)}</figcaption>{both}</figure>"


def _legend(names: Sequence[str]) -> str:
    entries = "".join(
        f'<span><i style="background:{colour(peer_hue(name))}"></i>{said(peer_title(name))}</span>'
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


def _sweep(kind: history.Kind, title: str, rows: Rows) -> str:
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
            sample(r, p.timing, peer_title(name, r.op))
            for r in rows
            for p in r.peers
            if p.name == name
        ]
        lines.append(charts.Series(name, peer_hue(name), samples))
    text = f"{caption(kind)}: the fastest stage at each size; bands are p20 to p80."
    what = f"TFLOPS over {title}, {kind.dtype}, {kind.device_name}"
    drawn = {name: charts.sweep(what, lines, title, w) for name, w in WIDTHS}
    return _figure(text, drawn, [line.name for line in lines])


# ---- tables


def table(name: str, head: Sequence[str], rows: Sequence[Sequence[tuple[str, Any]]]) -> str:
    """A sortable table: each cell is its HTML and its sort key; numbers are flush right."""
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
    head = ["device", "problem", "L2", "stage", "us", "TFLOPS", "GB/s", "% of peak"]
    head += [f"x {name}" for name in names]
    lines = []
    for r in best[:NEWEST]:
        assert r.timing is not None
        line = [_text(r.device_name), (said(history.problem(r)), history.problem(r).rjust(60))]
        line += [_text(r.timing.cache_state), (f"{r.arch} {r.stage}", f"{r.arch} {r.stage:3}")]
        found = rate(r.case, r.arch, r.timing.median_us)
        line += [_number(r.timing.median_us, ".1f")]
        line += [_number(None if found.by_memory else found.value, ".0f"), _number(r.gbs, ".0f")]
        line += [_number(found.percent, ".1f"), *(_number(r.ratio(n), ".3f") for n in names)]
        lines.append(line)
    return f"<p>{_means(best, names)}</p>{table('best', head, lines)}"


def _means(best: Rows, names: Sequence[str]) -> str:
    means = []
    for device in dict.fromkeys(r.device_name for r in best):
        for name in names:
            ratios = [x for r in best if r.device_name == device and (x := r.ratio(name))]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                title = peer_title(name)
                means.append(f"{mean:.3f} x {title} over {len(ratios)} problems on {device}")
    return (
        "The fastest stage of each problem; TFLOPS where the tensor cores bind, and the part of "
        "the peak of what binds. Geometric means: " + said("; ".join(means)) + "."
    )


def _history(rows: Rows) -> str:
    head = ["when", "commit", "device", "stage", "problem", "us", "p20-p80", "TFLOPS", "GB/s",
            "x peers", "$", "expected"]  # fmt: skip
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
                _number(x.value if (x := rate_of(r)) and not x.by_memory else None, ".0f"),
                _number(r.gbs, ".0f"),
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
    """Each set of versions with which figures were taken, newest first."""
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
