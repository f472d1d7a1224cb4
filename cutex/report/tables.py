"""The ladders and the sweeps as Markdown tables: all of them, or those of a README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cutex.arch import Arch
from cutex.problem import DEFAULT_OP, problem_class
from cutex.problem.stage import AnyStage
from cutex.report.predictions import Predicted, predicted
from cutex.report.rows import (
    CACHE,
    DATA,
    Sizes,
    all_ladders,
    baseline,
    heading,
    last_peers,
    peak,
    peer_title,
)
from cutex.results import Result
from cutex.results.rate import rate, rate_of

Kind = tuple[str, str, str, str]  # device, dtype, data, state of the L2
LONG = 10  # stages from which README shows a ladder whole though no GPU has run it
Table = tuple[str, list[str], list[list[str]]]  # a caption, the columns' heads, rows


def ladders(results: Iterable[Result], docs: str = "", main: bool = False) -> str:
    """Return the ladders as Markdown: for each operator and arch one table per GPU and kind of
    data, or the bare ladder if it is untimed.

    docs: the way from the page to the folder of pictures and pages, such as "docs/". With `main`
    only the problems that --op confirm of modal_app.py times, and of ladders without figures only
    the names.
    """
    timed: dict[tuple[str, str], dict[Kind, list[Result]]] = {}
    counted: dict[tuple[str, str], dict[int, Result]] = {}
    for r in results:
        if r.ok and r.sim_counts:
            counted.setdefault((r.op, r.arch), {})[r.stage] = r
        if r.ok and r.timing is not None:
            kind = r.device_name, r.problem["dtype"], r.problem["init"], r.timing.cache_state
            timed.setdefault((r.op, r.arch), {}).setdefault(kind, []).append(r)
    parts, brief, bare = [], [], []
    for op, target, ladder in all_ladders():
        tables = timed.get((op, target.name), {})
        counts = counted.get((op, target.name), {})
        found = predicted(op, target.name)
        whole = tables or counts or (found and len(ladder) >= LONG)
        if main and not whole:
            ends = _first_and_last(op, target, found)
            brief += ends
            bare += [] if ends else [heading(op, target)]
            continue
        parts.append(f"### {heading(op, target)} ({target.name})")
        if tables:
            parts.append(f"![The ladder as bars]({docs}{picture_name(op, target)})")
        for kind, timings in tables.items():
            if shown := [r for r in timings if not main or _is_main(r)]:
                parts += _with_counts(_timed_table(target, ladder, kind, shown), ladder, counts)
        if not tables:
            parts += _with_counts(_untimed_table(target, ladder, docs), ladder, counts)
    if brief:
        head = ["ladder", "case", "first stage", "last stage"]
        parts.append(
            "Other ladders that no GPU has run: first and last stages as the simulator's clock "
            f"predicts them; [results.md]({docs}results.md) has those between."
        )
        parts.append(_table(head, brief))
    if bare:
        parts.append(f"Ladders without figures yet, checked in the simulator: {', '.join(bare)}.")
    return "\n\n".join(parts)


def _first_and_last(op: str, target: Arch, found: Sequence[Predicted]) -> list[list[str]]:
    """For each size a row: the predicted rates of the first and of the last stage."""
    rows = []
    for size in dict.fromkeys(p.size for p in found):
        of_size = sorted((p for p in found if p.size == size), key=lambda p: p.stage)
        ends = [f"{p} {p.rate.unit}" if not p.rate.by_memory else str(p) for p in of_size]
        rows.append([f"{heading(op, target)} ({target.name})", size, ends[0], ends[-1]])
    return rows


def _is_main(r: Result) -> bool:
    cases = problem_class(r.op).cases["confirm"]
    return any(all(r.problem.get(name) == value for name, value in c.items()) for c in cases)


def _timed_table(
    target: Arch, ladder: Sequence[AnyStage], kind: Kind, results: list[Result]
) -> Table:
    device_name, dtype, init, cache_state = kind
    newest: dict[tuple[int, Sizes], Result] = {}
    for r in sorted(results, key=lambda r: r.run):
        newest[r.stage, r.sizes] = r
    sizes = {r.sizes: r.size for r in results}
    peers = sorted({peer.name for r in newest.values() for peer in r.peers})
    first = baseline(ladder[0].op)

    def cell(r: Result | None) -> str:
        found = rate_of(r) if r is not None else None
        if r is None or found is None:
            return "–"
        ratio = r.ratio(first)
        return f"{found}" + (f" ({ratio:.2f})" if ratio is not None else "")

    rows = [
        [str(s.number), s.idea, *(cell(newest.get((s.number, which))) for which in sizes)]
        for s in ladder
    ]
    for name in peers:
        cells, version = [], ""
        for which in sizes:
            same = [r for (_, size), r in newest.items() if size == which]
            last = next(((r, p) for r, p in last_peers(same) if p.name == name), None)
            if last is None:
                cells.append("–")
                continue
            r, peer = last
            version = peer.version
            cells.append(str(rate(r.case, r.arch, peer.timing.median_us)))
        rows.append(["", f"{peer_title(name, ladder[0].op)} ({version})", *cells])
    dates = sorted({r.run[:10] for r in newest.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    named = peer_title(first, ladder[0].op)
    beside = f" (and ratio to {named} in the same run)" if first in peers else ""
    memory = any((x := rate_of(r)) and x.by_memory for r in newest.values())
    other = ", GB/s and microseconds where memory binds" if memory else ""
    caption = (
        f"TFLOPS{other}{beside}, median, on one {device_name}: {dtype}, {DATA.get(init, init)}, "
        f"{CACHE.get(cache_state, cache_state)}, "
        f"{when}. Stated dense peak: {peak(results[0]):.0f}."
    )
    return caption, ["stage", "what it adds", *sizes.values()], rows


def _untimed_table(target: Arch, ladder: Sequence[AnyStage], docs: str) -> Table:
    caption = f"Not timed yet: no {target.board} has run it. The tests check it in the simulator."
    head, rows = ["stage", "what it adds"], [[str(s.number), s.idea] for s in ladder]
    found = predicted(ladder[0].op, target.name)
    sizes = list(dict.fromkeys(p.size for p in found))
    if found:
        units = " and ".join(dict.fromkeys(p.rate.unit for p in found))
        caption += (
            f" {units} are predicted, not measured: by the simulator's clock, on Gaussian data, "
            f"with the band in which they should be ([time.md]({docs}time.md))."
        )
        by = {(p.stage, p.size): p for p in found}
        head += [f"{size}, predicted" for size in sizes]
        for row, s in zip(rows, ladder, strict=True):
            row += [str(by.get((s.number, size), "–")) for size in sizes]
    return caption, head, rows


def _with_counts(
    table: Table, ladder: Sequence[AnyStage], counts: Mapping[int, Result]
) -> tuple[str, str]:
    """The caption and the table as Markdown, with columns of transactions if they were counted."""
    caption, head, rows = table
    if counts:
        sizes = dict.fromkeys(r.size for r in counts.values())
        caption += (
            f" Sectors of global memory (32 bytes) and wavefronts of shared memory (128), as asked "
            f"for by lanes: of {', '.join(sizes)}, counted in the simulator (`--count`)."
        )
        head = [*head[:2], "sectors", "wavefronts", "without conflicts", *head[2:]]
        names = ("sectors", "wavefronts", "least_wavefronts")
        for row, s in zip(rows, ladder, strict=False):  # those of peers follow
            found = counts[s.number].sim_counts if s.number in counts else None
            row[2:2] = [f"{found[name]:,}" if found else "–" for name in names]
        for row in rows[len(ladder) :]:
            row[2:2] = [""] * len(names)
    return caption, _table(head, rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", "---", *("---:" for _ in head[2:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def picture_name(op: str, target: Arch) -> str:
    return f"ladder-{target.name}.svg" if op == DEFAULT_OP else f"ladder-{op}-{target.name}.svg"
