"""Facts per GPU: the resources that a kernel may use, and the peak rates.

Peaks are the vendor's dense figures, never sparse, of the SXM boards: H200 (700 W) and B200 (1000
W). The source of each figure is in docs/facts/hardware.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

# the input dtypes of each kind of MMA, by the names that PTX has for the kinds of tcgen05.mma; with
# scale factors of blocks, by SCALED
KINDS: dict[str, tuple[str, ...]] = {
    "tf32": ("fp32",),
    "f16": ("bf16", "fp16"),
    "f8f6f4": ("e4m3", "e5m2", "e2m1"),
    "i8": ("int8",),
}
SCALED: dict[str, tuple[str, ...]] = {"mxf8f6f4": ("e4m3", "e5m2"), "mxf4nvf4": ("e2m1",)}


def mma_kind(dtype: str, scaled: bool = False) -> str:
    """The kind of MMA for inputs of `dtype`, `scaled` by factors of blocks or not. Raises
    ValueError if there is none."""
    for kind, dtypes in (SCALED if scaled else KINDS).items():
        if dtype in dtypes:
            return kind
    raise ValueError(f"no MMA takes {dtype}{' with scale factors' if scaled else ''}")


@dataclass(frozen=True)
class Arch:
    """One GPU architecture under the DSL's name, with the facts of its reference board."""

    name: str  # the name for the DSL and ptxas: "sm_90a"
    title: str  # "Hopper"
    board: str  # the board of the figures below
    capability: tuple[int, int]
    num_sms: int
    smem_per_cta: int  # bytes of shared memory that one CTA may opt in to
    l2_bytes: int
    hbm_gbs: float  # GB/s
    mma_tflops: dict[str, float]  # dense, by kind of MMA, 32-bit accumulation
    fp32_tflops: float  # of the FMA pipes
    mma_flops: int  # dense tensor core FLOPs per cycle and SM, 16-bit inputs
    l2_bytes_per_clock: int  # per cycle, of all SMs
    tmem_columns: int = 0  # 128-lane columns of tensor memory per SM; 0: no tensor memory
    smem_bytes_per_clock: int = 128  # per cycle and SM
    sm_threads: int = 2048  # that an SM holds
    exponentials: int = 16  # exponentials per cycle and SM, by MUFU
    watts: int = 700  # the board's power limit
    kernels: str = ""  # the arch whose kernels it runs, if it has none of its own

    @property
    def clock_hz(self) -> float:
        """The SM clock at which the stated dense peak holds."""
        return self.mma_tflops["f16"] * 1e12 / (self.mma_flops * self.num_sms)

    @property
    def dense_tflops(self) -> dict[str, float]:
        """The peak of MMAs without scale factors, by input dtype."""
        rates = self.mma_tflops
        return {t: rates[k] for k, dtypes in KINDS.items() if k in rates for t in dtypes}


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
            l2_bytes=60 << 20,
            hbm_gbs=4800.0,
            mma_tflops={"tf32": 494.5, "f16": 989.0, "f8f6f4": 1979.0, "i8": 1979.0},
            fp32_tflops=67.0,
            mma_flops=4096,
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
            mma_tflops={
                "tf32": 1125.0,
                "f16": 2250.0,
                "f8f6f4": 4500.0,
                "i8": 4500.0,
                "mxf8f6f4": 4500.0,
                "mxf4nvf4": 9000.0,
            },
            fp32_tflops=75.0,
            mma_flops=8192,
            l2_bytes_per_clock=12_700,
            watts=1000,
        ),
    )
}

# boards by what torch's name of the device contains, which differ from their arch's own
BOARDS: dict[str, Arch] = {
    "H100 80GB HBM3": replace(ARCHS["sm_90a"], board="H100", hbm_gbs=3350.0, l2_bytes=50 << 20),
    "H100 PCIe": replace(
        ARCHS["sm_90a"],
        board="H100 PCIe",
        num_sms=114,
        hbm_gbs=2000.0,
        l2_bytes=50 << 20,
        mma_tflops={"tf32": 378.0, "f16": 756.0, "f8f6f4": 1513.0, "i8": 1513.0},
        fp32_tflops=51.0,
        watts=350,
    ),
    "H100 NVL": replace(
        ARCHS["sm_90a"],
        board="H100 NVL",
        hbm_gbs=3900.0,
        l2_bytes=50 << 20,
        mma_tflops={"tf32": 417.5, "f16": 835.5, "f8f6f4": 1670.5, "i8": 1670.5},
        fp32_tflops=60.0,
        watts=400,
    ),
    "GH200 480GB": replace(ARCHS["sm_90a"], board="GH200", hbm_gbs=4000.0, watts=900),
    "GH200 144G HBM3e": replace(ARCHS["sm_90a"], board="GH200", hbm_gbs=4900.0, watts=900),
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
            mma_tflops={
                "tf32": 1125.0,
                "f16": 2250.0,
                "f8f6f4": 4500.0,
                "mxf8f6f4": 4500.0,
                "mxf4nvf4": 13500.0,
            },
            exponentials=32,
            kernels="sm_100a",
        ),
    )
}


ALL: dict[str, Arch] = ARCHS | RELATIVES  # those that have kernels of their own, or another's

# the SM that all boards without HBM have: of 512 MMA FLOPs a cycle, 99 KiB of smem a CTA
GA10X = Arch(
    name="sm_86",
    title="Ampere GA10x",
    board="RTX 3090",
    capability=(8, 6),
    num_sms=82,
    smem_per_cta=101376,
    l2_bytes=6 << 20,
    hbm_gbs=936.0,
    mma_tflops={"tf32": 35.6, "f16": 71.2, "i8": 284.7},
    fp32_tflops=35.6,
    mma_flops=512,
    l2_bytes_per_clock=2_624,
    sm_threads=1536,
    watts=350,
)

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
            l2_bytes=40 << 20,
            hbm_gbs=2039.0,
            mma_tflops={"tf32": 156.0, "f16": 312.0, "i8": 624.0},
            fp32_tflops=19.5,
            mma_flops=2048,
            l2_bytes_per_clock=5120,
        ),
        GA10X,
        replace(
            GA10X,
            name="sm_89",
            title="Ada Lovelace",
            board="RTX 4090",
            capability=(8, 9),
            num_sms=128,
            l2_bytes=72 << 20,
            hbm_gbs=1008.0,
            mma_tflops={"tf32": 82.6, "f16": 165.2, "f8f6f4": 330.4, "i8": 660.6},
            fp32_tflops=82.6,
            l2_bytes_per_clock=4_096,
            watts=450,
        ),
        replace(
            GA10X,
            name="sm_120a",
            title="Blackwell RTX",
            board="RTX 5090",
            capability=(12, 0),
            num_sms=170,
            l2_bytes=96 << 20,
            hbm_gbs=1792.0,
            mma_tflops={
                "tf32": 104.8,
                "f16": 209.5,
                "f8f6f4": 419.0,
                "i8": 838.0,
                "mxf8f6f4": 838.0,
                "mxf4nvf4": 1676.0,
            },
            fp32_tflops=104.8,
            l2_bytes_per_clock=5_440,
            watts=575,
        ),
    )
}
KNOWN: dict[str, Arch] = ALL | PORTABLE
MMA_SYNC = "sm_80"  # whose tensor core instructions all of PORTABLE have


def arch(name: str) -> Arch:
    """Return the facts of `name`. Raises ValueError if cutex does not know it."""
    try:
        return KNOWN[name]
    except KeyError:
        raise ValueError(f"arch {name!r} is not one of {', '.join(KNOWN)}") from None


def board_named(device_name: str) -> str:
    """The name in BOARDS of the device that torch calls `device_name`; "" if it is none of them,
    or its arch's own."""
    return next((name for name in BOARDS if name in device_name), "")


def kernels_of(name: str) -> str:
    """The arch whose kernels run on `name`."""
    return RELATIVES[name].kernels if name in RELATIVES else name


def instructions_of(name: str) -> str:
    """The arch of whose tensor core instructions the kernels for `name` consist."""
    return MMA_SYNC if name in PORTABLE else kernels_of(name)


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
