"""Facts per GPU: the resources that a kernel may use, and the peak rates.

Peaks are the vendor's dense figures, never sparse, of the SXM boards: H200 (700 W) and B200 (1000
W). The source of each figure is in docs/facts.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Arch:
    """One GPU architecture under the DSL's name, with the facts of its reference board."""

    name: str  # the name for the DSL and ptxas: "sm_90a"
    title: str  # "Hopper"
    board: str  # the board of the figures below
    capability: tuple[int, int]
    num_sms: int
    smem_per_cta: int  # bytes of shared memory that one CTA may opt in to
    tmem_columns: int  # 128-lane columns of tensor memory per SM; 0: no tensor memory
    l2_bytes: int
    hbm_gbs: float  # GB/s
    dense_tflops: dict[str, float]  # by input dtype, fp32 accumulation
    mma_flops: int  # dense tensor core FLOPs per cycle and SM, 16-bit inputs
    smem_bytes_per_clock: int  # per cycle and SM
    l2_bytes_per_clock: int  # per cycle, of all SMs
    exponentials: int = 16  # exponentials per cycle and SM, by MUFU
    kernels: str = ""  # the arch whose kernels it runs, if it has none of its own

    @property
    def clock_hz(self) -> float:
        """The SM clock at which the stated dense peak holds."""
        return self.dense_tflops["bf16"] * 1e12 / (self.mma_flops * self.num_sms)


ARCHS: dict[str, Arch] = {
    a.name: a
    for a in (
        Arch(
            name="sm_90a",
            title="Hopper",
            board="H200",
            capability=(9, 0),
            num_sms=132,
            smem_per_cta=232448,
            tmem_columns=0,
            l2_bytes=60 << 20,
            hbm_gbs=4800.0,
            dense_tflops={"bf16": 989.0, "fp16": 989.0},
            mma_flops=4096,
            smem_bytes_per_clock=128,
            l2_bytes_per_clock=4620,
        ),
        Arch(
            name="sm_100a",
            title="Blackwell",
            board="B200",
            capability=(10, 0),
            num_sms=148,
            smem_per_cta=232448,
            tmem_columns=512,
            l2_bytes=126 << 20,
            hbm_gbs=8000.0,
            dense_tflops={"bf16": 2250.0, "fp16": 2250.0},
            mma_flops=8192,
            smem_bytes_per_clock=128,
            l2_bytes_per_clock=12_700,
        ),
    )
}

# archs that run another's attention kernels, compiled for them and configured by their own facts
RELATIVES: dict[str, Arch] = {
    a.name: a
    for a in (
        replace(
            ARCHS["sm_100a"],
            name="sm_103a",
            title="Blackwell Ultra",
            board="B300",
            capability=(10, 3),
            exponentials=32,
            kernels="sm_100a",
        ),
    )
}


ALL: dict[str, Arch] = ARCHS | RELATIVES  # those that have kernels of their own, or another's

# archs on which only kernels written for any arch run
PORTABLE: dict[str, Arch] = {
    a.name: a
    for a in (
        Arch(
            name="sm_80",
            title="Ampere",
            board="A100",
            capability=(8, 0),
            num_sms=108,
            smem_per_cta=166912,
            tmem_columns=0,
            l2_bytes=40 << 20,
            hbm_gbs=2039.0,
            dense_tflops={"bf16": 312.0, "fp16": 312.0},
            mma_flops=2048,
            smem_bytes_per_clock=128,
            l2_bytes_per_clock=5120,
        ),
        Arch(
            name="sm_120a",
            title="Blackwell RTX",
            board="RTX 5090",
            capability=(12, 0),
            num_sms=170,
            smem_per_cta=101376,
            tmem_columns=0,
            l2_bytes=96 << 20,
            hbm_gbs=1792.0,
            dense_tflops={"bf16": 209.5, "fp16": 209.5},
            mma_flops=512,
            smem_bytes_per_clock=128,
            l2_bytes_per_clock=5_440,
        ),
    )
}
KNOWN: dict[str, Arch] = ALL | PORTABLE


def arch(name: str) -> Arch:
    """Return the facts of `name`. Raises ValueError if cutex does not know it."""
    try:
        return KNOWN[name]
    except KeyError:
        raise ValueError(f"arch {name!r} is not one of {', '.join(KNOWN)}") from None


def kernels_of(name: str) -> str:
    """The arch whose kernels run on `name`."""
    return RELATIVES[name].kernels if name in RELATIVES else name


def local_arch(among: Iterable[str] = ARCHS) -> Arch | None:
    """The arch of this process's CUDA device; None without a device, or if it is not `among`
    these."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    return next((a for a in map(arch, among) if a.capability == capability), None)
