"""The config of the Hopper kernels. Imports neither torch nor the DSL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cutex.arch import arch as arch_named
from cutex.compile import Bound, Operand, Workspace
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.config import ELEMENT, PARTS, GemmConfig, ceil_div

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.layouts import Signature
    from cutex.problem.gemm import GemmProblem

# tiles of up to so many columns are bound by memory alone: looking ahead for an MMA gains nothing
FEW_COLUMNS = 32
# accumulator registers per thread, by MMA warpgroups: with three, ptxas gives each thread 128
ACCUMULATORS = {1: 224, 2: 208, 3: 96}
MOST_SHARES = 64  # of K, whose sums are added up in one place
CLAIM_WORDS = 16  # in which clusters claim their place (schedulers/by_gpc.py)
EVEN, UNEVEN = 28, 48_000  # SMs, and SMs times K (placed_unevenly)


class Registers(NamedTuple):
    """Registers per thread, by role; all threads of a CTA together have 65536."""

    load: int
    mma: int


@dataclass(frozen=True)
class Sm90Config(GemmConfig):
    """A GemmConfig with Hopper's fields: the warpgroups that run wgmma, and the clusters that share
    loads."""

    arch = "sm_90a"
    mma_columns = 8

    warpgroups: int = 0  # that run wgmma; 0: one for each 64 rows of the tile
    pingpong: bool = False  # they work on tiles of their own in turn, not on parts of one
    cluster_m: int = 1  # CTAs along M that share tiles of B by multicast
    cluster_n: int = 1  # CTAs along N that share tiles of A
    # columns, or rows, of clusters with one tile each (schedulers/one_round.py); both 0: CTAs loop
    # over tiles
    columns: int = 0
    rows: int = 0
    spread: bool = False  # one tile on each SM, overlapping (schedulers/spread.py)
    stream_k: int = 0  # last rounds whose tiles are split along K (schedulers/stream_k.py)
    box_rows: int = 0  # rows that a TMA load brings, about (device/atoms/boxes.py); 0: all
    by_gpc: bool = False  # tiles by where clusters run (schedulers/by_gpc.py)
    k_shares: int = 1  # of K, whose sums a second kernel adds up (in_shares.py)
    in_turns: bool = False  # warpgroups store C by one slot that all take in turn

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Sm90Config:
        """The config in `row`, as GemmConfig.from_row; also of older rows that have `column`
        instead of `columns`."""
        if "column" in row:
            row = {"columns": int(row["column"]), **row}
            del row["column"]
        return super().from_row(row)

    @property
    def mma_warpgroups(self) -> int:
        return self.warpgroups or self.tile_m // 64

    @property
    def row_warpgroups(self) -> int:
        """The warpgroups that divide the rows of a tile among them."""
        return 1 if self.pingpong else self.mma_warpgroups

    @property
    def storing_warpgroups(self) -> int:
        """The warpgroups that have slots of their own for parts of C."""
        return self.mma_warpgroups // self.storing_turns

    @property
    def storing_turns(self) -> int:
        """The warpgroups that take turns at a slot for C."""
        return self.mma_warpgroups if self.in_turns else 1

    @property
    def warpgroup_rows(self) -> int:
        """The rows of a tile that one warpgroup computes."""
        return self.tile_m // self.row_warpgroups

    @property
    def accumulators(self) -> int:
        """The registers per thread that hold the warpgroup's part of C."""
        return self.warpgroup_rows * self.tile_n // 128

    @property
    def registers(self) -> Registers | None:
        """The registers per thread of each role; None: one MMA warpgroup gets all it can use
        without a split."""
        heavy = self.accumulators >= 208
        return {
            1: None,
            2: Registers(24, 240) if heavy else Registers(40, 232),
            3: Registers(32, 160),
        }[self.mma_warpgroups]

    @property
    def one_tile(self) -> bool:
        """Whether each cluster has exactly one tile, given by the cluster's index."""
        return self.spread or self.columns > 0 or self.rows > 0

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """The CTAs of a cluster along x, y and z, for a launch; None: without clusters."""
        return self.cluster_m, self.cluster_n, self.split_k

    @property
    def parts_in_order(self) -> bool:
        """Whether a warpgroup stores all parts of its rows one after another, so that a matrix to
        add may be loaded ahead."""
        return self.split_k == 1

    @property
    def parts_of_rows(self) -> int:
        """The parts of out, of 64 rows each, that a warpgroup stores of a tile."""
        return self.warpgroup_rows // 64 * (self.tile_n // self.epi_n if self.epi_n else 1)

    @property
    def clusters_stream(self) -> bool:
        """Whether each CTA of a cluster, which has one tile, loads its own bytes of the large
        operand."""
        shapes = (self.cluster_m, self.columns), (self.cluster_n, self.rows)
        alone = any(size > 1 and few == 1 for size, few in shapes)
        return self.one_tile and (alone or self.split_k > 1)

    @property
    def few_columns(self) -> bool:
        return self.tile_n <= FEW_COLUMNS and not self.rows

    @property
    def cluster_columns(self) -> int:
        return self.tile_n * self.cluster_n

    @property
    def workspace(self) -> Workspace | None:
        """The workspace of stream-K, a tile of sums for each CTA and a flag for each warp that
        writes them; or of clusters that claim their place."""
        if self.by_gpc:
            return Workspace(4, CLAIM_WORDS, early=True)  # no sums, but a vector
        if self.k_shares > 1:
            num_ctas = self.num_ctas or arch_named(self.arch).num_sms
            return Workspace(num_ctas * self.tile_m * self.tile_n, 4)
        if not self.stream_k:
            return None
        num_ctas = self.num_ctas or arch_named(self.arch).num_sms
        return Workspace(num_ctas * self.tile_m * self.tile_n, num_ctas * 4 * self.mma_warpgroups)

    def within_workspace(self, out: Operand) -> Operand:
        if self.k_shares == 1 or self.workspace is None:
            return out
        tile = (self.tile_n, self.tile_m) if self.swap_ab else (self.tile_m, self.tile_n)
        tiles = self.workspace.sums // (self.tile_m * self.tile_n * self.k_shares)
        return replace(out, bounds_by=partial(held, tiles, tile))

    def sums_bytes(self, epi_parts: int) -> int:
        """Bytes of the sums of all CTAs of a split, for the parts of the tile that one of them
        stores; a warpgroup's tile has `epi_parts` of them along its columns."""
        parts = self.warpgroup_rows // 64 * max(1, epi_parts)
        mine = ceil_div(parts, self.split_k)  # some have one less
        return mine * self.split_k * (self.partial_bytes // parts)

    @property
    def a_bytes(self) -> int:
        """Bytes of A in the whole ring."""
        return self.num_stages * self.tile_m * self.k_bytes

    @property
    def epi_bytes(self) -> int:
        """Bytes of one CTA's slots for C: each warpgroup that stores has its own, of 64 rows."""
        return self.epi_stages * 64 * self.storing_warpgroups * self.epi_n * ELEMENT

    @property
    def stored_whole(self) -> bool:
        if self.epi_n != self.tile_n or self.epi_n in PARTS:
            return False
        return self.odd_rows or (self.swap_ab and self.tile_n > FEW_COLUMNS)

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        if self.cluster_m * self.cluster_n not in (1, 2, 4, 8):
            return f"cluster {self.cluster_m}x{self.cluster_n}: 1, 2, 4 or 8 CTAs"
        if self.cluster_m * self.cluster_n * self.split_k > 8:
            return (
                f"cluster {self.cluster_m}x{self.cluster_n}, split_k={self.split_k}: at most 8 CTAs"
            )
        if self.epi_n and self.epi_stages < 1:
            return f"epi_stages={self.epi_stages}: C is stored through at least one slot"
        if not self.warpgroups and self.tile_m != 128:
            return f"tile_m={self.tile_m}: without warpgroups, 128 a CTA"
        if self.stored_whole and self.epi_stages > 1:
            return f"tile_n={self.tile_n}: what is stored whole has one slot"
        if self.odd_rows and self.swap_ab and self.tile_n <= FEW_COLUMNS:
            return f"tile_n={self.tile_n}: of up to {FEW_COLUMNS}, multiples of 16 are transposed"
        if self.warpgroups and (reason := self._why_not_warpgroups()):
            return reason
        return (
            self._why_not_one_tile()
            or self._why_not_split(epi_parts)
            or self._why_not_streamed()
            or self._why_not_by_gpc()
            or self._why_not_shares()
            or self._why_not_in_turns()
        )

    def _why_not_warpgroups(self) -> str | None:
        if self.tile_m % 64 or not 64 <= self.tile_m <= 256:
            return f"tile_m={self.tile_m}: wgmma takes rows by 64, here up to 256"
        if self.warpgroups > 3 or (self.pingpong and self.warpgroups != 2):
            return f"warpgroups={self.warpgroups}: 1 to 3, and 2 to play ping-pong"
        if not self.pingpong and self.tile_m % (64 * self.warpgroups):
            return f"tile_m={self.tile_m}: {self.warpgroups} warpgroups take 64 rows each at a time"
        limit = ACCUMULATORS[self.warpgroups]
        if self.accumulators > limit:
            return (
                f"tile_m={self.tile_m}, tile_n={self.tile_n}: {self.accumulators} accumulators a "
                f"thread, {self.warpgroups} warpgroups have registers for {limit}"
            )
        return None

    def _why_not_one_tile(self) -> str | None:
        alone = self.split_k * self.cluster_m * self.cluster_n == 1 and not self.pingpong
        if self.box_rows and (self.spread or self.box_rows % 8):
            return f"box_rows={self.box_rows}: a multiple of 8, without spread"
        if self.spread and not alone:
            return f"spread={self.spread}: each CTA has a tile to itself"
        if min(self.columns, self.rows) < 0:
            return f"columns={self.columns}, rows={self.rows}: 0, or as many as cover C"
        if (self.columns or self.rows) and (self.spread or self.pingpong):
            return f"columns={self.columns}, rows={self.rows}: take no spread or pingpong beside"
        if self.columns and self.rows:
            return f"columns={self.columns}, rows={self.rows}: at most one of the two may be set"
        return None

    def _why_not_split(self, epi_parts: int) -> str | None:
        if not 1 <= self.split_k <= 8:
            return f"split_k={self.split_k}: 1 to 8 CTAs"
        if self.split_k == 1:
            return None
        ring, sums = self.num_stages * self.stage_bytes, self.sums_bytes(epi_parts)
        if self.pingpong or sums > ring:
            return (
                f"split_k={self.split_k}: the ring's {ring} bytes must hold {sums} of sums, and "
                f"its warpgroups work on one tile"
            )
        return None

    def _why_not_streamed(self) -> str | None:
        if self.stream_k < 0:
            return f"stream_k={self.stream_k}: 0, or as many rounds as are streamed"
        if self.stream_k and (self.pingpong or self.one_tile or self.split_k > 1):
            return (
                f"stream_k={self.stream_k}: takes no pingpong, spread, columns, rows or split_k "
                f"beside"
            )
        return None

    def _why_not_by_gpc(self) -> str | None:
        if not self.by_gpc:
            return None
        if self.one_tile or self.stream_k or self.split_k > 1:
            return f"by_gpc={self.by_gpc}: takes whole tiles in a loop"
        if self.cluster_m * self.cluster_n > 2:
            return f"by_gpc={self.by_gpc}: clusters of one or two CTAs, as a TPC has"
        return None

    def _why_not_shares(self) -> str | None:
        if not 1 <= self.k_shares <= MOST_SHARES:
            return f"k_shares={self.k_shares}: 1 to {MOST_SHARES}"
        if self.k_shares == 1:
            return None
        if self.one_tile or self.stream_k or self.split_k > 1 or self.by_gpc or self.pingpong:
            return f"k_shares={self.k_shares}: takes tiles of all warpgroups, in a loop"
        if self.warpgroup_rows > 64:
            return f"k_shares={self.k_shares}, tile_m={self.tile_m}: 64 rows for each warpgroup"
        if type(self) is not Sm90Config:
            return f"k_shares={self.k_shares}: the general kernel alone leaves sums"
        return None

    def _why_not_in_turns(self) -> str | None:
        together = self.mma_warpgroups > 1 and not self.pingpong and self.epi_stages == 1
        whole = self.split_k == self.k_shares == 1 and not self.stream_k
        if self.in_turns and not (together and whole):
            return f"in_turns={self.in_turns}: warpgroups that store a tile together, by one slot"
        return None

    def why_not_problem(self, problem: GemmProblem, arch: Arch) -> str | None:
        return (
            super().why_not_problem(problem, arch)
            or self._why_not_round(problem, arch)
            or self._why_not_room(problem, arch)
            or self._why_not_spread(problem, arch)
        )

    def computed(self, problem: GemmProblem) -> tuple[int, int]:
        """The rows and columns of the product that the MMA computes, exchanged with swap_ab."""
        return (problem.n, problem.m) if self.swap_ab else (problem.m, problem.n)

    def _why_not_round(self, problem: GemmProblem, arch: Arch) -> str | None:
        if not self.columns and not self.rows:
            return None
        rows, columns = self.computed(problem)
        down = ceil_div(rows, self.tile_m * self.cluster_m)
        across = ceil_div(columns, self.cluster_columns)
        if (self.columns and across != self.columns) or (self.rows and down != self.rows):
            return f"columns={self.columns}, rows={self.rows}: {down}x{across} clusters cover C"
        num_ctas = self.num_ctas or arch.num_sms
        if down * across * self.cluster_m * self.cluster_n * self.split_k > num_ctas:
            return f"columns={self.columns}, rows={self.rows}: more tiles than {num_ctas} CTAs"
        return None

    def _why_not_room(self, problem: GemmProblem, arch: Arch) -> str | None:
        """The reason why the workspace does not hold all shares' sums, a tile for each CTA."""
        if self.k_shares == 1:
            return None
        rows, columns = self.computed(problem)
        tiles = ceil_div(rows, self.tile_m) * ceil_div(columns, self.tile_n)
        num_ctas = self.num_ctas or arch.num_sms
        if tiles * self.k_shares > num_ctas:
            return f"k_shares={self.k_shares}: {tiles} tiles each, more than {num_ctas} CTAs"
        return None

    def _why_not_spread(self, problem: GemmProblem, arch: Arch) -> str | None:
        if not self.spread:
            return None
        rows, columns = self.computed(problem)
        num_ctas = self.num_ctas or arch.num_sms
        apart = ceil_div(rows, 8 * num_ctas) * 8  # tiles begin so many rows apart, or 8 less
        if columns > self.tile_n or apart > self.tile_m:
            return f"spread={self.spread}: {num_ctas} tiles do not cover {rows}x{columns}"
        if 8 * rows < 7 * num_ctas * self.tile_m:
            return f"spread={self.spread}: {num_ctas} tiles overlap by more than an eighth"
        return None

    def why_not_signature(self, signature: Signature) -> str | None:
        if signature.a.fold:
            return "a of any stride is read by the kernel of unaligned operands"
        return self._why_not_stored(signature)

    def _why_not_stored(self, signature: Signature) -> str | None:
        """The reason why the tiles cannot be stored as out, or None."""
        out = signature.out
        if self.stored_whole and (DTYPES[out.dtype].bits != 16 or signature.gated):
            return f"tile_n={self.tile_n}: columns are stored whole as 16 bits, ungated"
        if self.odd_rows and self.tile_n <= FEW_COLUMNS and not signature.columns_contiguous:
            return (
                f"tile_n={self.tile_n}: of up to {FEW_COLUMNS}, odd multiples of 8 take out by rows"
            )
        if self.in_turns and (signature.ops or not out.tma):
            return f"in_turns={self.in_turns}: the product alone is stored so, by TMA"
        if self.spread and (signature.ops or out.batched or not out.tma):
            return f"spread={self.spread}: out's places count from the tile's, and rows twice"
        if (self.columns or self.rows) and out.batched:
            return f"columns={self.columns}, rows={self.rows}: a batch has tiles of its own"
        if self.k_shares > 1 and (
            signature.ops
            or out.batched
            or not out.tma
            or out.major != "row"
            or DTYPES[out.dtype].bits != 16
        ):
            return f"k_shares={self.k_shares}: sums are stored as they are, 16 bits by rows"
        if self.split_k > 1 and (out.batched or out.dtype == "fp32"):
            return f"split_k={self.split_k}: stores parts of 16 bits, of no batch"
        return None


def held(tiles: int, tile: tuple[int, int], sizes: Mapping[str, int]) -> tuple[Bound, ...]:
    """The bounds of an out of `tiles` tiles of `tile` (rows, columns)."""
    return (Bound("n", 0, tiles // max(1, ceil_div(sizes["m"], tile[0])) * tile[1]),)


def placed_unevenly(idle: Any, num_sms: int, k: Any) -> Any:
    """Whether clusters that start before a kernel like theirs ends, on its `idle` SMs, lose more
    than they gain: if the idle SMs are many, but not half of all, and K, in units of 2 bytes, is
    long.

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """
    return (idle <= num_sms // 2) & ((idle - EVEN) * k >= UNEVEN)


def box_rows(rows: int, most: int) -> int:
    """The rows of a box, when one CTA loads `rows` rows of a tile: a divisor into whole swizzle
    atoms, `most` or, if that divides badly, the next one above."""
    sizes = [n for n in range(8, rows + 1, 8) if rows % n == 0]
    below = [n for n in sizes if n <= most]
    above = [n for n in sizes if n > most]
    if below and (2 * below[-1] > most or not above):
        return below[-1]
    return above[0] if above else rows


def contiguous_box(rows: int) -> int:
    """The rows of a box of `rows` rows of 16 bits along which K is not contiguous."""
    return next(n for n in (64, 32, 16, 8) if rows % n == 0)
