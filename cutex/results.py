"""The ledger: one Result per stage and problem, one JSON line per Result, only ever appended."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


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
    """Somebody else's kernel, timed interleaved with ours in the same process."""

    name: str
    version: str
    timing: Timing


@dataclass(frozen=True)
class Result:
    """What one stage did on one problem and one device."""

    op: str  # "gemm"
    stage: int
    title: str
    arch: str
    device: str  # "cuda" | "sim"
    device_name: str
    problem: dict[str, Any]  # m, n, k, dtype, init, seed
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

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.problem["m"], self.problem["n"], self.problem["k"]

    def ratio(self, peer: str) -> float | None:
        """Speed relative to `peer` in the same run: above 1 is faster than it."""
        for p in self.peers:
            if p.name == peer and self.timing is not None:
                return p.timing.median_us / self.timing.median_us
        return None

    def to_json(self) -> str:
        return json.dumps(_finite(asdict(self)), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The Result of one line; fields that this version does not know are ignored."""
        data = _known(cls, json.loads(line))
        if data.get("timing") is not None:
            data["timing"] = Timing(**_known(Timing, data["timing"]))
        data["peers"] = [
            Peer(p["name"], p["version"], Timing(**_known(Timing, p["timing"])))
            for p in data.get("peers", [])
        ]
        return cls(**data)


def _known(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {key: value for key, value in data.items() if key in names}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(v) for key, v in value.items()}
        case list() | tuple():
            return [_finite(v) for v in value]
    return value


def ledger(folder: Path, result: Result) -> Path:
    """The file in `folder` for this operator and device, such as gemm-nvidia-h200.jsonl."""
    device = "sim" if result.device == "sim" else result.device_name
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"{result.op}-{slug}.jsonl"


def append(path: Path, result: Result) -> None:
    """Add one line to the ledger at `path`.

    One write to a file opened for appending: concurrent runs do not mix their lines. A last line
    torn by a crash is ended first, so that it does not swallow this one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        line = ("\n" if torn else "") + result.to_json() + "\n"
        os.write(fd, line.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path) -> list[Result]:
    """All results in the ledger at `path`, oldest first; a torn line is passed over."""
    results = []
    for line in path.read_text().splitlines():
        try:
            results.append(Result.from_json(line))
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return results
