"""The part that runs in the rented container: the same `run` as everywhere else, on its GPU.

A request and a reply are plain data. A container may be preempted and its request given to another:
a request changes nothing outside the container but the volume of compiled kernels, and the ledger
is written where the request came from.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

VOLUME = "/cache"  # where Modal mounts the volume of compiled kernels


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request of cutex.cloud.rental; runs in the container."""
    unpack(request["kernels"])
    notices: list[str] = []
    reply: dict[str, Any] = {
        "index": request["index"],
        "results": [],
        "notices": notices,
        "code": 0,
    }
    if request["pytest"] is not None:
        reply.update(_tests(request["pytest"]))
    elif request["script"] is not None:
        reply.update(_script(request))
    elif request["layers"]:
        reply.update(_layers(request))
    elif request["probes"]:
        reply["probes"] = _probes(request)
    else:
        reply["results"] = _run(request, notices)
    reply["seconds"] = _clock.lap()
    return reply


def _run(request: dict[str, Any], notices: list[str]) -> list[str]:
    from cutex.bench.run import Options, run_stages
    from cutex.compile.sources import sources_digest
    from cutex.problem import problem_class
    from cutex.problem.stage import stage

    op, problem = request["op"], request["problem"]
    stages = [stage(op, request["arch"], number) for number in request["stages"]]
    options = Options(**request["options"], notice=notices.append)
    with Volume(sources_digest(s.module for s in stages)):
        found = run_stages(problem_class(op)(**problem), stages, "cuda", options)
    return [
        replace(r, run=request["run"], environment={**r.environment, **_here(request)}).to_json()
        for r in found
    ]


def _here(request: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row on the device and the versions of its measurement."""
    return {
        "commit": request["commit"],  # the sources came without their history
        "rented": request["gpu"],
        "container": os.environ.get("MODAL_TASK_ID"),
    }


def _layers(request: dict[str, Any]) -> dict[str, Any]:
    """Run python -m cutex.sweep on the problems of the request, and return its rows."""
    from cutex.results import sweep

    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        only = Path(folder) / "only"
        only.write_text("\n".join(request["layers"]), encoding="utf-8")
        command = (sys.executable, "-m", "cutex.sweep", *request["arguments"])
        # NOTE: its output goes to the container's log, which Modal shows while it runs
        ran = subprocess.run((*command, "--only", only, "--out", folder), cwd=root, check=False)
        found = [row for file in Path(folder).glob("sweep/*.jsonl") for row in sweep.read(file)]
    lines = [
        replace(r, run=request["run"], environment={**r.environment, **_here(request)}).to_json()
        for r in found
    ]
    return {"code": ran.returncode, "layers": lines}


def _probes(request: dict[str, Any]) -> list[dict[str, Any]]:
    from cutex.bench.probes import measure

    return measure(request["arch"], "cuda")


def _tests(arguments: list[str]) -> dict[str, Any]:
    """Run pytest on the mounted tests; return its report (JUnit XML) and its exit code."""
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = (sys.executable, "-m", "pytest", *arguments, "--junitxml", str(junit))
        # NOTE: its output goes to the container's log, which Modal shows while it runs
        ran = subprocess.run(command, cwd=root, check=False)
        text = junit.read_text(encoding="utf-8") if junit.exists() else ""
    return {"code": ran.returncode, "junit": text}


def _script(request: dict[str, Any]) -> dict[str, Any]:
    """Run the user's script unchanged, in an empty folder; return its output and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / Path(request["script"]).name
        file.write_bytes(request["source"])
        command = [sys.executable, "-u", str(file), *request["arguments"]]
        ran = subprocess.run(command, cwd=folder, check=False, capture_output=True)
    said = {
        name: text.decode(errors="replace")
        for name, text in (("stdout", ran.stdout), ("stderr", ran.stderr))
    }
    return {"code": ran.returncode, "script": said}


class _Clock:
    """A clock of the rented seconds since the last lap; the first lap begins with the process."""

    def __init__(self) -> None:
        self._from = time.time() - _process_seconds()

    def lap(self) -> float:
        now = time.time()
        seconds, self._from = now - self._from, now
        return seconds


def _process_seconds() -> float:
    """The seconds for which this process has been running; 0 if /proc does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return max(0.0, up - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


_clock = _Clock()


# ---- compiled kernels, which travel with a request so that no GPU waits for a compiler


def pack(entries: Iterable[Path]) -> bytes:
    """Entries of the kernel cache (cutex/compile/) as one compressed archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for entry in sorted(set(entries)):
            for file in sorted(entry.iterdir()):
                archive.add(file, f"{entry.name}/{file.name}")
    return buffer.getvalue()


def unpack(archive: bytes) -> None:
    """Add packed entries to this machine's kernel cache."""
    if not archive:
        return
    from cutex.cache import cache_dir

    with (
        tempfile.TemporaryDirectory() as folder,
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:xz") as packed,
    ):
        packed.extractall(folder, filter="data")
        _add_entries(Path(folder), cache_dir() / "kernels")


def _add_entries(source: Path, target: Path) -> None:
    """Copy the entries that `target` lacks; each appears there complete."""
    for entry in source.iterdir() if source.is_dir() else ():
        if entry.is_dir() and not entry.name.startswith(".") and not (target / entry.name).exists():
            target.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=target))
            shutil.copytree(entry, scratch, dirs_exist_ok=True)
            try:
                scratch.rename(target / entry.name)
            except OSError:  # another process was first
                shutil.rmtree(scratch)


class Volume:
    """A network volume with kernels and timed choices, kept between runs of the same sources.

    NOTE: the cache itself is on the container's own disk, because it needs locks and renames, which
    a network volume may not have. An entry that did not arrive complete is built again.
    """

    def __init__(self, sources: str, mounted: str = VOLUME) -> None:
        from cutex.cache import cache_dir

        self.mounted = Path(mounted)
        self.here, self.there = cache_dir(), self.mounted / sources[:16]

    def __enter__(self) -> None:
        self._copy(self.there, self.here)

    def __exit__(self, *_: object) -> None:
        self._copy(self.here, self.there)

    def _copy(self, source: Path, target: Path) -> None:
        if not self.mounted.is_dir():  # nothing is mounted where this runs
            return
        _add_entries(source / "kernels", target / "kernels")
        for file in (source / "tuned").glob("*.json"):
            (target / "tuned").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / "tuned" / file.name)
