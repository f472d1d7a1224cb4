"""The bytes that a grid loads from L2 and from HBM, from the record of a few of its clusters."""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from math import inf

from cutex.sim.timing.events import Load, Mma, Record, Store, Touch
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.trace import Traced
from cutex.sim.timing.units import Missed


def clusters_at_once(gpu: Gpu, size: int) -> int:
    """The number of clusters of ``size`` CTAs that run at one time, where each CTA fills an SM."""
    groups = gpu.sms // size
    if size == 4 and gpu.clusters_of_four:
        groups = min(groups, gpu.clusters_of_four)
    return groups


def stream(gpu: Gpu, sms: int) -> float:
    """The bytes per cycle that one of so many busy SMs takes from HBM, at most; they have a TPC
    each as long as there are enough."""
    return (gpu.sm_hbm_gbs if sms <= gpu.sms // 2 else gpu.tpc_hbm_gbs / 2) / gpu.clock


def running(traced: Traced, gpu: Gpu) -> int:
    """The number of clusters that start; with launch control they take over the others' tiles, and
    so does the recorded one."""
    if not traced.takes_over:
        return traced.clusters
    return min(at_once(traced, gpu), traced.clusters)


def at_once(traced: Traced, gpu: Gpu) -> int:
    """The number of clusters that the GPU has room for."""
    return clusters_at_once(gpu, traced.record.cluster_size) * traced.per_sm


def loaded(record: Record) -> dict[int, float]:
    """The bytes of each tensor that a cluster loads by TMA."""
    loads: dict[int, float] = defaultdict(float)
    for program in record.programs.values():
        for e in program:
            if isinstance(e, Load):
                loads[e.source[0]] += e.size
    return loads


def held_by_l2(record: Record, near: float) -> dict[int, float]:
    """The share of the bytes of each tensor that a cluster loads whose box it has loaded before,
    at most ``near`` bytes ago: L2 has it still. CTAs of a cluster are taken to load in step.
    """
    programs = [[e for e in p if isinstance(e, Load)] for p in record.programs.values()]
    latest: dict[tuple[object, ...], float] = {}
    loads: dict[int, float] = defaultdict(float)
    again: dict[int, float] = defaultdict(float)
    total = 0.0
    for together in zip_longest(*programs):
        for e in together:
            if e is None:
                continue
            loads[e.source[0]] += e.size
            # NOTE: records stored before boxes had numbers name the tensor alone
            if len(e.source) > 1 and total - latest.get(e.source, -inf) <= near:
                again[e.source[0]] += e.size
            total += e.size
            latest[e.source] = total
    return {tmap: again[tmap] / size for tmap, size in loads.items()}


def fetched(traced: Traced, gpu: Gpu) -> dict[int, Missed]:
    """The share of the bytes of each tensor that all clusters fetch from HBM, where each comes
    once; and once more if L2 keeps neither the tensor nor what all CTAs that run side by side fetch
    of it between two fetches of the same, and store meanwhile. What a CTA fetches again comes from
    HBM after what it fetches first. Of sectors that are alone in their 64 bytes, in no order, L2
    holds as many as it keeps of the tensor.
    """
    size, count = traced.record.cluster_size, running(traced, gpu)
    ctas = float(min(count, clusters_at_once(gpu, size) * traced.per_sm) * size)
    beside = min(count, at_once(traced, gpu))
    missed = {}
    loads = sum(loaded(traced.record).values())
    loads += sum(f.loaded for f in traced.record.fetched.values())
    if loads:
        ctas *= 1 + gpu.l2_stored * stored(traced.record, added=False) / loads
    for at, f in traced.record.fetched.items():
        once = min(f.size, f.different * count)
        lost = 0.0
        if f.size > gpu.l2_capacity:
            lost = sum(bytes_ * _lost(between * ctas, gpu) for between, bytes_ in f.again)
        all_ = f.loaded * count
        share = min(1.0, (once + lost * count) / all_) if all_ else 0.0
        again = sum(bytes_ for _, bytes_ in f.again) / f.loaded if f.loaded else 0.0
        first = min(1.0, share / (1 - again)) if again < 1 else 0.0
        rest = max(0.0, share - (1 - again) * first)
        near = f.size <= gpu.l1_kept
        scattered = max(first, 1.0 - gpu.l2_kept / f.size if f.size else 0.0)
        rest = rest / again if again else 0.0
        together = max(1.0, f.different * beside / f.size) if f.size else 1.0
        missed[at] = Missed(share, first, rest, near, scattered, together)
    return missed


def _lost(between: float, gpu: Gpu) -> float:
    """The share of what CTAs fetch again that L2 has lost, when so many bytes have passed."""
    if between <= gpu.l2_again:
        return 0.0
    most = gpu.l2_lost - gpu.l2_again
    return min(1.0, (between - gpu.l2_again) / most) if most else 1.0


def slices(traced: Traced, gpu: Gpu) -> float:
    """How many slices of L2 add at one time to the lines that clusters side by side add to: those
    of each, no more than lie between the first and the last line of all, nor than where each lies
    as far behind the one before as the last behind the first.
    """
    lines, first, end, span = traced.record.added
    beside = min(running(traced, gpu), at_once(traced, gpu))
    apart = (end - first) / max(traced.clusters, 1)
    different = max(1.0, min(lines * beside, end - first, span + apart * beside))
    return min(gpu.l2_slices, different**gpu.sum_slices)


def stored(record: Record, added: bool = True) -> float:
    """The bytes that a cluster stores, with what it adds to sums in global memory or without."""
    total = 0.0
    for program in record.programs.values():
        for e in program:
            if isinstance(e, Store):
                total += e.size if added or not e.adds else 0
            elif isinstance(e, Touch) and not e.waits:
                total += 32 * e.sectors if added or not e.adds else 0
    return total


def narrow(record: Record) -> float:
    """The tensor core cycles of a cluster's FLOPs, relative to those of operands of 16 bits, where
    its operands are narrower."""
    mmas = [e for program in record.programs.values() for e in program if isinstance(e, Mma)]
    flops = sum(e.flops for e in mmas)
    return sum(e.flops / max(e.rate, 1.0) for e in mmas) / flops if flops else 1.0


def shared(traced: Traced, loads: dict[int, float]) -> float:
    """The share of the bytes that a cluster loads which another loads at about the same time;
    ``loads`` are its bytes of each tensor.
    """
    known = {tmap: size for tmap, size in loads.items() if tmap in traced.sharing}
    different = sum(size * traced.sharing[tmap].part for tmap, size in known.items())
    return 1.0 - different / sum(known.values()) if known else 0.0


def dram(traced: Traced, loads: dict[int, float], gpu: Gpu) -> float:
    """The bytes that ``loads`` of all clusters bring from HBM: each tensor once if L2 holds them
    all, else once again in each round the part that CTAs which run side by side do not share, and
    that no CTA of the cluster has loaded shortly before.
    """
    footprint = sum(s.footprint for s in traced.sharing.values())
    record, total = traced.record, 0.0
    near = gpu.l2_capacity / min(traced.clusters, clusters_at_once(gpu, record.cluster_size))
    held = held_by_l2(record, near)
    for tmap, size in loads.items():
        size *= 1.0 - held.get(tmap, 0.0)
        sharing = traced.sharing.get(tmap)
        if sharing is None:  # NOTE: an unrecorded tensor counts as the best shared of the others
            total += size * min((s.part for s in traced.sharing.values()), default=1.0)
            continue
        least = min(sharing.footprint or size, size)
        again = min(size, sharing.part * size) if footprint > gpu.l2_capacity else 0.0
        total += max(least, again)
    return total
