"""The ledger: one Result per stage and problem, one JSON line per Result, only ever appended.

python -m cutex.results list|compare|best|merge reads it (cutex/results/history.py).
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cutex.results.appending import appending
from cutex.results.lines import Lines, parse
from cutex.results.result import Peer, Result, Timing, gbs, tflops

__all__ = [
    "Peer", "Result", "Timing", "append", "folder_given", "gbs", "ledger", "notice", "parse",
    "read", "read_all", "slug", "tflops",
]  # fmt: skip

Notice = Callable[[str], None]  # takes a sentence about a line that is skipped

_MOST_NOTICES = 5  # notices of damaged lines per ledger
_LONGEST = 80  # characters of a device's name in a file's name


def ledger(folder: Path, result: Result) -> Path:
    """The file in `folder` for this operator and device, such as OP-nvidia-h200.jsonl."""
    device = "sim" if result.device == "sim" else result.device_name
    if not re.fullmatch("[a-z0-9_]+", result.op):
        raise ValueError(f"op {result.op!r} names no ledger: small letters and digits are needed")
    return folder / f"{result.op}-{slug(device)}.jsonl"


def slug(device_name: str) -> str:
    """The name of a device as a part of a file name, such as nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")[:_LONGEST]


def append(path: Path, result: Result, *, once: bool = False) -> bool:
    """Add one line to the ledger at `path`; return False if it has this very result already. Of
    rows without a run id, which may be repetitions, all are added, unless `once`.

    The line is written completely or not at all, under a lock (cutex/results/appending.py): a
    retried call cannot record its rows twice.
    """
    with appending(path) as add:
        if result.id and any(r.key == result.key for r in _of_run(path, result.id)):
            return False
        if once and not result.id and any(r == result for r in read(path)):
            return False
        add(result.to_json())
        return True


def _of_run(path: Path, run_id: str) -> Iterator[Result]:
    """The rows of one run, read without parsing those of others."""
    mark = json.dumps({"id": run_id}, separators=(",", ":"))[1:-1]
    with path.open(errors="replace", encoding="utf-8") as lines:
        for _, result in _parsed((line for line in lines if mark in line), lambda *_: None):
            yield result


def notice(sentence: str) -> None:
    """Print a sentence about a skipped line to stderr."""
    print(f"cutex: {sentence}", file=sys.stderr)


def read(path: Path, report: Notice = lambda sentence: None) -> list[Result]:
    """All results in the ledger at `path`, oldest first.

    A torn or foreign line is skipped, and `report` is called with a sentence about it; a row
    delivered twice, or merged twice from two branches, counts once.
    """
    found: dict[Any, Result] = {}
    passed_over = 0

    def damaged(number: int, why: str) -> None:
        nonlocal passed_over
        passed_over += 1
        if passed_over <= _MOST_NOTICES:
            report(f"{path} line {number} is no row, and is passed over: {why}")

    with _no_garbage_collection(), path.open(errors="replace", encoding="utf-8") as lines:
        for number, result in _parsed(lines, damaged):
            # NOTE: rows without a run id may be repetitions, but all count
            found.setdefault(result.key if result.id else number, result)
    if passed_over > _MOST_NOTICES:
        report(f"{path}: so are {passed_over - _MOST_NOTICES} more lines")
    return list(found.values())


def _parsed(
    lines: Iterable[str], damaged: Callable[[int, str], None]
) -> Iterator[tuple[int, Result]]:
    """The Results of `lines` with their numbers, from 1; `damaged` is called for lines that hold
    none."""
    parser = Lines()
    for number, line in enumerate(lines, 1):
        try:
            yield number, parser.parse(line)
        except ValueError as error:
            if line.strip():
                damaged(number, str(error))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A context without garbage collection: parsing makes no garbage, and takes half the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def folder_given(path: Path) -> Path:
    """The folder named by --results; ValueError, in one sentence, if it does not exist."""
    if not path.is_dir():
        raise ValueError(f"--results {path}: there is no such folder; a run makes it")
    return path


def read_all(folder: Path, report: Notice = lambda sentence: None) -> list[Result]:
    """The results of all ledgers in `folder`, by file name, then oldest first; see `read`."""
    return [r for path in sorted(folder.glob("*.jsonl")) for r in read(path, report)]
