"""The times of single instructions, measured on a GPU as input of a timing model.

`modal run modal_app.py --op confirm` runs them. In the simulator a clock counts instructions, so a
run there only checks the probes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutex.arch import arch
from cutex.bench import clock_probes, run
from cutex.compile import compile
from cutex.problem import DEFAULT_OP, problem_class
from cutex.problem.stage import stages
from cutex.results import tflops

if TYPE_CHECKING:
    from cutex.compile import Compiled

DTYPE = "bf16"  # of the output row, which in fact holds 32-bit words
SUSTAINED_SECONDS = 10
SIMULATED_ROWS = 64


def _probes(name: str) -> list[Any]:
    if name != "sm_100a":
        raise ValueError(f"arch {name!r} has no probes, sm_100a has")
    from cutex.kernels.probes.sm100 import probes

    return probes()


def compile_all(name: str) -> list[Compiled]:
    return [
        *(compile(probe, DTYPE, name) for probe in _probes(name)),
        *clock_probes.compile_all(name),
    ]


def measure(name: str, device: str) -> list[dict[str, Any]]:
    """Run every probe on "cuda" or "sim"; return one row each, with cycles and whether it was
    right.

    A further row holds the measurements for the constants of the simulator's clock; on a GPU a last
    one has the clock and power of the top of the ladder under sustained load.
    """
    rows = [_measure_one(probe, compile(probe, DTYPE, name), device) for probe in _probes(name)]
    rows.append(_for_the_clock(name, device))
    if run.choose_device(device, arch(name)) == "cuda":
        rows.append(_sustained(name))
    return rows


def _for_the_clock(name: str, device: str) -> dict[str, Any]:
    from cutex.bench.timing import gpu_state

    rows = clock_probes.measure(name, device)
    row: dict[str, Any] = {"probe": "constants of the simulator's clock", "ok": bool(rows)}
    if run.choose_device(device, arch(name)) == "cuda":
        state = gpu_state() or {}
        ghz = state.get("clock_mhz", arch(name).clock_hz / 1e6) / 1e3
        row.update(arch=name, ghz=ghz, clock_rows=rows)
    return row


def _measure_one(probe: Any, compiled: Compiled, device: str) -> dict[str, Any]:
    import torch

    from cutex.kernels.probes.sm100 import BOX, REPEATS, WIDTH

    device = run.choose_device(device, arch(compiled.arch))
    rows = probe.rows if device == "cuda" else min(probe.rows, SIMULATED_ROWS)
    out = torch.zeros((rows, WIDTH), dtype=torch.bfloat16)
    source = torch.zeros((2 * BOX[0], BOX[1]), dtype=torch.bfloat16)
    tensors = [source, out] if "mX" in compiled.argument_names else [out]
    findings: list[Any] = []
    if device == "cuda":
        tensors = [x.cuda() for x in tensors]
        compiled(*tensors)
    else:
        from cutex.sim import simulate

        findings = simulate(compiled, *tensors).findings
    found = tensors[-1].cpu().view(torch.int32)[0].tolist()
    cycles = [c for c in found[1:REPEATS] if c]  # the first is a warm-up; 0: not run
    row: dict[str, Any] = {"probe": probe.title, "ok": not findings}
    if device == "cuda":
        row.update(cycles=min(cycles, default=0), all=cycles, ok=bool(cycles))
    columns, batch = probe.config.columns, probe.config.batch
    if columns:
        row.update(columns=columns, batch=batch, bytes=probe.bytes)
        row["ok"] &= found[REPEATS] == probe.total
    return row


def _sustained(name: str) -> dict[str, Any]:
    """Measure the clock and power of the first operator's top stage under a load of some
    seconds."""
    import time

    import torch

    from cutex.bench.timing import gpu_state

    kind = problem_class(DEFAULT_OP)
    problem = kind.of(kind.cases["cuda"][0])
    top = stages(DEFAULT_OP, name)[-1].fitted(problem)
    compiled = run.compile_stage(top, problem.dtype)
    launch = problem.launcher(compiled, compiled.argument_names)
    tensors = *problem.inputs("cuda"), *problem.outputs("cuda")
    launches, states, start = 0, [], time.monotonic()
    while (took := time.monotonic() - start) < SUSTAINED_SECONDS:
        for _ in range(200):
            launch(*tensors)
        states.append(gpu_state())
        torch.cuda.synchronize()
        launches += 200
    title = f"stage {top.number} sustained, {problem.size}, Gaussian data"
    rate = tflops(problem.flops, took * 1e6 / launches)
    ok = problem.check(*tensors).ok
    return {"probe": title, "seconds": took, "tflops": rate, "states": states[::5], "ok": ok}


def table(rows: list[dict[str, Any]]) -> str:
    """One line per probe."""
    return "\n".join(f"{_titled(row):<48} {_text_of(row)}" for row in rows)


def _titled(row: dict[str, Any]) -> str:
    several = f", {row['batch']} x {row['columns']} columns" if "bytes" in row else ""
    return row["probe"] + several


def _text_of(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return "WRONG"
    if "clock_rows" in row:
        found = clock_probes.constants(row["clock_rows"], row["ghz"])
        return ", ".join(f"{key} {value:.4g}" for key, value in found.items())
    if "tflops" in row:
        clocks = [s["clock_mhz"] for s in row["states"] if s and "clock_mhz" in s]
        span = f"{max(clocks):.0f} -> {clocks[-1]:.0f} MHz" if clocks else "clock unknown"
        return f"{row['tflops']:8.0f} TFLOPS  {span}"
    if "cycles" not in row:
        return "runs, and is not timed: simulated"
    rate = f"  {row['bytes'] / row['cycles']:.0f} B/clk" if "bytes" in row else ""
    return f"{row['cycles']:8} cycles{rate}"


def record(rows: list[dict[str, Any]], when: str, folder: Path) -> Path:
    """Write the rows of one run to a file; a run recorded again replaces itself. The clock's
    constants replace the older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"probes-sm100-{when[:19].replace(':', '')}.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        if "clock_rows" in row:
            clock_probes.keep(row["clock_rows"], row["arch"], when, row["ghz"], folder)
    return path
