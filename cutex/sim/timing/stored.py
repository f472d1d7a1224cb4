"""Records in a file: the events of a kernel's warps, so that its time can be predicted again."""

from __future__ import annotations

import gc
import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cutex.sim.timing import events
from cutex.sim.timing.events import Added, Fetched, Load, Record
from cutex.sim.timing.lengths import Lengths
from cutex.sim.timing.sampled import Sampled
from cutex.sim.timing.trace import Sharing, Traced

Recorded = Traced | Lengths | Sampled

_KINDS: tuple[Any, ...] = (
    events.Work, events.Wait, events.Arrive, events.Load, events.Store, events.Mma, events.Commit,
    events.Group, events.Named, events.Cluster, events.Touch, events.Columns, events.Settled,
    events.Reply, events.Copy, events.Fetch, events.Need, events.Landed,
    events.Peer, events.Send,
)  # fmt: skip


def save(traced: Mapping[str, Recorded], file: Path) -> None:
    """Write records by name. Programs that several warps or records share are written once; of a
    load's source the tensor is written, and a number for the box.
    """
    programs: dict[str, int] = {}
    rows: dict[str, Any] = {}
    for name, t in traced.items():
        if isinstance(t, Lengths):
            both = [_row(one, programs) for one in (t.short, t.long)]
            rows[name] = {
                "records": both, "steps": t.steps, "tiles": t.tiles, "tile_flops": t.tile_flops,
            }  # fmt: skip
        elif isinstance(t, Sampled):
            every = {n: _row(replace(t.first, record=r), programs) for n, r in t.records.items()}
            rows[name] = {"clusters": every, "dynamic": t.dynamic}
        else:
            rows[name] = _row(t, programs)
    whole = {"rows": rows, "programs": [json.loads(p) for p in programs]}
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(file, "wb", mtime=0) as out:
        out.write(json.dumps(whole, separators=(",", ":")).encode())


def _row(t: Traced, programs: dict[str, int]) -> dict[str, Any]:
    row = asdict(t)
    del row["record"]["entered"]
    boxes: dict[tuple[Any, ...], int] = {}
    row["record"]["programs"] = {
        warp: programs.setdefault(json.dumps(_plain(program, boxes)), len(programs))
        for warp, program in t.record.programs.items()
    }
    row["record"]["barriers"] = [[*at, n] for at, n in t.record.barriers.items()]
    return row


def _plain(program: list[Any], boxes: dict[tuple[Any, ...], int]) -> list[Any]:
    found = []
    for e in program:
        if isinstance(e, Load):
            e = e._replace(source=(e.source[0], boxes.setdefault(e.source, len(boxes))))
        found.append([_KINDS.index(type(e)), *e])
    return found


class StoredRecords(Mapping[str, "Recorded"]):
    """The records of some files by name; each is decoded when it is first asked for."""

    def __init__(self, *files: Path) -> None:
        self._rows: dict[str, tuple[dict[str, Any], list[Any]]] = {}  # of JSON, and its programs
        self._decoded: dict[str, Recorded] = {}
        with _no_collection():
            for file in files:
                whole = json.loads(gzip.decompress(file.read_bytes()))
                programs = whole["programs"]
                self._rows |= {name: (row, programs) for name, row in whole["rows"].items()}

    def __getitem__(self, name: str) -> Recorded:
        if name not in self._decoded:
            with _no_collection():
                self._decoded[name] = _decoded(*self._rows[name])
        return self._decoded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def load(*files: Path) -> StoredRecords:
    """The records that `save` wrote to these files."""
    return StoredRecords(*files)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is looked for: there is none, among millions of new objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _decoded(row: dict[str, Any], programs: list[Any]) -> Recorded:
    if "clusters" in row:
        every = {int(n): _traced(one, programs) for n, one in row["clusters"].items()}
        return Sampled(every[0], {n: one.record for n, one in every.items()}, row["dynamic"])
    if "steps" not in row:
        return _traced(row, programs)
    short, long = (_traced(one, programs) for one in row["records"])
    rest = (tuple(row[name]) for name in ("steps", "tiles", "tile_flops"))
    return Lengths(short, long, *rest)


def _program(programs: list[Any], number: int) -> list[Any]:
    """A program, whose events are decoded where they are not yet, for all that share it."""
    found = programs[number]
    if found and isinstance(found[0], list):
        found = programs[number] = [_event(e) for e in found]
    return found


def _event(row: list[Any]) -> Any:
    return _KINDS[row[0]](*[_tuple(x) if type(x) is list else x for x in row[1:]])


def _tuple(x: list[Any]) -> Any:
    return tuple([_tuple(y) if type(y) is list else y for y in x])


def _traced(row: dict[str, Any], programs: list[Any]) -> Traced:
    r = dict(row["record"])
    r["programs"] = {int(w): _program(programs, i) for w, i in r["programs"].items()}
    r["barriers"] = {(cta, offset): n for cta, offset, n in r["barriers"]}
    for name in ("cta", "place", "roles"):
        r[name] = {int(w): x for w, x in r[name].items()}
    r["fetched"] = {int(at): _tuple(x) for at, x in r.get("fetched", {}).items()}
    r["fetched"] = {at: Fetched(*x) for at, x in r["fetched"].items()}
    r["added"] = Added(*r.get("added", ()))
    sharing = {int(m): Sharing(**s) for m, s in row["sharing"].items()}
    grid, overlaps, stack = tuple(row["grid"]), row.get("overlaps", False), row.get("stack", 0)
    return Traced(Record(**r), grid, row["per_sm"], sharing, row["name"], overlaps, stack)
