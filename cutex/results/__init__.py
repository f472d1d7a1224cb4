"""The ledger: one Result per stage and problem, one JSON line per Result, only ever appended.

python -m cutex.results list|compare|best reads it (cutex/results/history.py).
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from cutex.problem import BESIDE_SIZES, Problem, problem_class, size_name


@dataclass(frozen=True)
class Timing:
    """How long one variant took on a GPU, in microseconds per launch, launch cost excluded."""

    median_us: float
    p20_us: float
    p80_us: float
    n: int  # samples; each is the mean of `launches` launches in one CUDA graph
    launches: int
    cache_state: str  # "cold": inputs rotated over at least 3x L2; "hot": the same inputs each time
    launch_us: float  # host time of one eager call, median


@dataclass(frozen=True)
class Peer:
    """A kernel by others, timed interleaved with ours in the same process."""

    name: str
    version: str
    timing: Timing


@dataclass(frozen=True)
class Result:
    """What one stage did on one problem and one device."""

    op: str
    stage: int
    title: str
    arch: str
    device: str  # "cuda" | "sim"
    device_name: str
    problem: dict[str, Any]  # its fields: sizes, dtype, init, seed
    config: dict[str, Any]
    ok: bool
    max_error: float | None  # None where the output holds a NaN, or there is no output
    tolerance: float
    message: str  # why it is ok or is not
    run: str  # UTC time at which the run began; shared by all that was interleaved
    environment: dict[str, Any]  # versions, commit
    compile_seconds: float = 0.0
    from_cache: bool = False
    # on a GPU
    timing: Timing | None = None
    tflops: float | None = None
    gbs: float | None = None
    percent_of_peak: float | None = None  # of the stated dense peak
    peers: list[Peer] = field(default_factory=list)
    gpu_before: dict[str, float] | None = None  # clock_mhz, power_w, temperature_c under load
    gpu_after: dict[str, float] | None = None
    # in the simulator
    sim_seconds: float | None = None
    sim_instructions: int | None = None
    sim_orders: list[str] = field(default_factory=list)
    # why it was run, and what it cost
    id: str = ""  # of the run: the same run, delivered twice, is recorded once
    expect: str = ""  # the note: what was expected and why, written down before the run
    cost_usd: float | None = None  # this row's share of what the GPU was rented for

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The values of all of the problem's fields but dtype, init and seed."""
        return tuple([v for name, v in self.problem.items() if name not in BESIDE_SIZES])

    @property
    def size(self) -> str:
        """The sizes as one word."""
        return size_name(self.op, self.problem)

    @property
    def case(self) -> Problem:
        """The problem; ValueError or TypeError if this version does not know it."""
        return _case(self.op, tuple(self.problem.items()))

    def ratio(self, peer: str) -> float | None:
        """Speed relative to `peer` in the same run: above 1 is faster than it."""
        for p in self.peers:
            if p.name == peer and self.timing is not None:
                return p.timing.median_us / self.timing.median_us
        return None

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of a row: two rows of one key are one result, delivered twice."""
        what = self.op, self.stage, self.arch, self.device_name, *self.problem.values()
        return self.id or self.run, *what

    def to_json(self) -> str:
        return json.dumps(_plain(asdict(self)), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The Result of one line; fields that this version does not know are ignored."""
        return _result(json.loads(line))


@lru_cache(maxsize=4096)
def _case(op: str, problem: tuple[tuple[str, Any], ...]) -> Problem:
    return problem_class(op)(**dict(problem))


def tflops(flops: int, microseconds: float) -> float:
    return flops / microseconds / 1e6


def gbs(num_bytes: int, microseconds: float) -> float:
    return num_bytes / microseconds / 1e3


DIGITS = 6  # of a float in the ledger; no clock here is better than that


def _plain(value: Any) -> Any:
    """`value` for JSON, which has no NaN and no infinity: null. Floats keep DIGITS digits."""
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
        case dict():
            return {key: _plain(v) for key, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
    return value


def _made(cls: type) -> Any:
    """A function from a dict to a `cls`: as cls(**data), but unknown fields are dropped.

    NOTE: a frozen dataclass sets its fields one by one, through object.__setattr__; giving it the
    dict whole makes reading a ledger of 100,000 rows three times as fast.
    """
    names = frozenset(f.name for f in fields(cls))
    needed = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
    optional = [f for f in fields(cls) if f.name not in needed]

    def make(data: dict[str, Any]) -> Any:
        if data.keys() != names:
            if not needed <= data.keys():
                raise KeyError(f"{cls.__name__} without {sorted(needed - data.keys())}")
            data = {name: value for name, value in data.items() if name in names}
            for f in optional:
                if f.name not in data:
                    fresh = f.default_factory
                    data[f.name] = f.default if fresh is MISSING else fresh()
        made: Any = object.__new__(cls)
        object.__setattr__(made, "__dict__", data)
        return made

    return make


_timing, _peer, _row = _made(Timing), _made(Peer), _made(Result)


def _result(data: dict[str, Any]) -> Result:
    """The Result of parsed JSON; KeyError, TypeError or AttributeError if it is none."""
    row = _row(data)
    here = row.__dict__
    if here["timing"] is not None:
        here["timing"] = _timing(here["timing"])
    here["peers"] = [p if isinstance(p, Peer) else _peer_of(p) for p in here["peers"]]
    return row


def _peer_of(data: dict[str, Any]) -> Peer:
    return _peer({**data, "timing": _timing(data["timing"])})


class _Lines:
    """A parser of ledger lines that parses only once what many lines share.

    All stages of a run carry the same environment, peers and GPU states, and every run the same
    problems, configs and verdicts: the text between two marks, once parsed, is remembered. What was
    timed is each line's own. A line that does not have the marks where `to_json` puts them is
    parsed whole.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def parse(self, line: str) -> Result:
        what, a, rest = line.partition(',"ok":')
        check, b, rest = rest.partition(',"environment":')
        where, c, rest = rest.partition(',"compile_seconds":')
        took, d, beside = rest.partition(',"peers":')
        if not (a and b and c and d):
            return _result(json.loads(line))
        known = self._known.get
        try:
            data = {
                **(known(what) or self._learn(what, "", "}")),
                **(known(check) or self._learn(check, '{"ok":', "}")),
                **(known(where) or self._learn(where, '{"environment":', "}")),
                **json.loads(f'{{"compile_seconds":{took}}}'),
                **(known(beside) or self._learn(beside, '{"peers":', "")),
            }
        except ValueError:  # the marks stood elsewhere
            data = json.loads(line)
        return _result(data)

    def _learn(self, text: str, before: str, after: str) -> dict[str, Any]:
        """The fields of `text`, which is an object between `before` and `after`."""
        found = json.loads(before + text + after)
        if "peers" in found:
            found["peers"] = [_peer_of(p) for p in found["peers"]]
        self._known[text] = found
        return found


def ledger(folder: Path, result: Result) -> Path:
    """The file in `folder` for this operator and device, such as OP-nvidia-h200.jsonl."""
    device = "sim" if result.device == "sim" else result.device_name
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"{result.op}-{slug}.jsonl"


def append(path: Path, result: Result) -> bool:
    """Add one line to the ledger at `path`; False if this very result is in it already.

    One write to a locked file opened for appending: concurrent runs do not mix their lines, and a
    retried call cannot record its rows twice. A last line torn by a crash is ended first, so that
    it does not swallow this one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if result.id and any(r.key == result.key for r in _of_run(path, result.id)):
            return False
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        line = ("\n" if torn else "") + result.to_json() + "\n"
        os.write(fd, line.encode())
        os.fsync(fd)
        return True
    finally:
        os.close(fd)


def _of_run(path: Path, run_id: str) -> Iterator[Result]:
    """The rows of one run, without parsing those of others."""
    mark = json.dumps({"id": run_id}, separators=(",", ":"))[1:-1]
    with path.open() as lines:
        yield from _parsed(line for line in lines if mark in line)


def read(path: Path) -> list[Result]:
    """All results in the ledger at `path`, oldest first.

    A torn or foreign line is passed over; a row delivered twice counts once.
    """
    found: dict[Any, Result] = {}
    with _no_garbage_collection(), path.open(errors="replace") as lines:
        for number, result in enumerate(_parsed(lines)):
            # NOTE: rows from before run ids cannot be told from repetitions, and all count
            found.setdefault(result.key if result.id else number, result)
    return list(found.values())


def _parsed(lines: Iterable[str]) -> Iterator[Result]:
    parser = _Lines()
    for line in lines:
        try:
            yield parser.parse(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Within, no garbage is collected: none is made here, and the search takes half the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def read_all(folder: Path) -> list[Result]:
    """Every result of every ledger in `folder`, by file name, then oldest first."""
    return [r for path in sorted(folder.glob("*.jsonl")) for r in read(path)]
