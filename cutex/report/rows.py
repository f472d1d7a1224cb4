"""The rows of a report: by ladder, by kind of figure and by size, and their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cutex.arch import ARCHS, Arch, arch
from cutex.problem import OPS, problem_class
from cutex.problem.stage import AnyStage, ladders
from cutex.report import charts
from cutex.results import Peer, Result, history
from cutex.results.rate import rate, rate_of
from cutex.svg import HUES

DATA = {
    "normal": "Gaussian data",
    "uniform": "uniform data",
    "int": "small integers",
    "zeros": "zeros",
}
CACHE = {"cold": "cold L2", "hot": "hot L2"}
OTHER_HUE = 5  # the hue of a peer that no operator lists

Sizes = tuple[Any, ...]
Rows = Sequence[Result]


def peer_title(name: str, op: str | None = None) -> str:
    """What a peer is called beside an operator; beside several, its name if their titles differ."""
    titles = _peer_titles().get(name, {})
    if op in titles:
        return titles[op]
    return name if len({*titles.values()}) != 1 else next(iter(titles.values()))


def peer_hue(name: str) -> int:
    """The colour of "ours" or of a peer."""
    names = ["ours", *_peer_titles()]
    if name not in names:
        return OTHER_HUE
    index = names.index(name)  # the first hue is ours alone
    return index if index < HUES else 1 + (index - 1) % (HUES - 1)


def _peer_titles() -> dict[str, dict[str, str]]:
    """By name, then by operator."""
    found: dict[str, dict[str, str]] = {}
    for op in OPS:
        for name, peer in problem_class(op).peers.items():
            found.setdefault(name, {})[op] = peer.title
    return found


def kinds(rows: Rows) -> dict[history.Kind, list[Result]]:
    """Timed rows, grouped by the properties that make figures comparable."""
    found: dict[history.Kind, list[Result]] = {}
    for r in history.timed(rows):
        found.setdefault(history.kind(r), []).append(r)
    return found


def caption(kind: history.Kind) -> str:
    data = DATA.get(kind.init, kind.init)
    cache = CACHE.get(kind.cache_state, kind.cache_state)
    return f"{kind.device_name}, {kind.dtype}, {data}, {cache}"


def peak(result: Result) -> float:
    """The stated TFLOPS of the units that compute a result's problem."""
    target = arch(result.arch)
    return result.case.needs.peak_tflops(target) or target.fp32_tflops


def baseline(op: str) -> str:
    """The peer to which speeds are relative."""
    return next(iter(problem_class(op).peers))


def heading(op: str, target: Arch) -> str:
    """The heading of an operator's ladder on an arch."""
    return target.title if len(OPS) == 1 else f"{problem_class(op).title} on {target.title}"


def all_ladders() -> Iterator[tuple[str, Arch, list[AnyStage]]]:
    """Yield every operator, every arch with a ladder for it, and that ladder."""
    for op in OPS:
        found = ladders(op)
        for target in ARCHS.values():
            if target.name in found.archs:
                yield op, target, found.stages(target.name)


def newest(rows: Rows) -> dict[tuple[int, Sizes], Result]:
    """The newest row for each pair of stage and sizes."""
    return {(r.stage, r.sizes): r for r in sorted(rows, key=lambda r: r.run)}


def main_sizes(rows: Rows) -> list[Result]:
    """One row of each size: those with the most stages first, among them the larger first."""
    stages: dict[Sizes, set[int]] = {}
    for r in rows:
        stages.setdefault(r.sizes, set()).add(r.stage)
    one = {r.sizes: r for r in rows}
    return sorted(one.values(), key=lambda r: (-len(stages[r.sizes]), -r.case.flops, r.sizes))


def ladder_bars(ladder: Sequence[AnyStage], rows: Rows, sizes: Sizes) -> list[charts.Bar]:
    """A bar for each stage of the ladder, then one for each peer of its last run."""
    found = newest([r for r in rows if r.sizes == sizes])
    bars = []
    for s in ladder:
        r = found.get((s.number, sizes))
        label = f"{s.number} {s.title}"
        value = rate_of(r) if r is not None else None
        if r is None or value is None:
            bars.append(charts.Bar(label, s.idea, None, "not timed"))
            continue
        ratio = r.ratio(baseline(r.op))
        text = f"{value}" + (f" ({ratio:.2f}x)" if ratio is not None else "")
        bars.append(charts.Bar(label, s.idea, value.value, text))
    for row, peer in last_peers(list(found.values())):
        value = rate(row.case, row.arch, peer.timing.median_us)
        title = peer_title(peer.name, row.op)
        hue = peer_hue(peer.name)
        bars.append(charts.Bar(title, peer.version, value.value, str(value), hue))
    return bars


def last_peers(rows: Rows) -> list[tuple[Result, Peer]]:
    """The latest timing of each peer, with the row of its run."""
    found = {p.name: (r, p) for r in sorted(rows, key=lambda r: (r.run, r.stage)) for p in r.peers}
    return [found[name] for name in sorted(found)]
