"""How a GEMM kernel cuts the problem up, and when that does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

ELEMENT = 2  # bytes of bf16 and fp16
BARRIERS = 1024  # bytes of smem kept for barriers and the like
MAX_INT = 2**31 - 1  # sizes and TMA coordinates are 32-bit
MAX_GRID = 65535  # CTAs along grid y


@dataclass(frozen=True)
class GemmConfig:
    """One CTA, or a pair, computes tile_m x tile_n of C, tile_k of K at a time, from a ring of
    num_stages."""

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    num_stages: int = 1
    epi_n: int = 0  # columns of C that leave through smem at a time; 0: C leaves from registers
    epi_stages: int = 0  # slots of smem for that
    pair: bool = False  # two CTAs run one MMA together (sm_100a)
    num_acc: int = 1  # accumulators in tensor memory (sm_100a)
    warpgroups: int = 0  # that run wgmma (sm_90a); 0: one for each 64 rows of the tile
    pingpong: bool = False  # they work on tiles of their own in turn, not on parts of one
    cluster_m: int = 1  # CTAs along M that share tiles of B by multicast
    cluster_n: int = 1  # CTAs along N that share tiles of A
    raster_group: int = 8  # clusters across a band of the raster order (schedulers/raster.py)
    raster_along: str = "m"  # the side that a band takes raster_group of
    num_ctas: int = 0  # of a persistent grid; 0: as many as the arch has SMs
    split_k: int = 1  # CTAs that share the K of one tile (sm_90a: a cluster of them)
    swap_ab: bool = False  # compute C^T = B A^T: tile_m then cuts N, tile_n cuts M
    column: bool = False  # one tile a cluster, in one column (schedulers/one_column.py; sm_90a)
    spread: bool = False  # one tile on each SM, overlapping (schedulers/spread.py; sm_90a)

    @property
    def ctas(self) -> int:
        """That compute one tile."""
        return 2 if self.pair else 1

    @property
    def stage_bytes(self) -> int:
        """Of A and B in one slot of the ring, of all `ctas`; what one full barrier expects."""
        return (self.tile_m + self.tile_n) * self.tile_k * ELEMENT

    @property
    def a_bytes(self) -> int:
        """Of A in the whole ring."""
        return self.num_stages * self.tile_m * self.tile_k * ELEMENT

    @property
    def partial_bytes(self) -> int:
        """Of one tile's fp32 sums."""
        return 4 * self.tile_m * self.tile_n

    @property
    def mma_warpgroups(self) -> int:
        return self.warpgroups or self.tile_m // 64

    @property
    def warpgroup_rows(self) -> int:
        """Rows of a tile that one warpgroup computes."""
        return self.tile_m if self.pingpong else self.tile_m // self.mma_warpgroups

    @property
    def accumulators(self) -> int:
        """Registers a thread that hold the warpgroup's part of C."""
        return self.warpgroup_rows * self.tile_n // 128

    @property
    def epi_bytes(self) -> int:
        """Of one CTA's slots for C: on sm_90a each warpgroup has its own, of 64 rows."""
        rows = 64 * self.warpgroups or 128
        return self.epi_stages * rows * self.epi_n * ELEMENT

    @property
    def epi_parts(self) -> int:
        """Sub-tiles of a tile's columns."""
        return self.tile_n // self.epi_n if self.epi_n else 0

    @property
    def smem_bytes(self) -> int:
        """Of one CTA. The sums of a split lie over the ring's A, a pair's in their own place."""
        sums = self.partial_bytes // self.ctas if self.pair and self.split_k > 1 else 0
        return self.num_stages * self.stage_bytes // self.ctas + self.epi_bytes + sums

    def why_not(self, problem: GemmProblem | None, arch: Arch) -> str | None:
        """Why this config cannot run `problem` (or, for None, anything) on `arch`."""
        if arch.tmem_columns and (self.column or self.spread):
            return f"column={self.column}, spread={self.spread}: not on {arch.name}"
        if self.pair and not arch.tmem_columns:
            return f"pair={self.pair}: {arch.name} has no MMA of two CTAs"
        if self.warpgroups and arch.tmem_columns:
            return f"warpgroups={self.warpgroups}: {arch.name} runs its MMA from one thread"
        if arch.tmem_columns and (reason := self._why_not_tmem(arch)):
            return reason
        if not self.warpgroups and not self.pair and self.tile_m != 128:
            return f"tile_m={self.tile_m}: these kernels take 128 a CTA"
        if self.warpgroups and (reason := self._why_not_warpgroups()):
            return reason
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            return f"tile_n={self.tile_n}: one MMA takes a multiple of 16 from 16 to 256"
        if self.epi_n not in (0, 16, 32, 64) or (self.epi_n and self.tile_n % self.epi_n):
            return f"epi_n={self.epi_n}: a sub-tile has 16, 32 or 64 columns, and divides tile_n"
        if self.epi_n and self.epi_stages < (1 if self.warpgroups else 2):
            return f"epi_stages={self.epi_stages}: one is written while another is stored"
        if self.tile_k % 64 or self.tile_k < 64:
            return f"tile_k={self.tile_k}: a 128-byte swizzle takes a multiple of 64"
        if self.cluster_m * self.cluster_n not in (1, 2, 4, 8):
            return f"cluster {self.cluster_m}x{self.cluster_n}: 1, 2, 4 or 8 CTAs"
        if self.raster_along not in ("m", "n") or self.raster_group < 1:
            return f"raster_group={self.raster_group}, raster_along={self.raster_along}: m or n"
        if self.num_stages < 1:
            return f"num_stages={self.num_stages}: a ring has at least 1"
        if self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return (
                f"num_stages={self.num_stages}: {self.smem_bytes} bytes of tiles and {BARRIERS} "
                f"of barriers are more than the {arch.smem_per_cta} that a CTA has on {arch.name}"
            )
        if problem is None:
            return None
        return (
            self._why_not_problem(problem)
            or self._why_not_column(problem, arch)
            or self._why_not_spread(problem, arch)
        )

    def _why_not_tmem(self, arch: Arch) -> str | None:
        if self.pair and self.tile_m not in (256, 512):
            return f"tile_m={self.tile_m}: a pair takes 256 rows, or two times 256 that share B"
        if self.pair and self.tile_n % 32:
            return f"tile_n={self.tile_n}: a pair's epilogue takes columns by 32"
        if self.pair and self.num_acc % (self.tile_m // 256):
            return f"num_acc={self.num_acc}: a tile of {self.tile_m} rows has {self.tile_m // 256}"
        if self.split_k not in (1, 2, 4) or (self.split_k > 1 and not self.pair):
            return f"split_k={self.split_k}: 1, 2 or 4 pairs of CTAs"
        if self.split_k > 1 and (self.tile_m, self.num_acc) != (256, 1):
            return f"split_k={self.split_k}: takes tile_m=256 and num_acc=1"
        if self.num_acc * self.tile_n > arch.tmem_columns:
            return (
                f"num_acc={self.num_acc}: {self.num_acc * self.tile_n} columns of tensor memory, "
                f"there are {arch.tmem_columns}"
            )
        parts = self.epi_parts
        if parts > self.epi_stages and parts % self.epi_stages == 1:
            return f"epi_stages={self.epi_stages}: of {parts} sub-tiles, two in turn share a slot"
        return None

    def _why_not_warpgroups(self) -> str | None:
        if self.tile_m % 64 or not 64 <= self.tile_m <= 256:
            return f"tile_m={self.tile_m}: wgmma takes rows by 64, here up to 256"
        if self.warpgroups > 3 or (self.pingpong and self.warpgroups != 2):
            return f"warpgroups={self.warpgroups}: 1 to 3, and 2 to play ping-pong"
        if not self.pingpong and self.tile_m % (64 * self.warpgroups):
            return f"tile_m={self.tile_m}: {self.warpgroups} warpgroups take 64 rows each at a time"
        limit = {1: 224, 2: 208, 3: 128}[self.warpgroups]
        if self.accumulators > limit:
            return (
                f"tile_m={self.tile_m}, tile_n={self.tile_n}: {self.accumulators} accumulators a "
                f"thread, {self.warpgroups} warpgroups have registers for {limit}"
            )
        if self.tile_n % (8 * self.cluster_m) or self.tile_m % (8 * self.cluster_n):
            return f"cluster {self.cluster_m}x{self.cluster_n}: each CTA loads whole rows by 8"
        if self.split_k > 1 and self.cluster_m * self.cluster_n > 1:
            return f"split_k={self.split_k}: these CTAs are a cluster, which takes no other"
        alone = self.split_k * self.cluster_m * self.cluster_n == 1 and not self.pingpong
        if self.spread and not alone:
            return f"spread={self.spread}: each CTA has a tile to itself"
        if self.column and (self.spread or self.split_k > 1 or self.pingpong):
            return f"column={self.column}: takes no spread, split_k or pingpong beside it"
        if self.split_k not in (1, 2, 4, 8):
            return f"split_k={self.split_k}: 1, 2, 4 or 8 CTAs"
        if self.split_k > 1 and (self.pingpong or self.partial_bytes > self.a_bytes):
            return (
                f"split_k={self.split_k}: the ring's {self.a_bytes} bytes of A must hold "
                f"{self.partial_bytes} of sums, and its warpgroups work on one tile"
            )
        return None

    def computed(self, problem: GemmProblem) -> tuple[int, int]:
        """Rows and columns of what the MMA computes."""
        return (problem.n, problem.m) if self.swap_ab else (problem.m, problem.n)

    def _why_not_column(self, problem: GemmProblem, arch: Arch) -> str | None:
        if not self.column:
            return None
        rows, columns = self.computed(problem)
        if columns > self.tile_n * self.cluster_n:
            return f"column={self.column}: a cluster has {self.tile_n * self.cluster_n} columns"
        num_ctas = self.num_ctas or arch.num_sms
        height = self.tile_m * self.cluster_m
        if -(-rows // height) * self.cluster_m * self.cluster_n > num_ctas:
            return f"column={self.column}: {rows} rows are more than {num_ctas} CTAs have"
        return None

    def _why_not_spread(self, problem: GemmProblem, arch: Arch) -> str | None:
        rows, columns = self.computed(problem)
        num_ctas = self.num_ctas or arch.num_sms
        if not self.spread:
            return None
        apart = -(-rows // (8 * num_ctas)) * 8  # they begin so many rows apart, or 8 less
        if columns > self.tile_n or apart > self.tile_m:
            return f"spread={self.spread}: {num_ctas} tiles do not cover {rows}x{columns}"
        if 8 * rows < 7 * num_ctas * self.tile_m:
            return f"spread={self.spread}: {num_ctas} tiles overlap by more than an eighth"
        return None

    def _why_not_problem(self, problem: GemmProblem) -> str | None:
        for name, size in (("M", problem.m), ("N", problem.n), ("K", problem.k)):
            if size + 256 > MAX_INT:
                return f"{name}={size}: sizes are 32-bit"
        if -(-problem.n // self.tile_n) > MAX_GRID:
            return f"N={problem.n}: more than {MAX_GRID} tiles of {self.tile_n} columns"
        return None
