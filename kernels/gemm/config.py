"""The config of a GEMM kernel, that is how it tiles a problem: the fields that both archs share.

The fields of one arch alone, and the limits that a config must keep, are in sm90/config.py and
sm100/config.py. Imports neither torch nor the DSL.

K counts bytes: k_bytes = 128 is 64 elements of bf16, 128 of fp8. Columns of C are in units of 2
bytes: epi_n = 64 is 32 columns of fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cutex.arch import arch as arch_named

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.compile import Operand, Workspace
    from cutex.kernels.gemm.layouts import Signature
    from cutex.problem.gemm import GemmProblem

ELEMENT = 2  # bytes of bf16 and fp16
PARTS = (16, 32, 64)  # columns of C that are stored at a time
BARRIERS = 1024  # bytes of smem kept for barriers and the like
MAX_INT = 2**31 - 1  # sizes and TMA coordinates are 32-bit
MAX_GRID = 65535  # CTAs along grid y


@dataclass(frozen=True)
class GemmConfig:
    """The tiling of a problem: one CTA, or a pair, computes tile_m x tile_n of C, k_bytes of K at a
    time, from a ring of num_stages slots."""

    arch: ClassVar[str]  # the arch whose kernels take it
    mma_columns: ClassVar[int] = 16  # tile_n is a multiple of it

    tile_m: int = 128
    tile_n: int = 128
    k_bytes: int = 128  # of K in a tile of A and of B
    num_stages: int = 1
    epi_n: int = 0  # columns of C that are stored through smem at a time; 0: from registers
    epi_stages: int = 0  # slots of smem for that
    raster_group: int = 8  # clusters across a band of the raster order (schedulers/raster.py)
    raster_along: str = "m"  # the side that a band takes raster_group of
    num_ctas: int = 0  # of a persistent grid; 0: as many as the arch has SMs
    split_k: int = 1  # CTAs, or pairs, of one cluster that share the K of a tile
    swap_ab: bool = False  # compute C^T = B A^T: tile_m then cuts N, tile_n cuts M

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Self:
        """The config in `row` of a ledger or a cache.

        Fields that the row lacks have their defaults. Older rows have `tile_k`, in units of 2
        bytes. Rows written when both archs shared a config also hold the other arch's fields, which
        must have no effect. ValueError otherwise.
        """
        if "tile_k" in row:
            row = {"k_bytes": ELEMENT * row["tile_k"], **row}
            del row["tile_k"]
        known = {f.name for f in fields(cls)}
        for name in row.keys() - known:
            if name not in NO_EFFECT or row[name] != NO_EFFECT[name]:
                raise ValueError(f"{name}={row[name]}: no field of {cls.__name__}")
        return cls(**{name: value for name, value in row.items() if name in known})

    def on(self, num_sms: int) -> Self:
        """The config for a GPU with `num_sms` SMs; a persistent grid has as many CTAs."""
        if num_sms == arch_named(self.arch).num_sms:
            return self
        return replace(self, num_ctas=num_sms)

    @property
    def ctas(self) -> int:
        """The number of CTAs that compute one tile."""
        return 1

    def k_of(self, bits: int = 16) -> int:
        """The elements of K in a tile, of `bits` each."""
        return self.k_bytes * 8 // bits

    @property
    def stage_bytes(self) -> int:
        """Bytes of A and B in one slot of the ring, over all `ctas`: the bytes that a full barrier
        expects."""
        return (self.tile_m + self.tile_n) * self.k_bytes

    @property
    def odd_rows(self) -> bool:
        """Whether a row of the tile is an odd multiple of 16 bytes, and so is stored whole."""
        return self.tile_n % 16 == 8

    @property
    def stored_whole(self) -> bool:
        """Whether all columns of the tile are stored at once, from one slot."""
        return self.odd_rows and self.epi_n == self.tile_n

    @property
    def takes_gates(self) -> bool:
        """Whether a thread has neighbouring columns of out, as the operation Gate needs."""
        return not self.swap_ab and self.epi_n >= 32

    @property
    def partial_bytes(self) -> int:
        """Bytes of one tile's fp32 sums."""
        return 4 * self.tile_m * self.tile_n

    @property
    def workspace(self) -> Workspace | None:
        """The global memory that a launch needs beside its operands, or None."""
        return None

    def within_workspace(self, out: Operand) -> Operand:
        """Out, whose sizes must be those that the workspace has memory for."""
        return out

    @property
    def epi_bytes(self) -> int:
        """Bytes of one CTA's slots for C."""
        return self.epi_stages * 128 * self.epi_n * ELEMENT

    @property
    def smem_bytes(self) -> int:
        """Bytes of one CTA's slots of A, B and C."""
        return self.num_stages * self.stage_bytes // self.ctas + self.epi_bytes

    def why_not(
        self, problem: GemmProblem | None, arch: Arch, epi_parts: int | None = None
    ) -> str | None:
        """The reason why this config cannot run `problem` (or, for None, any problem) on `arch`, or
        None.

        `epi_parts`: the sub-tiles of a tile's columns, if their elements are not of 2 bytes.
        """
        if arch.name != self.arch:
            return f"a config of {self.arch}: {arch.name} has another"
        return (
            self.why_not_arch(arch, epi_parts or self.epi_parts)
            or self._why_not_shape(arch)
            or (self.why_not_problem(problem, arch) if problem is not None else None)
        )

    @property
    def epi_parts(self) -> int:
        """The number of sub-tiles of a tile's columns, with 2-byte elements."""
        return self.tile_n // self.epi_n if self.epi_n else 0

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        """The reason why the arch's own fields do not fit, whatever the problem, or None."""
        raise NotImplementedError

    def _why_not_shape(self, arch: Arch) -> str | None:
        by = self.mma_columns
        if self.tile_n % by or not by <= self.tile_n <= 256:
            return f"tile_n={self.tile_n}: one MMA takes a multiple of {by} up to 256"
        if self.epi_n not in (0, *PARTS) and not self.stored_whole:
            return f"epi_n={self.epi_n}: TMA stores 16, 32 or 64 columns, or an odd multiple of 8"
        if self.epi_n and self.tile_n % self.epi_n:
            return f"epi_n={self.epi_n}: divides tile_n"
        if self.k_bytes % 128 or self.k_bytes < 128:
            return f"k_bytes={self.k_bytes}: a 128-byte swizzle takes a multiple of 128"
        if self.raster_along not in ("m", "n") or self.raster_group < 1:
            return f"raster_group={self.raster_group}, raster_along={self.raster_along}: m or n"
        if self.num_stages < 1:
            return f"num_stages={self.num_stages}: a ring has at least 1"
        if self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return (
                f"num_stages={self.num_stages}: {self.smem_bytes} bytes of tiles and {BARRIERS} "
                f"of barriers are more than the {arch.smem_per_cta} that a CTA has on {arch.name}"
            )
        return None

    def why_not_problem(self, problem: GemmProblem, arch: Arch) -> str | None:
        """The reason why this config, which fits the arch, does not fit `problem`, or None."""
        for name, size in (("M", problem.m), ("N", problem.n), ("K", problem.k)):
            if size + 256 > MAX_INT:
                return f"{name}={size}: sizes are 32-bit"
        if -(-problem.n // self.tile_n) > MAX_GRID:
            return f"N={problem.n}: more than {MAX_GRID} tiles of {self.tile_n} columns"
        return None

    def why_not_signature(self, signature: Signature) -> str | None:
        """The reason why these tiles cannot compute `signature`, whatever its sizes, or None."""
        raise NotImplementedError


# fields of older rows that a config lacks, with the value that has no effect
NO_EFFECT: dict[str, Any] = {
    "l2_ahead": 0,
    "pair": False,
    "num_acc": 1,
    "warpgroups": 0,
    "pingpong": False,
    "cluster_m": 1,
    "cluster_n": 1,
    "column": False,
    "spread": False,
}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
