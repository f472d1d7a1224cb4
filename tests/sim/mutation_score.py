"""Run mutants of our kernels, and count the outcomes of each operator's.

    python tests/sim/mutation_score.py results.jsonl [--at-most 6] [--subject gemm] [--share 0/2]

appends a line for each mutant that the file does not have yet, and prints the table of all that it
has. A mutant is run in the default order, and without a report also in the others.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mutants import ALL, Site, sites
from subjects import ORDERS, SUBJECTS, Subject

KINDS = ("found", "advisory", "values", "nothing")


def spread(items: Sequence[Any], at_most: int) -> list[Any]:
    """Return at most so many of them, spread evenly."""
    if len(items) <= at_most:
        return list(items)
    return [items[i * len(items) // at_most] for i in range(at_most)]


def mutants(subject: Subject, at_most: int) -> Iterator[Site]:
    for operator in ALL:
        yield from spread(list(sites(subject.kernel, operator)), at_most)


def run(subject: Subject, site: Site, orders: Sequence[dict[str, Any]] = ORDERS) -> dict[str, Any]:
    """The outcome of a mutant: that of the first order with a report."""
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
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the outcomes by operator."""
    out = [
        "| operator | mutants | found | advisory | values | nothing |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for operator in ALL:
        count = Counter(r["kind"] for r in rows if r["operator"] == operator)
        if count:
            cells = [count.total(), *(count[kind] for kind in KINDS)]
            out.append(f"| {operator} | {' | '.join(map(str, cells))} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--at-most", type=int, default=6, help="of one operator in one kernel")
    parser.add_argument("--subject", default="", help="part of the names of the kernels to mutate")
    parser.add_argument("--share", default="0/1", help="which of how many shares of the kernels")
    args = parser.parse_args()
    number, of = map(int, args.share.split("/"))
    rows = (
        [json.loads(t) for t in args.results.read_text().splitlines()]
        if args.results.exists()
        else []
    )
    done = {(r["subject"], r["operator"], r["line"]) for r in rows}
    for subject in [s for s in SUBJECTS.values() if args.subject in s.name][number::of]:
        for site in mutants(subject, args.at_most):
            if (subject.name, site.operator, site.line) not in done:
                rows.append(run(subject, site))
                with args.results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
