"""A model of the time that Hopper's general GEMM kernel takes with a config.

The model counts the resources that a config uses: tensor core cycles, bytes through the port of
shared memory, bytes of each SM through L2, bytes from memory, energy, and everything that is not
hidden: the first loads, the last stores, the exchange of sums. Configs whose tiles all run at once
and configs of persistent CTAs have constants of their own. The model's error by its features
(cutex/measured/trees.py), and what this leaves at measured pairs nearby (nearby.py), are added.
All is fitted (cutex/fit) on times of pairs of a problem and a config (results/configs): on H200s,
of all of the half of the corpus that is for fitting (cutex/problem/models.py) and other such
problems; on an H100, of products of any sizes (cutex/problem/any_shapes.py).

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import ELEMENT, ceil_div
from cutex.kernels.gemm.sm90.candidates import at_once, candidates
from cutex.kernels.gemm.sm90.config import Sm90Config, placed_unevenly
from cutex.kernels.gemm.sm90.loading import LINE, SECTOR, Majors
from cutex.kernels.gemm.sm90.partial_rows import apart, lines_again, rows_outside
from cutex.measured.nearby import CAUTION, errors_nearby
from cutex.measured.trees import trees

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

__all__ = ["Costs", "Counts", "candidates", "count", "modelled", "place", "predict", "predictions"]

MEASURED = "gemm-sm_90a"  # the model's name in cutex/measured
MOST_SHARERS = 4  # clusters whose requests of the larger operand cost more than the first's
SPREAD = 0.99  # time, relative to tiles that leave a few SMs idle
WALKED_ONCE = 1.04  # time of one round in a persistent loop, relative to tiles without a loop
# relative time of stores of 16 and of 32 columns of C at a time: 32 and 64 bytes of a line of 128;
# swapped, a whole line
SHORT_STORES = {False: {16: 1.9, 32: 1.4}, True: {16: 1.15}}
HIDING = 1.5  # exponent of a ping-pong store and the next mainloop: infinite if one hid the other
NEAR = 1.4  # configs above this multiple of the least modelled time are not corrected
OF_BOARD = 1.5  # distance of pairs on boards of which one has twice the other's memory bandwidth
# time of eight CTAs that share a K, by the number of operands that it is contiguous in, relative to
# what was fitted to few such
EIGHT_SHARE = (1.2, 1.06, 1.0)  # docs/facts/gemm.md#eight-share-k
# and of boxes along which K is contiguous in neither operand, by the CTAs that share them
BOXES_SHARED = {4: 1.04, 8: 1.08}  # docs/facts/gemm.md#boxes-shared
# relative time of CTAs that leave a share's sums in memory; microseconds of the kernel that adds
# them up, and the rate at which they are left and read (docs/facts/gemm.md#k-shares): as measured,
# and 4 % more, since less of them was timed than of others
SHARES, ADD_US, ADD_GBS = 1.0, 1.22, 1680.0
TURN_US = 0.2  # of a warpgroup's turn to store (docs/facts/gemm.md#stores-in-turns)
LAST_STORE = 0.5  # the share of a tile's store that nothing hides at the end
# what runs long enough to be held at the power limit, in FLOPs, and the exponent of its time by the
# bytes asked of L2 for an element of C beyond those of 128x192 in pairs: few such were timed
LONG_RUN, TRAFFIC = 2.5e11, 0.2  # docs/facts/gemm.md#tiles-of-144-at-8192
PAIRS_OF_192 = 224 / 192  # bytes asked for in a K tile per byte of its K and 128 elements of C


@dataclass(frozen=True)
class Costs:
    """Rates and times that an Arch does not state, fitted on H200s with Gaussian bf16 data."""

    clock_ghz: float
    mma: float  # cycles of wgmma, relative to those of its FLOPs at the peak
    port_reads: float  # cycles of the smem port per 128 bytes that wgmma reads
    port_writes: float  # cycles of the smem port per 128 bytes that TMA writes
    l2_bytes: float  # bytes that one SM gets through L2 in a cycle, however many SMs load
    paired: float  # the share of a load's time caused by the loads of the TPC's other SM
    received: float  # cost of a byte that another CTA of the cluster requested, relative to its own
    latency: float  # cycles in which the ring must be filled once
    overlap: float  # exponent of MMAs, port, loads, latency: infinite if the longest hid the others
    step: float  # cycles to hand over a slot of the ring
    epilogue_bytes: float  # bytes of C stored in a cycle
    tile: float  # further cycles of a tile
    flop_us: float  # energy at the power limit: microseconds of the GPU per FLOP,
    l2_us: float  # per byte through L2
    memory_us: float  # and per byte of memory
    memory_gbs: float
    again: float  # cost of a byte of the larger operand that further clusters request
    written: float  # further cost of a byte of C
    sm_gbs: float  # an SM's memory bandwidth while both SMs of every TPC are at work
    lone_sm_gbs: float  # and with at most one SM of each TPC at work
    even_sm_gbs: float  # and of clusters that wait for the kernel before to end
    waiting_us: float  # the time that this takes
    balance: float  # exponent that combines time, energy and memory
    launch_us: float
    exchange_us: float  # fixed time of an exchange of sums between the CTAs of a split
    exchange_gbs: float  # rate at which sums are read
    narrow: float  # time of loads in boxes of few rows, relative to others
    outside: float  # cycles for a row of a TMA box outside of the operand
    straddled: float  # further cost of a byte in a row of a box that begins within a sector of L2


ROUND = Costs(
    clock_ghz=4.03,
    mma=2.29,
    port_reads=0.0592,
    port_writes=3.47,
    l2_bytes=31.9,
    paired=0.399,
    received=0.247,
    latency=4270.0,
    overlap=12.7,
    step=3.73,
    epilogue_bytes=14.9,
    tile=5.32,
    flop_us=1.15e-09,
    l2_us=6.28e-12,
    memory_us=4.88e-10,
    memory_gbs=4350.0,
    again=0.247,
    written=0.516,
    sm_gbs=42.4,
    lone_sm_gbs=495.0,
    even_sm_gbs=100.0,
    waiting_us=0.698,
    balance=3.82,
    launch_us=1.67,
    exchange_us=0.151,
    exchange_gbs=20.5,
    narrow=1.28,
    outside=2.95,
    straddled=2.61,
)
WALK = Costs(
    clock_ghz=3.24,
    mma=2.03,
    port_reads=2.02,
    port_writes=0.353,
    l2_bytes=35.5,
    paired=0.9,
    received=0.589,
    latency=4410.0,
    overlap=13.6,
    step=1.0,
    epilogue_bytes=16.6,
    tile=18.9,
    flop_us=1.21e-09,
    l2_us=1.99e-11,
    memory_us=1.22e-10,
    memory_gbs=4270.0,
    again=0.166,
    written=0.0917,
    sm_gbs=67.7,
    lone_sm_gbs=101.0,
    even_sm_gbs=52.0,
    waiting_us=0.9,
    balance=3.85,
    launch_us=1.87,
    exchange_us=1.42,
    exchange_gbs=37.6,
    narrow=1.18,
    outside=0.726,
    straddled=2.65,
)


class Counts(NamedTuple):
    """The resources that a config uses on a problem; each field may be an array over many
    configs."""

    one_round: Any  # bool: whether all tiles run at once
    walked_once: Any  # bool: one round of persistent CTAs, whose loop could take more
    spread: Any  # bool
    pingpong: Any  # bool
    useful: Any  # CTAs that compute something
    ctas: Any  # one for each tile, also with stream-K
    sms: Any  # of the GPU
    rounds: Any  # of CTAs that run at one time; not a whole number with stream-K
    alone: Any  # bool: no CTA is in a cluster, and no TPC has two CTAs
    one_each: Any  # bool: TPCs have one useful CTA at most
    waits: Any  # bool: clusters that start when a kernel like theirs has ended
    k_tiles: Any  # K tiles that a CTA computes for one tile
    slots: Any
    mma: Any  # cycles of a K tile's FLOPs
    reads: Any  # smem cycles of wgmma, 128 bytes each: A once, B once per warpgroup
    writes: Any  # smem cycles of TMA, 128 bytes each
    asked: Any  # bytes of a K tile that a CTA requests from L2
    received: Any  # bytes that it gets because another CTA of the cluster requested them
    narrow: Any  # bool: B is loaded in boxes of few rows
    outside: Any  # rows of boxes outside of the operands
    straddled: Any  # bytes of `asked` in rows that begin within a sector of L2
    cut: Any  # bytes of `asked` in rows that two lines of L2 hold, not one
    elements: Any  # of a tile of C
    store: Any  # relative time of storing a byte of C
    flops: Any  # of useful CTAs
    memory_bytes: Any
    again_bytes: Any  # bytes of the larger operand that further clusters request
    written: Any  # bytes of C, those in rows that begin within a sector counted twice
    split: Any  # bool: whether CTAs share the K of a tile
    exchanged: Any  # bytes of sums that a CTA reads from others, one after the other
    added: Any  # bytes of sums that a second kernel adds up
    lines_again: Any  # bytes of lines that memory is asked for by two streamed tiles
    memory: Any  # the board's memory bandwidth and
    watts: Any  # its power limit, relative to the arch's own board


def count(
    config: Sm90Config,
    problem: GemmProblem,
    arch: Arch,
    batch: int = 1,
    majors: Majors = (True, True),
) -> Counts:
    """The resources that `config` uses on `batch` of `problem` in one launch."""
    c = config
    m, n = c.computed(problem)
    size = c.cluster_m * c.cluster_n * c.split_k
    down, across = ceil_div(m, c.tile_m), ceil_div(n, c.tile_n)
    shares = c.split_k * c.k_shares
    useful = arch.num_sms if c.spread else down * across * batch * shares
    down = ceil_div(down, c.cluster_m) * c.cluster_m
    across = ceil_div(across, c.cluster_n) * c.cluster_n
    ctas = arch.num_sms if c.spread else down * across * batch * shares
    most = at_once(size, arch.num_sms)
    rounds = ctas / most if c.stream_k else ceil_div(ctas, most)
    told_apart = c.one_tile or shares > 1
    k_tiles = ceil_div(ceil_div(problem.k, c.k_of(16)), shares)
    asked = (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) * c.k_bytes
    sharers = ceil_div(across, c.cluster_n) if m >= n else ceil_div(down, c.cluster_m)
    larger = max(m, n) * problem.k * ELEMENT * batch
    again = 0 if c.spread else (min(sharers, MOST_SHARERS) - 1) * larger
    steps = c.k_bytes / 32  # of a wgmma
    tpcs = arch.num_sms // 2  # pairs of SMs; the first CTAs take one SM of each
    return Counts(
        one_round=told_apart or (rounds == 1 and not c.stream_k),
        walked_once=rounds == 1 and not told_apart and not c.stream_k,
        spread=c.spread,
        pingpong=c.pingpong,
        useful=most if c.stream_k else useful,
        ctas=ctas,
        sms=arch.num_sms,
        rounds=rounds,
        alone=size == 1 and ctas <= tpcs,
        one_each=size <= 2 and useful <= tpcs,
        waits=c.clusters_stream and placed_unevenly(arch.num_sms - ctas, arch.num_sms, problem.k),
        k_tiles=k_tiles,
        slots=c.num_stages,
        mma=c.tile_m / 64 * c.tile_n / 2 * steps,
        reads=c.tile_m / 64 * (16 + c.tile_n / 4) * steps,
        writes=(c.tile_m + c.tile_n) / 4 * steps,
        asked=asked,
        received=c.stage_bytes - asked,
        narrow=not (majors[0] if c.swap_ab else majors[1]) and c.tile_n % 64 > 0,
        outside=rows_outside(c, m, n, rounds, majors) * c.k_bytes / 128,
        straddled=apart(c, problem, majors, SECTOR),
        cut=apart(c, problem, majors, LINE),
        elements=c.tile_m * c.tile_n,
        store=SHORT_STORES[c.swap_ab].get(c.epi_n, 1.0),
        flops=2 * useful * c.tile_m * c.tile_n * k_tiles * c.k_of(16),
        memory_bytes=problem.bytes * batch,
        again_bytes=again,
        written=problem.m
        * problem.n
        * ELEMENT
        * batch
        * (2 if problem.n * ELEMENT % SECTOR else 1),
        split=c.split_k > 1 or c.stream_k > 0,
        exchanged=_exchanged(c, rounds),
        added=4 * useful * c.tile_m * c.tile_n if c.k_shares > 1 else 0,
        lines_again=lines_again(c, problem, batch, majors) if c.stream_k else 0,
        memory=arch.hbm_gbs / arch_named(arch.name).hbm_gbs,
        watts=arch.watts / arch_named(arch.name).watts,
    )


def _exchanged(c: Sm90Config, rounds: float) -> float:
    """The bytes of sums that a CTA reads from others; with stream-K, those of a CTA that finishes a
    tile, and those that it waits for to be written."""
    if c.stream_k:
        return c.partial_bytes * (1 + max(1.0, 1 / rounds - 1))
    return c.partial_bytes * (c.split_k - 1) / c.split_k


class Terms(NamedTuple):
    """What the model counts for each config: arrays, in cycles of one step of K and one CTA (`load`
    to `latency`), of one tile (`leaving`), and in microseconds."""

    load: Any  # L2 to shared memory
    port: Any  # of shared memory
    mma: Any
    latency: Any  # of the first loads, for each slot
    leaving: Any  # storing a tile
    energy: Any  # at the power limit
    memory: Any
    time: Any  # of the whole launch


def terms(x: Counts, round_costs: Costs = ROUND, walk_costs: Costs = WALK) -> Terms:
    """The terms of configs that use the resources `x`, whose fields are arrays."""

    class Here:
        """The costs by name, for each config those of its kind."""

        def __getattr__(self, name: str) -> np.ndarray:
            return np.where(x.one_round, getattr(round_costs, name), getattr(walk_costs, name))

    cost = Here()
    # one step of K of one CTA, in cycles
    load = (
        (x.asked + cost.received * x.received) / cost.l2_bytes * np.where(x.narrow, cost.narrow, 1)
    )
    load = load + cost.straddled * x.straddled / cost.l2_bytes
    load = load * (1 - cost.paired * x.alone) + cost.outside * x.outside
    port = cost.port_reads * x.reads + cost.port_writes * x.writes
    mma, latency, p = cost.mma * x.mma, cost.latency / (x.slots - 1), cost.overlap
    step = sum(unit**p for unit in (mma, port, load, latency)) ** (1 / p) + cost.step

    leaving = x.elements * x.store * ELEMENT / cost.epilogue_bytes
    main = x.k_tiles * step + cost.tile
    hidden = (main**HIDING + leaving**HIDING) ** (1 / HIDING)
    busy = x.rounds * np.where(x.pingpong, hidden, main + leaving) / cost.clock_ghz / 1e3
    energy = x.flops * cost.flop_us + x.asked * x.ctas * x.k_tiles * cost.l2_us
    energy = (energy + x.memory_bytes * cost.memory_us) / x.watts
    of_sm = np.where(x.one_each, cost.lone_sm_gbs, cost.sm_gbs)
    of_sms = x.useful * np.where(x.waits, cost.even_sm_gbs, of_sm)
    gbs = np.minimum(cost.memory_gbs * x.memory, of_sms)
    passed = x.memory_bytes + cost.again * x.again_bytes + cost.written * x.written
    memory = passed / gbs / 1e3
    q = cost.balance
    time = (busy**q + energy**q + memory**q) ** (1 / q)
    time = time + x.split * (cost.exchange_us + x.exchanged / cost.exchange_gbs / 1e3)
    time = time + x.waits * cost.waiting_us
    time = time + cost.launch_us + LAST_STORE * leaving / cost.clock_ghz / 1e3
    time = time * np.where(x.walked_once, WALKED_ONCE, 1) * np.where(x.spread, SPREAD, 1)
    return Terms(load, port, mma, latency, leaving, energy, memory, time)


def modelled(x: Counts, round_costs: Costs = ROUND, walk_costs: Costs = WALK) -> np.ndarray:
    """The microseconds that the model alone predicts; the fields of `x` are arrays."""
    time: np.ndarray = terms(x, round_costs, walk_costs).time
    return time


def columns(counts: Sequence[Counts]) -> Counts:
    """`counts` as one Counts of arrays."""
    return Counts(*map(np.array, zip(*counts, strict=True)))


def place(
    config: Sm90Config, problem: GemmProblem, counts: Counts, majors: Majors, bits: int = 16
) -> tuple[float, ...]:
    """The point of the pair of `problem`, with elements of `bits`, and `config`, in the space of
    measured pairs."""
    c = config
    return (
        *(log2(problem.m), 1.4 * log2(problem.n), log2(problem.k)),
        *(2.0 * log2(c.tile_m), 1.5 * log2(c.tile_n)),
        *(2.8 * log2(c.cluster_m), 4.0 * log2(c.cluster_n), 1.4 * log2(c.split_k)),
        *(1.5 * c.swap_ab, 3.0 * c.pingpong, 2.8 * (c.rows > 0), 2.8 * (c.columns > 0)),
        *(5.0 * c.spread - 5.0 * (c.stream_k > 0), 0.5 * c.mma_warpgroups),
        *(6.3 * counts.ctas / counts.sms / counts.rounds, log2(counts.rounds)),
        *(2.1 * counts.narrow, 0.5 * (1.0 - majors[0]), 1.5 * log2(16 / bits)),
        *(OF_BOARD * log2(counts.memory), 1.0 * (counts.straddled > 0), 0.4 * (c.box_rows > 0)),
    )


def features(places: np.ndarray, x: Counts, of: Terms) -> np.ndarray:
    """What the model's error is derived from: for pairs at `places` (PAIR, DIMENSION) with the
    terms `of` them, (PAIR, FEATURE)."""
    return np.column_stack(
        [
            places,
            np.log(of.time),
            x.rounds,
            x.useful / x.sms,
            np.log2(x.k_tiles),
            x.slots,
            x.asked,
            x.mma / x.asked,
            x.outside,
            x.straddled / x.asked,
            x.elements * x.store,
            x.one_round,
            x.written / x.memory_bytes,
            np.log2(x.memory_bytes),
            x.waits,
            x.ctas / x.sms / np.maximum(1, x.rounds),
            np.log2(x.exchanged + 1),
            x.received / x.asked,
            # what bounds a step, and the shares of the time: trees cannot divide
            np.log(of.load / of.mma),
            np.log(of.port / of.mma),
            np.log(of.latency / of.mma),
            (x.asked + x.received) / x.mma,
            np.log(of.energy / of.time),
            np.log(of.memory / of.time),
            x.rounds * x.k_tiles * of.mma / of.time,
            x.rounds * of.leaving / of.time,
            x.asked * x.ctas * x.k_tiles / of.time,
            x.cut / x.asked,
        ]
    )


def predictions(
    configs: Sequence[Sm90Config],
    problem: GemmProblem,
    arch: Arch,
    batch: int = 1,
    majors: Majors = (True, True),
    bits: int = 16,
    caution: float = CAUTION,
) -> list[float]:
    """The predicted microseconds of `batch` such problems in one launch, with each config, where an
    element of A and B has so many bits; K counts 2 bytes. `caution`: as errors_nearby."""
    if not configs:
        return []
    counts = [count(c, problem, arch, batch, majors) for c in configs]
    pairs = zip(configs, counts, strict=True)
    places = np.array([place(c, problem, x, majors, bits) for c, x in pairs], np.float32)
    every = columns(counts)
    of = terms(every)
    times = of.time * np.exp(trees(MEASURED).predict(features(places, every, of)))
    again = every._replace(memory_bytes=every.memory_bytes + every.lines_again)
    times *= modelled(again) / of.time  # trees were fitted without
    times = np.where(every.added, SHARES * times + ADD_US + every.added / ADD_GBS / 1e3, times)
    near = np.flatnonzero((times <= NEAR * times.min()) & (every.added == 0))
    times[near] *= np.exp(errors_nearby(MEASURED, places[near], caution))
    times *= np.where([c.split_k == 8 for c in configs], EIGHT_SHARE[sum(majors)], 1)
    times += [TURN_US * (c.storing_turns - 1) for c in configs]
    if not any(majors):
        times *= [
            BOXES_SHARED.get(c.cluster_m * c.cluster_n, 1) if c.box_rows else 1 for c in configs
        ]
    if problem.flops * batch >= LONG_RUN:
        asked = every.asked * 128 / every.elements / np.array([c.k_bytes for c in configs])
        times *= np.maximum(1.0, asked / PAIRS_OF_192) ** TRAFFIC
    return times.tolist()


def predict(
    config: Sm90Config,
    problem: GemmProblem,
    arch: Arch,
    batch: int = 1,
    majors: Majors = (True, True),
) -> float:
    """The predicted microseconds of `batch` such problems in one launch."""
    return predictions([config], problem, arch, batch, majors)[0]
