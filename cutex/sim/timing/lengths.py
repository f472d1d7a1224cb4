"""The time of a grid whose tiles differ in length only.

One cluster is recorded on tiles of two lengths, short ones, for the time of a tile is linear in the
steps of its main loop. Then the tiles of the grid are assigned in their order, each to the first
cluster that is free.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutex.sim.timing.events import Record
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.replay import Replay, Run, when
from cutex.sim.timing.timed import Timed
from cutex.sim.timing.trace import Traced
from cutex.sim.timing.traffic import clusters_at_once, loaded, narrow, shared, stored, stream
from cutex.sim.timing.units import FirstTouch, Memory

AHEAD = 1000.0  # `Memory.ahead` of SMs out of step: cycles of a 32 KB box at an SM's share of L2
APART = 1500.0  # cycles between the CTAs of an SM: half a key block, so they use different pipes
ROUNDS = 3  # CTAs of a slot that are replayed one after the other, where each has one tile


@dataclass
class Lengths:
    """Records of tiles of two lengths, both with the grid and the sharing of the whole launch."""

    short: Traced
    long: Traced
    steps: tuple[int, int]  # main loop steps of a tile of ``short`` and of ``long``
    tiles: tuple[int, ...]  # steps of each tile of the grid, in the order of their assignment
    tile_flops: tuple[float, float]  # MMA FLOPs of both tiles

    @property
    def record(self) -> Record:
        return self.long.record

    @property
    def name(self) -> str:
        return self.long.name

    @property
    def overlaps(self) -> bool:
        return self.long.overlaps

    @property
    def stack(self) -> int:
        return self.long.stack

    @property
    def flops(self) -> float:
        """The MMA FLOPs of the whole grid."""
        return sum(self.at(self.tile_flops, n) for n in self.tiles)

    def at(self, pair: tuple[float, float], steps: float) -> float:
        """Return the value at ``steps`` steps, linear in the ``pair`` of values at the two
        lengths."""
        short, long = self.steps
        if short == long:
            return pair[1]
        return pair[0] + (pair[1] - pair[0]) * (steps - short) / (long - short)


@dataclass
class TileTime:
    """Cycles of a cluster: for its first tile, for each later one, and after its last."""

    first: float
    each: float
    last: float


def predict_lengths(traced: Lengths, gpu: Gpu, log: bool = False) -> Timed:
    record, tiles = traced.record, traced.tiles
    size = record.cluster_size
    groups = clusters_at_once(gpu, size)
    both = list(zip((traced.short, traced.long), traced.tile_flops, strict=True))
    slots = min(traced.long.per_sm, math.ceil(len(tiles) / groups))
    loads, stores, written = _moved(traced, both)
    total = sum(loads.values())
    # NOTE: tiles that share a sequence follow one another, so each tensor comes from memory once
    missed = sum(min(_footprint(traced.long, tmap, size), size) for tmap, size in loads.items())
    busy_sms = min(len(tiles), groups) * size
    miss = missed / total if total else 1.0
    # NOTE: the first tiles of all SMs are in step, later ones are not
    waits, ahead = (miss, AHEAD) if len(tiles) > groups * slots else (1.0, 0.0)
    memory = Memory(
        miss,
        busy_sms,
        shared(traced.long, loads),
        waits=waits,
        ahead=ahead,
        stream=stream(gpu, busy_sms),
    )
    if not ahead and slots == 1:
        memory.touches = touches(traced, loads)
    times = []
    for one, tile in both:
        walks = one.record.flops > 1.5 * tile
        rounds = 1 if walks else ROUNDS * slots
        # NOTE: CTAs of an SM in step would want the same pipe all the time
        apart = APART if ahead else 0.0
        replay = Replay(one.record, gpu, memory, rounds=rounds, slots=slots, apart=apart, log=log)
        run = replay.run()
        times.append(_walking(run, tile, one.record) if walks else _one_each(run, slots, gpu))
    first, each, last = (
        [
            traced.at((getattr(times[0], part), getattr(times[1], part)), n)
            for n in range(max(tiles) + 1)
        ]
        for part in ("first", "each", "last")
    )
    end = handed_out(tiles, min(groups * slots, len(tiles)), first, each)
    return Timed(
        cycles=end + last[tiles[-1]] + gpu.launch,
        detailed=run.end,
        busy={u: b / run.end for u, b in run.units.items()},
        worked={r: w / run.end for r, w in run.worked.items()},
        waited={r: {k: v / run.end for k, v in w.items()} for r, w in run.waits.items()},
        intervals=run.intervals,
        miss=memory.miss,
        rounds=math.ceil(len(tiles) / groups),
        flops=traced.flops,
        narrow=narrow(record),
        loaded=total,
        stored=stores,
        written=written,
        dram=missed,
        side_by_side=slots,
    )


def touches(traced: Lengths, loads: Mapping[int, float]) -> dict[int, FirstTouch]:
    """What comes from HBM where each CTA has one tile, all in step; `loads` are the bytes that all
    load, by tensor.

    CTAs whose tiles differ in their steps begin at keys of their own, so that all of these are
    wanted at one time, although they are few beside all that is loaded.
    """
    tiles, record = traced.tiles, traced.long.record
    of_tile = {
        tmap: size * traced.tile_flops[1] / record.flops for tmap, size in loaded(record).items()
    }
    few = loaded(traced.short.record)
    apart = len(set(tiles)) * min(Counter(tiles).values()) / len(tiles)
    found = {}
    for tmap, size in of_tile.items():
        sharing = traced.long.sharing.get(tmap)
        if sharing is None or not sharing.footprint:
            continue
        walks = size > few[tmap] * traced.tile_flops[0] / traced.short.record.flops
        step = size / traced.steps[1] if walks else size
        first = max(sharing.part, apart) if walks and len(set(tiles)) > 1 else sharing.part
        at_once = min(sharing.footprint, first * step * len(tiles))
        rest = loads[tmap] - step * len(tiles)
        later = (sharing.footprint - at_once) / rest if rest > 0 else 0.0
        found[tmap] = FirstTouch(step, at_once / (step * len(tiles)), max(0.0, later))
    return found


def _footprint(traced: Traced, tmap: int, loaded: float) -> float:
    found = traced.sharing.get(tmap)
    return found.footprint if found and found.footprint else loaded


def handed_out(
    tiles: Sequence[int], workers: int, first: Sequence[float], each: Sequence[float]
) -> float:
    """Return the end of the last of ``workers``, where the first free one takes the next tile."""
    free = [0.0] * workers
    for number, steps in enumerate(tiles):
        times = first if number < workers else each
        heapq.heapreplace(free, free[0] + times[steps])
    return max(free)


def _walking(run: Run, tile: float, record: Record) -> TileTime:
    """The times of a cluster that computes one tile after the other."""
    ends = [when(run, n * tile) for n in range(1, int(record.flops / tile + 1e-6) + 1)]
    each = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]
    return TileTime(ends[0], each, run.drain)


def _one_each(run: Run, slots: int, gpu: Gpu) -> TileTime:
    """The times of clusters with one tile each, which run one after the other in each of the
    slots."""
    starts = sorted(run.starts)
    each = (starts[-1] - starts[slots - 1]) / (len(starts) / slots - 1)
    return TileTime(each, each, max(0.0, run.stores_end - run.end) - gpu.cta_turnover)


def _moved(
    traced: Lengths, both: Sequence[tuple[Traced, float]]
) -> tuple[dict[int, float], float, float]:
    """The bytes that all tiles load, by tensor, the bytes that they store, and those of them that
    are not added to sums."""
    count, steps = len(traced.tiles), sum(traced.tiles)
    parts = [tile / t.record.flops for t, tile in both]
    loads = [loaded(t.record) for t, _ in both]
    stores, written = (
        [stored(t.record, added) * part for (t, _), part in zip(both, parts, strict=True)]
        for added in (True, False)
    )
    whole = [count * traced.at((x[0], x[1]), steps / count) for x in (stores, written)]
    return (
        {
            tmap: count
            * traced.at((loads[0].get(tmap, 0.0) * parts[0], size * parts[1]), steps / count)
            for tmap, size in loads[1].items()
        },
        whole[0],
        whole[1],
    )
