"""Records in a file: the events of a kernel's warps, so that its time can be predicted again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cutex.sim.timing import events
from cutex.sim.timing.events import Fetched, Load, Record
from cutex.sim.timing.lengths import Lengths
from cutex.sim.timing.trace import Sharing, Traced

_KINDS: tuple[Any, ...] = (
    events.Work, events.Wait, events.Arrive, events.Load, events.Store, events.Mma, events.Commit,
    events.Group, events.Named, events.Cluster, events.Touch, events.Columns, events.Settled,
    events.Reply, events.Copy, events.Fetch, events.Need, events.Landed,
    events.Peer, events.Send,
)  # fmt: skip


def save(traced: Mapping[str, Traced | Lengths], file: Path) -> None:
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


def load(file: Path) -> dict[str, Traced | Lengths]:
    """The records that `save` wrote to ``file``."""
    whole = json.loads(gzip.decompress(file.read_bytes()))
    programs = [[_event(e) for e in program] for program in whole["programs"]]
    found: dict[str, Traced | Lengths] = {}
    for name, row in whole["rows"].items():
        if "steps" in row:
            short, long = (_traced(one, programs) for one in row["records"])
            rest = (tuple(row[name]) for name in ("steps", "tiles", "tile_flops"))
            found[name] = Lengths(short, long, *rest)
        else:
            found[name] = _traced(row, programs)
    return found


def _event(row: list[Any]) -> Any:
    return _KINDS[row[0]](*(_tuple(x) for x in row[1:]))


def _tuple(x: Any) -> Any:
    return tuple(_tuple(y) for y in x) if isinstance(x, list) else x


def _traced(row: dict[str, Any], programs: list[list[Any]]) -> Traced:
    r = row["record"]
    r["programs"] = {int(w): programs[i] for w, i in r["programs"].items()}
    r["barriers"] = {(cta, offset): n for cta, offset, n in r["barriers"]}
    for name in ("cta", "place", "roles"):
        r[name] = {int(w): x for w, x in r[name].items()}
    r["fetched"] = {int(at): Fetched(*x) for at, x in r.get("fetched", {}).items()}
    sharing = {int(m): Sharing(**s) for m, s in row["sharing"].items()}
    return Traced(Record(**r), tuple(row["grid"]), row["per_sm"], sharing, row["name"])
