"""The time of the grid, from the record of a few clusters."""

from __future__ import annotations

import math
from dataclasses import replace

from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.lengths import Lengths, predict_lengths
from cutex.sim.timing.replay import Replay, Run, when
from cutex.sim.timing.sampled import Sampled, predict_sampled
from cutex.sim.timing.timed import Timed, Whole
from cutex.sim.timing.trace import Traced
from cutex.sim.timing.traffic import (
    clusters_at_once,
    dram,
    fetched,
    loaded,
    narrow,
    running,
    shared,
    slices,
    stored,
    stream,
)
from cutex.sim.timing.units import Memory


def predict(
    traced: Traced | Lengths | Sampled,
    gpu: Gpu,
    whole: Whole | None = None,
    log: bool = False,
    most_rounds: int = 0,
) -> Timed:
    """Return the cycles of the SM's clock from the end of the previous kernel to the end of this
    one.

        log          keep the intervals of each track, in ``intervals``
        most_rounds  CTAs of a slot that are replayed, for a picture; 0: all, as the grid's cycles
                     need
    """
    whole = whole or Whole()
    gpu = replace(gpu, launch=launch_cycles(traced, gpu))
    if isinstance(traced, Lengths):
        return predict_lengths(traced, gpu, log)
    if isinstance(traced, Sampled):
        return predict_sampled(traced, gpu, log)
    record = traced.record
    size = record.cluster_size
    groups = clusters_at_once(gpu, size)
    slots = min(traced.per_sm, math.ceil(traced.clusters / groups))
    workers = running(traced, gpu)
    if whole.tile_flops:  # the others find no tile
        workers = min(workers, max(1, round(whole.flops / whole.tile_flops / size)))
    rounds = 1 if traced.takes_over else math.ceil(traced.clusters / groups)
    busy_sms = min(workers, groups) * size
    share = work = 0.0
    if whole.flops:  # the busiest cluster decides
        work = whole.flops / workers
        if whole.tile_flops:
            tiles = math.ceil(whole.flops / whole.tile_flops / workers / size - 1e-9)
            work = tiles * whole.tile_flops * size
        share = work / record.flops if record.flops else 1.0
    extended = bool(share) and not record.complete
    times = (share if extended else 1.0) * workers
    by_tensor = {tmap: size * times for tmap, size in loaded(record).items()}
    loads, stores = sum(by_tensor.values()), stored(record) * times
    missed = dram(traced, by_tensor, gpu)
    memory = Memory(
        missed / loads if loads else 1.0, busy_sms, shared(traced, by_tensor),
        fetched=fetched(traced, gpu), stream=stream(gpu, busy_sms), ahead=gpu.l2_ahead,
        slices=slices(traced, gpu),
    )  # fmt: skip
    for at, f in record.fetched.items():
        loads += f.loaded * times
        missed += f.loaded * times * memory.fetched[at].all
    turns = 1 if extended else min(rounds, most_rounds or rounds)
    replay = Replay(record, gpu, memory, rounds=turns, slots=slots, log=log)
    run = replay.run()
    cycles = run.end
    if extended:
        cycles = whole_cycles(run, work, whole.tile_flops * size, record.flops)
    drained = max(0.0, run.stores_end - run.end) if not extended else 0.0
    return Timed(
        cycles=cycles + drained + gpu.launch,
        detailed=run.end,
        busy={u: b / run.end for u, b in run.units.items()},
        worked={r: w / run.end for r, w in run.worked.items()},
        waited={r: {k: v / run.end for k, v in w.items()} for r, w in run.waits.items()},
        intervals=run.intervals,
        miss=memory.miss,
        rounds=rounds,
        flops=whole.flops or record.flops * workers,
        narrow=narrow(record),
        loaded=loads,
        stored=stores,
        written=stored(record, added=False) * times,
        dram=missed,
        side_by_side=slots,
    )


def launch_cycles(traced: Traced | Lengths | Sampled, gpu: Gpu) -> float:
    """From the end of the kernel before, of the same kind, to the first instruction."""
    return (traced.overlaps and gpu.overlapped_launch) or gpu.launch


def whole_cycles(run: Run, work: float, tile: float, recorded: float) -> float:
    """The end of a cluster with ``work`` FLOPs, extrapolated from the steady part of its record:
    from the end of its first tile to that of its last, or of one tile alone its last three
    quarters."""
    whole = tile and math.floor(recorded / tile) > 1
    first = tile if whole else recorded / 4
    last = math.floor(recorded / tile) * tile if whole else recorded
    a = when(run, first)
    b = when(run, last)
    rate = (last - first) / (b - a)
    drain = run.drain if run.drain else 0.0
    return b + (work - last) / rate + drain
