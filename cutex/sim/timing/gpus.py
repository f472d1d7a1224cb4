"""The constants of each GPU: in cycles of the SM unless a comment names another unit; docs/time.md
gives the source and the error of each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Power:
    """The constants of the power model; energies are those at the highest clock."""

    limit_w: float = 695.0  # the board's power limit
    idle_w: float = 101.0
    flop_pj: float = 0.911  # for a 16-bit FLOP on Gaussian data
    l2_pj: float = 27.4  # for a byte that an SM loads or stores
    issue_pj: float = 276.0  # for an instruction of a warp
    hbm_pj: float = 29.6  # for a byte of HBM, at any clock
    volts_base: float = 0.45
    volts_slope: float = 0.205  # for each GHz
    burst_ghz: float = 0.598  # loss of clock times the share of time with MMAs, if they are bursts
    lowest_ghz: float = 0.9


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str
    sms: int
    clock: float  # GHz, the highest
    mma_flops: float  # 16-bit FLOPs per cycle and SM
    smem_bytes: float  # bytes per cycle of an SM's smem port
    l2_bytes: float  # bytes per cycle, loads of all SMs from L2
    hbm_gbs: float  # GB/s of a stream of loads
    sm_hbm_gbs: float  # GB/s that one SM takes of it, alone in its TPC
    tpc_hbm_gbs: float  # and both SMs of a TPC
    store_bytes: float  # bytes per cycle, stores of all SMs to L2
    tma_bytes: float  # bytes per cycle, TMA loads of one SM
    l2_latency: float  # of a TMA load that hits L2
    hbm_latency: float  # more, of one that misses
    first_miss: float = 0.0  # more again, of an SM's first one of a tensor
    hbm_burst: float = 1.0  # share of HBM's rate for first loads that all SMs want at once
    latency_spread: float = 0.0  # share by which those of a load are longer or shorter, at most
    l2_requests: float = 96.0  # rows of boxes per cycle, of all SMs
    l2_merged: float = 0.5  # share of bytes saved where several SMs request the same at one time
    l2_copies: float = 0.0  # cost of each further CTA of a multicast, as a share of a load's
    l2_store: float = 0.0  # cost of a stored byte at L2, in loaded bytes; 0: a path of its own
    hbm_written: float = 1.2  # cost of a byte of ordinary stores, in bytes that are read
    hbm_ahead: float = 2000.0  # the same of HBM, for ordinary loads
    l2_ahead: float = 0.0  # cycles by which an SM may exceed its share of L2, as others use less
    tma_issue: float = 8.0  # of the TMA engine, for an instruction
    tma_row: float = 0.9  # of the TMA engine, for a row of a box of any length
    tma_outside: float = 13.6  # bytes per cycle, rows of boxes that are outside their tensor
    tma_zeros: float = 15.5  # bytes per cycle, boxes that are wholly outside
    tma_gap: float = 8.0  # of the warp that issues a copy
    tma_store_bytes: float = 31.8  # bytes per cycle, TMA stores of one SM
    store_read: float = 170.0  # from the end of a store's service until it has read smem
    store_latency: float = 180.0  # from the end of a store's service until it is complete
    write_buffer: float = 8e6  # bytes that L2 takes before HBM slows stores down
    store_queue: float = 8.0  # ordinary stores of a warp in flight before it has to wait
    line_cycles: float = 2.4  # of an SM, for a 128-byte line that ordinary instructions write
    load_line: float = 1.64  # of an SM, for such a line of which they load anything from L2
    partial_sector: float = 2.2  # of an SM, for a sector that is written in part, or changed
    part_of_line: float = 3.47  # of an SM, for a line of which no sector is stored by half
    same_word: float = 3.0  # of an SM, for each lane of a warp that adds to the same word
    sector_apart: float = 2.65  # of an SM, for one that cp.async copies across multiples of 32
    missed_line: float = 1.64  # of an SM's stores, for a line that loads do not find in L1
    l1_line_cycles: float = 0.3  # of an SM, for a line that L1 holds
    scattered_sector: float = 87.0  # bytes' time of memory for one at random; 0: as for others
    global_latency: float = 300.0  # of an ordinary load that misses L2, at least
    hbm_tail: float = 160.0  # more, in the mean of its sectors, of which the latest counts
    hbm_crowd: float = 75.0  # more, times the share by which memory is busy over the idle one
    l1_latency: float = 40.0  # of one that finds all in L1
    l1_kept: float = 66e3  # bytes of a tensor that stays in L1 from one CTA to the next
    peer_bytes: float = 9.0  # bytes per cycle that an SM loads from others' shared memory
    sent_bytes: float = 16.0  # bytes per cycle that an SM sends to others' shared memory
    peer_latency: float = 200.0  # of such a load, and of what is sent
    wake: float = 92.0  # from a phase's end to the waiter's next instruction
    try_wait: float = 90.0  # of a wait for a phase that is complete already
    remote_arrive: float = 60.0
    bar: float = 32.0
    cluster_barrier: float = 180.0
    wgmma_latency: float = 60.0  # from an MMA's end to its waiter's next instruction
    wgmma_issue: float = 4.0
    wgmma_queue: int = 8
    shared_registers: bool = False  # accumulators of MMAs are in registers
    fma_beside_mma: float = 2.0  # cycles of the FMA pipe while a wgmma runs, over those without
    alu_beside_mma: float = 2.0
    mufu_beside_mma: float = 1.33
    mufu_lost_beside_mma: float = 0.5  # cycles that MUFU loses to each FMA or ALU instruction
    mma_beside_fma: float = 0.19  # cycles that the tensor core loses to each FMA of a sub-core
    mma_commit: float = 130.0  # from the last tcgen05.mma to its commit's arrival
    tmem_bytes: float = 512.0  # bytes per cycle, tcgen05.ld and st of an SM
    tmem_latency: float = 30.0
    tmem_copy_bytes: float = 128.0  # bytes per cycle that tcgen05.cp writes; no MMA runs meanwhile
    launch_control: float = 800.0
    cta_turnover: float = 1000.0
    cta_interval: float = 0.0  # of an SM, from the start of a CTA to that of the next, at least
    launch: float = 3000.0  # from the end of the kernel before to the first instruction
    overlapped_launch: float = 0.0  # the same where the kernel before lets it start; 0: as long
    l2_capacity: float = 50e6  # bytes of tensors that L2 keeps
    l2_kept: float = 25e6  # the same of what SMs at random load, of which both halves keep a copy
    l2_again: float = 57e6  # bytes since then after which L2 loses of what a CTA loads again
    l2_lost: float = 87e6  # and after which it has lost all
    l2_stored: float = 1.0  # how much a stored byte counts among these
    sum_sector: float = 2.95  # of a slice of L2, for a sector in which ordinary instructions add
    sum_slices: float = 0.85  # power of the lines added to that gives the slices at work
    l2_slices: float = 118.0  # slices that add, at most
    clusters_of_four: int = 0  # clusters of 4 CTAs that run at one time; 0: sms // 4
    power: Power = Power()
    band: float = 0.1  # expected relative error of the cycles
    clock_band: float = 0.05  # expected relative error of the clock

    @property
    def hbm_bytes(self) -> float:
        """HBM bytes per cycle of the SMs at ``clock``."""
        return self.hbm_gbs / self.clock

    def at(self, ghz: float) -> Gpu:
        """The same GPU with its SMs at ``ghz``: the times of HBM and launches stay the same in
        seconds.
        """
        share = ghz / self.clock
        return replace(
            self, clock=ghz, launch=self.launch * share,
            overlapped_launch=self.overlapped_launch * share,
            hbm_latency=self.hbm_latency * share, first_miss=self.first_miss * share,
        )  # fmt: skip


B200 = Gpu(
    "B200", "sm_100a", sms=148, clock=1.965, mma_flops=8192, smem_bytes=128, l2_bytes=12700.0,
    hbm_gbs=7260.0, sm_hbm_gbs=86.0, tpc_hbm_gbs=112.0, store_bytes=5000.0, tma_bytes=128.0,
    l2_latency=600.0, hbm_latency=580.0, latency_spread=0.2, l2_requests=156.0, l2_merged=0.0,
    l2_copies=1.06, l2_store=2.95, l2_ahead=640.0, l2_capacity=77e6, l2_kept=60e6,
    l2_again=60e6, l2_lost=60e6, l2_stored=0.0, sum_sector=0.0, missed_line=0.0,
    global_latency=600.0, hbm_tail=0.0, hbm_crowd=0.0, l1_kept=0.0, clusters_of_four=33,
    try_wait=10.0, tmem_copy_bytes=170.0, load_line=2.4, partial_sector=32 * 148 / 5000,
    part_of_line=2.4, same_word=0.0, l1_line_cycles=1.0, scattered_sector=0.0,
    mma_commit=150.0, launch_control=800.0, launch=1800.0, cta_turnover=450.0,
    band=0.13, clock_band=0.11,
    power=Power(
        limit_w=1000.0, idle_w=180.0, flop_pj=0.46, issue_pj=175.0, l2_pj=15.0, hbm_pj=40.0,
        volts_slope=0.2,
    ),
)  # fmt: skip
H200 = Gpu(
    "H200", "sm_90a", sms=132, clock=1.98, mma_flops=4096, smem_bytes=128, l2_bytes=4620.0,
    hbm_gbs=4500.0, sm_hbm_gbs=60.0, tpc_hbm_gbs=78.0, store_bytes=2550.0, tma_bytes=106.0,
    l2_latency=227.0, hbm_latency=600.0, first_miss=900.0, hbm_burst=0.65, launch=3150.0,
    overlapped_launch=200.0, cta_turnover=450.0, cta_interval=160.0, clusters_of_four=30,
    shared_registers=True,
)  # fmt: skip
# The same chip with other memory and L2: rates and the latency of memory by the probes
# (cutex/bench/clock_probes.py) on an H100 80GB HBM3 of 700 W, `l2_requests` less by as much as
# L2's bytes are, energies fitted to clocks of the rows of cycles-nvidia-h100.jsonl that are not
# held out. The rest is the H200's, which the probes gave again within 3 %.
H100 = replace(
    H200, name="H100", hbm_gbs=3150.0, l2_bytes=3930.0, l2_requests=82.0, store_bytes=2120.0,
    hbm_latency=700.0, l2_capacity=H200.l2_capacity * 50 / 60, l2_kept=H200.l2_kept * 50 / 60,
    l2_again=H200.l2_again * 50 / 60, l2_lost=H200.l2_lost * 50 / 60,
    hbm_written=1.0,  # with an H200's 1.2 attention's stage 1 would be 7 % off instead of 2
    band=0.15, clock_band=0.1,
    power=replace(
        H200.power, idle_w=70.0, flop_pj=0.76, issue_pj=570.0, l2_pj=32.9, burst_ghz=0.7,
    ),
)  # fmt: skip

# By constant: the source and the error of the H200's value, then of the B200's. "probe" is a kernel
# of kernels/probes/sm90.py, measured 2026-11-22 (results/timing/); "fit" is to the rows of
# results/timing/cycles-nvidia-h200.jsonl that are not held out; "prior" is a published figure or an
# estimate.
SOURCES: dict[str, tuple[str, str]] = {
    "sms": ("driver", "vendor"),
    "clock": ("driver's highest", "1.965 GHz: SemiAnalysis's node"),
    "mma_flops": ("probe busy: N/2 cycles, +-0.3 %", "264 published points, N/2 cycles, +-1 %"),
    "smem_bytes": ("probe busy: 16 + N/4 cycles below N = 64, +-1 %", "the same points, +-1 %"),
    "l2_bytes": (
        "probe tma: 132 SMs, each another box, +-5 %",
        "fit: rows of a B200 at 1300 MHz, +-10 %",
    ),
    "l2_requests": ("fit, stage 0, +-5 %", "prior: as many more as bytes"),
    "l2_merged": ("fit, stages 1 to 5; +-0.15", "none is seen in those rows"),
    "l2_copies": ("none is seen: each is free", "fit: the same, +-0.2; a multicast saves nothing"),
    "l2_store": ("stores have a path of their own", "fit: the same, +-10 %"),
    "hbm_written": ("fit: row kernels that write as much as they read, +-5 %", "the H200's"),
    "hbm_ahead": ("fit: row kernels of one CTA an SM, +-1000", "the H200's"),
    "l2_ahead": ("none is seen", "fit: the same, +-300"),
    "sm_hbm_gbs": (
        "kernels of 8 to 64 CTAs that stream weights or keys, +-5 %",
        "prior: as much more than its share",
    ),
    "tpc_hbm_gbs": ("the same, of 80 to 108 CTAs, +-5 %", "prior: as much more than its share"),
    "hbm_gbs": ("probe tma, 6 GB, +-3 %", "SemiAnalysis, TMA, +-3 %"),
    "store_bytes": ("probe tmastores: 132 SMs into L2, +-8 %", "prior"),
    "tma_store_bytes": ("probe tmastores: one SM, +-1 %", "the H200's"),
    "tma_bytes": ("probe tma: one SM, +-2 %", "prior, +-20 %"),
    "tma_row": ("fit, stage 0 of few rows, +-5 %", "the H200's"),
    "l2_latency": (
        "probe tma: a box at a time, +-5 %",
        "fit: the same, with hbm_latency; SemiAnalysis has 1413 in all under load",
    ),
    "hbm_latency": ("probe tma: the same from memory, +-10 %", "fit: half of both, +-30 %"),
    "hbm_burst": ("fit: small launches with tiles of many lengths, 0.6 to 0.7", "not known"),
    "first_miss": ("fit: half of the small launches, +-30 %", "not known"),
    "latency_spread": (
        "none, as in its fits; one load: +-7 % from L2, +-20 % from memory, eight of ten",
        "prior: an H200's from memory",
    ),
    "tma_outside": ("fit, stages 2 to 7 of 16 rows, +-5 %", "the H200's"),
    "tma_zeros": ("fit, stage 8 of 64 rows, +-5 %", "the H200's"),
    "tma_issue": ("prior, below what the probe can tell", "prior"),
    "tma_gap": ("prior", "prior"),
    "store_read": ("probe tmastores: one box less its bytes, +-5 %", "the H200's"),
    "store_latency": ("probe tmastores: the same, +-5 %", "the H200's"),
    "write_buffer": ("prior", "prior"),
    "store_queue": ("prior", "prior"),
    "line_cycles": ("fit, stages 2 and 3, +-10 %", "the H200's"),
    "load_line": ("probe: a sector of each of 32 lines, +-3 %", "line_cycles"),
    "partial_sector": (
        "probe: words 8 and 32 bytes apart, sums, +-3 %",
        "not measured: as whole ones",
    ),
    "part_of_line": ("probe: a word of each of 32 lines, 111 cycles, +-3 %", "line_cycles"),
    "same_word": ("probe: a word for each warp, +-3 %", "not measured: none"),
    "sector_apart": ("probe: cp.async into rows with 16 bytes of padding, +-10 %", "the H200's"),
    "missed_line": ("probe: words of 32 lines loaded and stored, +-20 %", "not measured: none"),
    "l1_line_cycles": ("probe: 32 words of 16 KB at random, 10 cycles", "1: as by its fits"),
    "scattered_sector": (
        "probe: sectors of 64 MB at random; L2 fetches 64 bytes, and memory is slower so, +-10 %",
        "not measured: one sector",
    ),
    "l1_latency": ("published: 41", "the H200's"),
    "global_latency": ("fit: probes of 2 to 32 KB under way in an SM, +-10 %", "prior, to all"),
    "hbm_tail": ("the same: 892 cycles to the last of 16 sectors, +-10 %", "not measured"),
    "hbm_crowd": (
        "the same, of 3.2 to 4.2 TB/s, and fresh kernels that copy words, +-20 %",
        "not measured",
    ),
    "l1_kept": ("fit: weights of rows of 64 KB, +-50 %", "not measured"),
    "peer_bytes": ("fit, microseconds of 23 kernels that split K, +-30 %", "the H200's"),
    "sent_bytes": ("fit, microseconds of 28 kernels that split K, +-30 %", "the H200's"),
    "peer_latency": ("published: 180 to 210", "the H200's"),
    "wake": ("probe signal mbarrier, +-2 %", "the H200's"),
    "try_wait": ("probe poll, +-3 %", "fit: rows of a B200, below 40"),
    "remote_arrive": ("probe peer, +-2 %", "the H200's"),
    "bar": ("probe signal named, +-2 %", "the H200's"),
    "cluster_barrier": ("half of 320 cycles there and back, +-20 %", "the H200's"),
    "wgmma_latency": ("probe busy: serial, 62 with its issue, +-3 %", "-"),
    "wgmma_issue": ("prior", "prior"),
    "wgmma_queue": ("prior: FlashGPU-Sim's fit has 5 to 8", "-"),
    "fma_beside_mma": ("probe busy: FMA beside wgmma, 1.8 to 2.6", "-"),
    "alu_beside_mma": ("probe busy: max and cvt beside wgmma, 1.9 to 2.5", "-"),
    "mufu_beside_mma": ("probe busy: ex2 beside wgmma, 1.26 to 1.33", "-"),
    "mufu_lost_beside_mma": ("fit on rows of the ladders; probe busy of one warp: 0.9 to 1.4", "-"),
    "mma_beside_fma": ("probe busy: wgmma beside FMA, 0.75 to 0.8 of four sub-cores", "-"),
    "mma_commit": ("-", "published: batches end 132 to 182 cycles late"),
    "tmem_bytes": ("-", "prior, not known well"),
    "tmem_latency": ("-", "prior, not known well"),
    "tmem_copy_bytes": ("-", "fit: the rows in nvfp4, +-15 %"),
    "launch_control": ("-", "prior, not known"),
    "cta_turnover": ("probe empty: 573 cycles with an empty CTA, +-10 %", "the H200's"),
    "cta_interval": (
        "probe: 65536 CTAs of 32 to 256 threads that do nothing take 40.0 us, +-3 %",
        "not measured",
    ),
    "launch": (
        "fit: half of the small launches, with their first reads of constants; a kernel without "
        "parameters has 2100 (probe empty), +-15 %",
        "prior",
    ),
    "overlapped_launch": (
        "fit: half of the small launches of stage 9, +-500",
        "not known: as `launch`",
    ),
    "clusters_of_four": (
        "kernels timed: 29 run at one time, 32 do not",
        "fit: rows of a B200 at 1300 MHz, 32 to 36",
    ),
    "l2_kept": ("gathers from 64 MB", "prior: half, as on an H200"),
    "l2_again": ("probe: rows that CTAs read twice, 8 to 68 MB in all, +-10 %", "l2_kept"),
    "l2_lost": ("the same, +-20 %", "l2_kept"),
    "l2_stored": ("the same, whose second pass stores: lost from 38 to 58 MB, +-50 %", "none"),
    "sum_sector": ("probe: sums into 8 to 512 lines, +-20 %", "not measured: none"),
    "sum_slices": ("the same, +-10 %", "not measured"),
    "l2_slices": ("the same, random words of 512 lines, +-10 %", "not measured"),
    "l2_capacity": ("60 MB less what stores take", "fit: the one problem whose A is larger"),
}


def constants_file(name: str) -> Path:
    """The file of the constants that probes measured on a GPU, which replace those above."""
    return Path(__file__).parents[3] / f"results/timing/constants-{name}.json"


def measured(board: Gpu, file: Path) -> Gpu:
    """Return ``board`` with the constants of ``file``, if it exists, and enter their source in
    SOURCES.
    """
    if not file.exists():
        return board
    kept = json.loads(file.read_text(encoding="utf-8"))
    for name in kept["constants"]:
        ours, _ = SOURCES[name]
        SOURCES[name] = ours, f"probe, {kept['when'][:10]}"
    return replace(board, **kept["constants"])


GPUS = {"h200": H200, "h100": H100, "b200": measured(B200, constants_file("b200"))}


def of_arch(arch: str) -> str:
    """The name of the GPU that stands for an arch. Raises ValueError for an arch without
    constants."""
    for name, found in GPUS.items():
        if found.arch == arch:
            return name
    raise ValueError(f"arch {arch!r}: there are constants for {', '.join(GPUS)}")


def gpu(text: str) -> Gpu:
    """The GPU that a command line names: "h200", or with other constants "h200,clock=1.6,l2=12".

    clock is in GHz, l2 and hbm in TB/s; sms and every field of `Gpu` go by their names. Raises
    ValueError, with one sentence, for anything else.
    """
    name, *changes = text.split(",")
    if name.lower() not in GPUS:
        raise ValueError(f"--gpu {name!r}: there are constants for {', '.join(GPUS)}")
    found = GPUS[name.lower()]
    for change in changes:
        key, _, value = change.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"--gpu {change!r}: takes NAME=NUMBER") from None
        if not 0 < number < float("inf"):
            raise ValueError(f"--gpu {change!r}: takes a number above 0")
        found = _changed(found, key, number)
    return found


def _changed(old: Gpu, key: str, number: float) -> Gpu:
    if key == "clock":
        power = replace(old.power, limit_w=float("inf"))
        return replace(old, clock=number, power=power)  # fixed: no power limit
    if key == "l2":
        return replace(old, l2_bytes=number * 1e3 / old.clock)
    if key == "hbm":
        return replace(old, hbm_gbs=number * 1e3)
    if key == "sms":
        part = number / old.sms
        return replace(old, sms=int(number), l2_bytes=old.l2_bytes * part)
    numeric = {f.name: f.type for f in fields(old) if f.type in ("float", "int")}
    if key not in numeric:
        raise ValueError(f"--gpu {key!r}: takes clock, l2, hbm, sms or one of {', '.join(numeric)}")
    value: Any = int(number) if numeric[key] == "int" else number
    return replace(old, **{key: value})
