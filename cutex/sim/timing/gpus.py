"""The constants of each GPU: cycles of the SM unless said; with source and band in docs/time.md."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Power:
    """Energies are at the highest clock."""

    limit_w: float = 695.0  # at which the board holds itself
    idle_w: float = 120.0
    flop_pj: float = 0.35  # of a 16-bit FLOP on Gaussian data
    l2_pj: float = 10.0  # of a byte that an SM loads or stores
    hbm_pj: float = 30.0  # of a byte
    sm_pj: float = 300.0  # of a cycle of an SM
    volts_base: float = 0.45
    volts_slope: float = 0.3  # a GHz
    lowest_ghz: float = 0.9


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str
    sms: int
    clock: float  # GHz, the highest
    mma_flops: float  # a cycle and SM, 16-bit
    smem_bytes: float  # a cycle, of an SM's port
    l2_bytes: float  # a cycle, of all SMs' loads
    hbm_gbs: float  # GB/s that a stream of loads gets
    store_bytes: float  # a cycle, of all SMs' stores to L2
    tma_bytes: float  # a cycle, into one SM
    l2_latency: float  # of a TMA load
    hbm_latency: float  # beside that
    tma_issue: float = 8.0  # of the engine, for an instruction
    tma_row: float = 1.0  # of the engine, for a row of a box, however short
    tma_gap: float = 8.0  # of the issuing warp
    store_read: float = 300.0  # after its service until a store has read smem
    store_latency: float = 700.0  # until it is done
    write_buffer: float = 8e6  # bytes that L2 takes before stores feel HBM
    store_queue: float = 8.0  # stores of a warp that wait for nothing
    line_cycles: float = 4.0  # of an SM, for a 128-byte line that ordinary instructions touch
    global_latency: float = 600.0
    wake: float = 20.0  # from a phase's end to the waiter's next instruction
    try_wait: float = 10.0  # of a wait that need not
    remote_arrive: float = 200.0
    bar: float = 20.0
    cluster_barrier: float = 180.0
    wgmma_latency: float = 60.0  # from an MMA's end to its waiter's next instruction
    wgmma_issue: float = 4.0
    wgmma_queue: int = 8
    mma_commit: float = 130.0  # from the last tcgen05.mma to its commit's arrival
    tmem_bytes: float = 512.0  # a cycle, of tcgen05.ld and st of an SM
    tmem_latency: float = 30.0
    launch_control: float = 800.0
    cta_turnover: float = 1000.0
    launch: float = 3000.0  # from the end of the kernel before to the first instruction
    l2_capacity: float = 50e6  # bytes that stay
    power: Power = Power()
    band: float = 0.1  # relative error to expect of cycles
    clock_band: float = 0.05  # and of the clock

    @property
    def hbm_bytes(self) -> float:
        """A cycle."""
        return self.hbm_gbs / self.clock


B200 = Gpu(
    "B200", "sm_100a", sms=148, clock=1.965, mma_flops=8192, smem_bytes=128, l2_bytes=10200.0,
    hbm_gbs=7260.0, store_bytes=5000.0, tma_bytes=128.0, l2_latency=500.0, hbm_latency=500.0,
    l2_capacity=100e6, mma_commit=150.0, launch_control=800.0,
    power=Power(limit_w=1000.0, idle_w=180.0, flop_pj=0.22), band=0.2, clock_band=0.15,
)  # fmt: skip
H200 = Gpu(
    "H200", "sm_90a", sms=132, clock=1.98, mma_flops=4096, smem_bytes=128, l2_bytes=5500.0,
    hbm_gbs=4270.0, store_bytes=3000.0, tma_bytes=82.0, l2_latency=420.0, hbm_latency=400.0,
)  # fmt: skip

GPUS = {"h200": H200, "b200": B200}


def of_arch(arch: str) -> str:
    """The name of the GPU that stands for an arch; ValueError for one without constants."""
    for name, found in GPUS.items():
        if found.arch == arch:
            return name
    raise ValueError(f"arch {arch!r}: there are constants for {', '.join(GPUS)}")


def gpu(text: str) -> Gpu:
    """As "h200", or with other constants, as "h200,clock=1.6,l2=12": clock in GHz, l2 and hbm in
    TB/s, sms, and every field of `Gpu` by its name. ValueError, in one sentence, for others.
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
        if number <= 0:
            raise ValueError(f"--gpu {change!r}: takes a number above 0")
        found = _changed(found, key, number)
    return found


def _changed(old: Gpu, key: str, number: float) -> Gpu:
    if key == "clock":
        power = replace(old.power, limit_w=float("inf"))
        return replace(old, clock=number, power=power)  # held, whatever it draws
    if key == "l2":
        return replace(old, l2_bytes=number * 1e3 / old.clock)
    if key == "hbm":
        return replace(old, hbm_gbs=number * 1e3)
    if key == "sms":
        part = number / old.sms
        return replace(old, sms=int(number), l2_bytes=old.l2_bytes * part)
    numeric = {f.name: f.type for f in fields(old) if f.type in ("float", "int")}
    if key not in numeric:
        raise ValueError(
            f"--gpu {key!r}: takes clock, l2, hbm, sms or one of {', '.join(numeric)}"
        )
    return replace(old, **{key: int(number) if numeric[key] == "int" else number})
