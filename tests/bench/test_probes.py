"""Probes measure what they name: the timed instructions are in the code, and have their effect."""

from __future__ import annotations

import json

import pytest
import torch

from cutex.bench import clock_probes, probes
from cutex.compile import compile
from cutex.compile.resources import opcodes, sass
from cutex.errors import NoDisassembler
from cutex.kernels.probes import sm90, sm90_tma
from cutex.kernels.probes.sm100 import REPEATS
from cutex.kernels.probes.sm100 import probes as all_probes
from cutex.sim import simulate
from cutex.sim.timing import gpus

TIMED = {  # opcode of the timed instruction, and how often it stands outside of the timing
    "TmemLoad": ("LDTM", lambda c: c.batch),
    "TmemStore": ("STTM", lambda c: c.batch),
    "SmemCopy": ("UTCCP", lambda c: 0),
    "TmaLoad": ("UTMALDG", lambda c: 0),
    "PairTmaLoad": ("UTMALDG", lambda c: 0),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("probe", all_probes(), ids=lambda probe: probe.name)
def test_a_probe_runs_right_in_the_simulator_and_times_what_it_names(probe):
    compiled = compile(probe, probes.DTYPE, "sm_100a")
    row = probes._measure_one(probe, compiled, "sim")
    assert row["ok"]
    assert "cycles" not in row
    kind = type(probe).__name__
    if kind in TIMED:
        opcode, outside = TIMED[kind]
        try:
            found = [o for o in opcodes(sass(compiled)) if o.split(".")[0] == opcode]
        except NoDisassembler as missing:
            pytest.skip(str(missing))
        batch = max(1, probe.config.batch)
        assert len(found) == REPEATS * batch + outside(probe.config)


def test_only_blackwell_has_probes():
    with pytest.raises(ValueError, match="'sm_90a' has no probes"):
        probes.measure("sm_90a", "sim")


def test_the_table_tells_cycles_rates_and_clocks(tmp_path):
    rows = [
        {"probe": "ld", "ok": True, "cycles": 64, "columns": 32, "batch": 1, "bytes": 16384},
        {"probe": "reply", "ok": True, "cycles": 500},
        {"probe": "wrong", "ok": False},
        {"probe": "gemm", "ok": True, "tflops": 1500.4,
         "states": [{"clock_mhz": 1965.0}, {"clock_mhz": 1400.0}]},
    ]  # fmt: skip
    first, second, third, fourth = probes.table(rows).splitlines()
    assert first.split()[-4:] == ["64", "cycles", "256", "B/clk"]
    assert second.split()[-2:] == ["500", "cycles"]
    assert third.endswith("WRONG")
    assert fourth.endswith("1500 TFLOPS  1965 -> 1400 MHz")
    path = probes.record(rows, "2026-01-01T00:00:00+00:00", tmp_path)
    assert probes.record(rows, "2026-01-01T00:00:00+00:00", tmp_path) == path
    assert json.loads(path.read_text()) == rows


HOPPER = [
    *(sm90.Busy(sm90.ProbeConfig(kind=kind, n=64, count=3)) for kind in (
        "wgmma+wgmma", "registers+ex2", "serial+none", "none+max", "none+cvt", "none+shfl",
        "none+lds8",
    )),
    sm90.Poll(sm90.ProbeConfig(count=8)),
    *(sm90.PeerLoads(sm90.ProbeConfig(kind=kind, count=3)) for kind in ("chain", "stream")),
    sm90_tma.TmaStores(sm90.ProbeConfig(n=64, slots=2, count=5)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("probe", HOPPER, ids=lambda p: f"{p.name} {p.config.kind}")
def test_a_hopper_probe_runs_without_a_finding(probe):
    out = torch.zeros((2, sm90.WIDTH), dtype=torch.bfloat16)
    more = [torch.zeros((1024, 64), dtype=torch.bfloat16)] if "stores" in probe.name else []
    report = simulate(compile(probe, probes.DTYPE, "sm_90a"), *more, out)
    assert not report.findings
    assert out.view(torch.int32)[0, :2].any()


# ---- constants of the simulator's clock


def measured_on_an_h200(root) -> list[dict]:
    """Rows of the probes' one run on an H200 that `plan` has; cycles are medians."""
    kept = json.loads((root / "results/timing/probes-sm90-2026-11-22.json").read_text())["rows"]
    found = []
    for row in kept:
        cycles = row.get("cycles")
        if row["probe"] == "tmastores":
            if row["where"] != "l2" or (row["n"], row["slots"]) not in ((64, 1), (128, 4)):
                continue
            cycles = cycles[1]
        elif row["probe"] in ("signal", "poll", "peer", "tma"):
            cycles = sorted(c[0] if isinstance(c, list) else c for c in cycles)[1]
        found.append({**row, "cycles": cycles})
    return found


def test_probes_give_the_constants_of_the_h200(root):
    found = clock_probes.constants(measured_on_an_h200(root), gpus.H200.clock)
    assert len(found) == 13
    for name, value in found.items():
        assert value == pytest.approx(getattr(gpus.H200, name), rel=0.08), name


def test_what_a_b200_measures_replaces_the_constants(root, tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "SOURCES", dict(gpus.SOURCES))
    row = {"probe": "constants", "ok": True, "arch": "sm_100a", "ghz": 1.9,
           "clock_rows": measured_on_an_h200(root)}  # fmt: skip
    assert "wake 92.15" in probes.table([row])
    probes.record([row], "2027-01-02T00:00:00+00:00", tmp_path)
    board = gpus.measured(gpus.B200, tmp_path / "timing/constants-b200.json")
    assert board.l2_bytes == pytest.approx(gpus.H200.l2_bytes, rel=0.02)
    assert (board.mma_flops, board.sms) == (gpus.B200.mma_flops, gpus.B200.sms)
    assert gpus.SOURCES["l2_bytes"][1] == "probe, 2027-01-02"
    assert gpus.measured(gpus.B200, tmp_path / "none.json") is gpus.B200


def test_the_clocks_probes_run_on_blackwell():
    rows = clock_probes.measure("sm_100a", "sim")
    assert {r["probe"] for r in rows} == {r["probe"] for r in clock_probes.plan(2)}
