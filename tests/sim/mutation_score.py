"""Run mutants of our kernels, and count the outcomes of each operator's.

    python tests/sim/mutation_score.py results.jsonl [--at-most 6] [--subject gemm] [--processes 8]

appends a line for each mutant that the file does not have yet, and prints the table of all that it
has. A mutant is run in the default order, and without a report also in the others. With
``--subject call`` the kernels are those of call_subjects.py, which public functions launch.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from equivalent import why
from mutants import ALL, Site, sites
from subjects import ORDERS, SUBJECTS, Subject

KINDS = ("found", "advisory", "values", "nothing")  # "raised": of the simulator itself


def spread(items: Sequence[Any], at_most: int) -> list[Any]:
    """Return at most so many of them, spread evenly."""
    if len(items) <= at_most:
        return list(items)
    return [items[i * len(items) // at_most] for i in range(at_most)]


def mutants(subject: Subject, at_most: int) -> Iterator[Site]:
    for operator in ALL:
        yield from spread(list(sites(subject.kernel, operator)), at_most)


def run(subject: Subject, site: Site, orders: Sequence[dict[str, Any]] = ORDERS) -> dict[str, Any]:
    """The outcome of a mutant: that of the first order with a report; where nothing is told, why it
    may be as right as the kernel, if that can be derived.
    """
    worst, seen = None, {}
    for order in orders:
        outcome = subject.outcome(site.mutant, **order)
        if worst is None or KINDS.index(outcome.kind) < KINDS.index(worst.kind):
            worst, seen = outcome, order
        if outcome.kind != "nothing":
            break
    assert worst is not None
    return {
        "subject": subject.name,
        "operator": site.operator,
        "line": site.line,
        "text": site.text,
        "kind": worst.kind,
        "order": " ".join(map(str, seen.values())) or "fifo",
        "message": worst.message[:400],
        "why": why(subject, site) if worst.kind == "nothing" else "",
    }


def _run(subject: Subject, site: Site, orders: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same; of a mutant on which the simulator itself fails, how."""
    try:
        return run(subject, site, orders)
    except Exception as error:
        what = {"subject": subject.name, "operator": site.operator, "line": site.line}
        return {**what, "text": site.text, "kind": "raised", "message": f"{error!r:.400}"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the outcomes by operator."""
    out = [
        "| operator | mutants | found | advisory | values | equivalent | nothing |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for operator in ALL:
        kinds = Counter(
            "equivalent" if r.get("why") else r["kind"] for r in rows if r["operator"] == operator
        )
        if kinds:
            cells = [kinds.total(), *(kinds[k] for k in (*KINDS[:-1], "equivalent", "nothing"))]
            out.append(f"| {operator} | {' | '.join(map(str, cells))} |")
    left = [r for r in rows if r["kind"] in ("nothing", "raised") and not r.get("why")]
    out += ["", f"{len(left)} of {len(rows)} of which nothing is told or derived:"]
    out += [f"- {r['subject']}: {r['operator']}, line {r['line']}: {r['text']}" for r in left]
    reasons = Counter(r["why"] for r in rows if r.get("why"))
    out += ["", *(f"- {n}: {reason}" for reason, n in reasons.most_common())]
    return "\n".join(out)


@cache
def _every() -> dict[str, Subject]:
    from call_subjects import CALLS  # NOTE: imports every operator
    from row_subjects import ROWS

    return {**SUBJECTS, **CALLS, **ROWS}


@cache
def _mutants(name: str, at_most: int) -> list[Site]:
    return list(mutants(_every()[name], at_most))


def _rows(args: argparse.Namespace, rows: list[dict[str, Any]], task: tuple[int, str]) -> None:
    """Append the outcomes of a share of a kernel's mutants, those that ``rows`` lacks."""
    share, name = task
    known = {(r["operator"], r["line"]): r for r in rows if r["subject"] == name}
    orders = ORDERS[:1] if args.default_order else ORDERS
    for site in _mutants(name, args.at_most)[share :: args.shares]:
        row = known.get((site.operator, site.line))
        if row is None:
            row = _run(_every()[name], site, orders)
        elif row["kind"] == "nothing" and "why" not in row:
            row = row | {"why": why(_every()[name], site)}
        else:
            continue
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def names(parts: str) -> list[str]:
    """The kernels whose name contains one of the parts."""
    from call_subjects import CALLS
    from row_subjects import ROWS

    groups = {"stage": SUBJECTS, "call": CALLS, "row": ROWS}
    found: list[str] = []
    for part in parts.split(";"):
        found += groups.get(part) or [name for name in _every() if part in name]
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--at-most", type=int, default=6, help="of one operator in one kernel")
    parser.add_argument(
        "--subject",
        default="stage;call;row",
        help="parts of the names of the kernels to mutate, or whose groups, with semicolons",
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--shares", type=int, default=1, help="of a kernel's mutants, by process")
    parser.add_argument("--default-order", action="store_true", help="no other orders")
    args = parser.parse_args()
    texts = args.results.read_text().splitlines() if args.results.exists() else []
    rows = [json.loads(text) for text in texts]
    tasks = [(share, name) for share in range(args.shares) for name in names(args.subject)]
    with get_context("spawn").Pool(args.processes) as pool:
        for _ in pool.imap_unordered(partial(_rows, args, rows), tasks):
            pass
    texts = args.results.read_text().splitlines()
    last = {(r["subject"], r["operator"], r["line"]): r for r in map(json.loads, texts)}
    print(table(list(last.values())))


if __name__ == "__main__":
    main()
