"""The constants of each GPU: cycles of the SM unless said; with source and band in docs/time.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
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

    @property
    def hbm_bytes(self) -> float:
        """A cycle."""
        return self.hbm_gbs / self.clock


H200 = Gpu(
    "H200", sms=132, clock=1.755, mma_flops=4096, smem_bytes=128, l2_bytes=5500.0,
    hbm_gbs=4270.0, store_bytes=3000.0, tma_bytes=82.0, l2_latency=420.0, hbm_latency=400.0,
)  # fmt: skip
