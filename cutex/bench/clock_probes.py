"""Constants of the clock from probes, for the H200 and for a B200 that `confirm` rents.

The probes are small kernels of kernels/probes/sm90.py, which run on both: barriers that two sides
signal in turn, polls, streams of TMA loads from L2 and from HBM, and TMA stores. Results on a B200
are kept in results/timing/constants-b200.json, and replace the priors of cutex/sim/timing/gpus.py
from then on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from cutex.arch import arch
from cutex.bench import run
from cutex.compile import compile
from cutex.sim.timing.gpus import constants_file, of_arch

if TYPE_CHECKING:
    from cutex.compile import Compiled

DTYPE = "bf16"
ROW = 128  # bytes of a row of a box
SIMULATED = 16  # loads or turns in the simulator
IN_L2, IN_MEMORY = 24 << 20, 4 << 30  # bytes that a stream of loads reads over and over
# cycles of a turn, a wait or a box that are the probe's own instructions, as on the H200
OWN = {"named": 17.0, "mbarrier": 21.0, "peer": 27.0, "poll": 2.5, "box": 36.0}


def plan(sms: int, count: int = 400) -> list[dict[str, Any]]:
    """The measurements, as rows without their cycles. ``count``: loads or turns of each."""
    rows: list[dict[str, Any]] = [
        {"probe": "signal", "kind": "named", "count": count},
        {"probe": "signal", "kind": "mbarrier", "count": count},
        {"probe": "peer", "count": count},
        {"probe": "poll", "count": count},
    ]
    for where in ("l2", "hbm"):
        rows += [
            {"probe": "tma", "where": where, "box": box, "slots": slots, "ctas": ctas,
             "count": count}
            for box, slots, ctas in ((8192, 1, 1), (8192, 1, sms), (16384, 8, 1), (16384, 12, sms))
        ]  # fmt: skip
    for rows_, slots, stores, ctas in ((64, 1, 1, 1), (128, 4, count, 1), (128, 4, count, sms)):
        rows.append(
            {"probe": "tmastores", "n": rows_, "slots": slots, "count": stores, "where": "l2",
             "ctas": ctas}
        )  # fmt: skip
    return rows


def measure(name: str, device: str) -> list[dict[str, Any]]:
    """The rows of `plan` for the arch ``name`` with their cycles, on "cuda"; on "sim", where a
    clock counts instructions, one row of each kind."""
    device = run.choose_device(device, arch(name))
    if device == "cuda":
        return [{**row, "cycles": _cycles(row, name, device)} for row in plan(arch(name).num_sms)]
    kinds = {row["probe"]: row for row in plan(2, SIMULATED)}
    return [{**row, "cycles": _cycles(row, name, device)} for row in kinds.values()]


def compile_all(name: str) -> list[Compiled]:
    return [_compiled(row, name) for row in plan(arch(name).num_sms)]


def _compiled(row: dict[str, Any], name: str) -> Compiled:
    from cutex.kernels.probes import sm90, sm90_tma

    rows = row.get("n", row.get("box", 0) // ROW)  # of a box
    config = sm90.ProbeConfig(row.get("kind", ""), rows, row.get("slots", 0), row["count"])
    kinds = {
        "signal": sm90.Signal, "peer": sm90.PeerSignal, "poll": sm90.Poll,
        "tma": sm90_tma.TmaStream, "tmastores": sm90_tma.TmaStores,
    }  # fmt: skip
    return compile(kinds[row["probe"]](config, name), DTYPE, name)


def _cycles(row: dict[str, Any], name: str, device: str) -> Any:
    import torch

    from cutex.kernels.probes.sm90 import BOX_K, WIDTH

    compiled = _compiled(row, name)
    ctas = row.get("ctas", 2 if row["probe"] == "peer" else 1)
    out = torch.zeros((ctas, WIDTH), dtype=torch.bfloat16, device=device.replace("sim", "cpu"))
    tensors = [out]
    if "mX" in compiled.argument_names:
        rows = row.get("n", row.get("box", 0) // ROW)
        size = IN_MEMORY if row.get("where") == "hbm" else IN_L2
        boxes = size // (rows * ROW) if device == "cuda" else 4
        tensors.insert(0, torch.zeros((boxes * rows, BOX_K), dtype=out.dtype, device=out.device))
    for _ in range(3 if device == "cuda" else 1):
        if device == "cuda":
            compiled(*tensors)
        else:
            from cutex.sim import simulate

            simulate(compiled, *tensors)
    words = out.cpu().view(torch.int32)
    if row["probe"] == "tmastores":
        return [[int(x) for x in sorted(words[:, i])][ctas // 2] for i in (0, 1)]
    return int(median(words[:, 1 if row["probe"] == "tma" else 0].tolist()))


def constants(rows: Iterable[dict[str, Any]], clock: float) -> dict[str, float]:
    """Return constants of `Gpu` from measured rows, whose ``cycles`` are medians; ``clock`` is in
    GHz."""
    by = {_key(r): r for r in rows if r.get("probe") in ("signal", "peer", "poll")}
    turn = {key: by[key]["cycles"] / by[key]["count"] / 2 for key in by if key != "poll"}
    found = {
        "bar": turn["named"] - OWN["named"],
        "wake": turn["mbarrier"] - OWN["mbarrier"],
        "try_wait": by["poll"]["cycles"] / by["poll"]["count"] - OWN["poll"],
    }
    found["remote_arrive"] = turn["peer"] - found["wake"] - OWN["peer"]
    loads = [r for r in rows if r.get("probe") == "tma"]
    sms = max(r["ctas"] for r in loads)

    def each(where: str, box: int, slots: int, ctas: int) -> float:
        """Cycles for each box."""
        wanted = where, box, slots, ctas
        row = next(r for r in loads if (r["where"], r["box"], r["slots"], r["ctas"]) == wanted)
        return float(row["cycles"]) / row["count"]

    found["tma_bytes"] = 16384 / each("l2", 16384, 8, 1)
    found["l2_bytes"] = sms * 16384 / each("l2", 16384, 12, sms)
    found["hbm_gbs"] = sms * 16384 / each("hbm", 16384, 12, sms) * clock
    alone = each("l2", 8192, 1, 1)
    found["l2_latency"] = alone - 8192 / found["tma_bytes"] - found["wake"] - OWN["box"]
    found["hbm_latency"] = each("hbm", 8192, 1, sms) - each("l2", 8192, 1, sms)
    return {**found, **_stores([r for r in rows if r.get("probe") == "tmastores"])}


def _stores(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    sms = max(r["ctas"] for r in rows)
    one = next(r for r in rows if r["count"] == 1)
    many = {r["ctas"]: r for r in rows if r["count"] > 1}
    rate = {n: 128 * r["n"] * r["count"] / r["cycles"][0] for n, r in many.items()}
    service = 128 * one["n"] / rate[1]
    return {
        "tma_store_bytes": rate[1],
        "store_bytes": sms * rate[sms],
        "store_read": one["cycles"][0] - service,
        "store_latency": one["cycles"][1] - service,
    }


def _key(row: dict[str, Any]) -> str:
    return str(row["kind"] if row["probe"] == "signal" else row["probe"])


def keep(rows: Sequence[dict[str, Any]], name: str, when: str, clock: float, results: Path) -> Path:
    """Write the constants of an arch's GPU into ``results``, from which the clock reads them."""
    path = results / "timing" / constants_file(of_arch(name)).name
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {key: round(value, 2) for key, value in constants(rows, clock).items()}
    path.write_text(
        json.dumps({"when": when, "constants": measured}, indent=1) + "\n", encoding="utf-8"
    )
    return path
