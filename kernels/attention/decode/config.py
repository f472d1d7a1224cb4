"""The configs of attention decode: what its kernel computes, and the tiling on Hopper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from cutex.kernels.attention.spec import ScoreSpec
from cutex.problem.attention.decode import DecodeProblem

if TYPE_CHECKING:
    from cutex.problem.attention import AttentionProblem

ATOM_ROWS = 8  # of a swizzle: pages of fewer rows are loaded row by row
ELEMENT = 2  # bytes of bf16 and fp16
ROWS = 64  # of one wgmma
WIDE_SLOTS = 2  # of tiles of K, and of V, that are widened to 16 bits
FEW_ROWS, FEW_WARPS = 16, 4  # of one mma.sync, and the warps that have other keys each
MOST_GROUPS = 2  # of FEW_ROWS, of which each warp has all rows
BARRIERS = 1024  # bytes of smem kept for barriers and the like
RESERVED = 1024  # bytes of smem that a CTA takes beside its own
WARPGROUP, WARP = 128, 32  # threads
REGISTERS = 65536  # of an SM
SCALARS = 48  # registers of a thread for everything but accumulators
MOST_REGISTERS = 255  # of a thread
WGMMA_OF_256 = 158  # registers of a thread that ptxas wants for a wgmma of 256 columns
FEW_MORE = 8  # blocks of keys by which a unit may be longer than a share and not be cut
# what the workspace has for each unit, if parts are combined: their number, and the places of part
# 0, of part 1 and from it to the next
WORDS = 4
# blocks of keys by which a part that has a CTA to itself may be longer than a share, in which one
# unit ends and another begins
ALONE_MORE = 2
# bytes of keys and values of a part, at most, that takes no longer, whatever the lengths, than it
# takes to look at all of these
SHORT_PART = 196608


class RoleRegisters(NamedTuple):
    """The registers of a thread of each warpgroup."""

    compute: int
    load: int
    widen: int = 0


WIDENING = RoleRegisters(240, 40, 112)  # where K and V are widened in smem
WIDENING_TWO = RoleRegisters(144, 32, 40)  # the same, where two CTAs are on an SM
TWO_CTAS = RoleRegisters(216, 40)  # where two CTAs are on an SM


@dataclass(frozen=True)
class DecodeConfig(ScoreSpec):
    """What decode computes, and its Hopper tiling: CTAs take equal shares of all keys, tile_n at a
    time, for 64 packed rows of queries, from rings of num_stages slots."""

    appended: bool = False  # k_new and v_new are passed, and appended to the caches
    appends: bool = False  # by the warps that load, few rows; else by a launch before
    page_size: int = 0  # keys of a page; 0: the cache has no pages
    batch_idx: bool = False  # cache_batch_idx is passed
    leftpad: bool = False  # cache_leftpad is passed
    varlen_new: bool = False  # cu_seqlens_k_new is passed: k_new and v_new are packed
    fp8: bool = False  # caches are e4m3, and k_descale and v_descale are passed
    sink: bool = False
    lse: bool = True

    one_block: bool = False  # all packed rows of a sequence and a head of K and V are one block
    few_rows: bool = False  # they are few, and warps have other keys each (FewRows)
    row_groups: int = 1  # with few_rows, of FEW_ROWS each
    packed: bool = True  # the query heads of one head of K and V share the rows of a tile
    # how keys are cut: "one" (not), "even" (each unit in as many parts as fill the GPU) or "shares"
    # (equal shares of all keys, or num_splits of each unit)
    parts: str = "shares"
    # units are cut by their room: each into num_splits parts, which have a team each to themselves
    by_room: bool = False
    whole: bool = False  # into one
    # as many CTAs as whole units, which SMs take as they end others; else no more than fit
    waves: bool = False
    in_shares: bool = False  # they are never cut by num_splits, which is 0
    few_entries: bool = False  # no more sequences, of one block of rows each, than a warp has lanes
    alone: bool = True  # there may be no more of them than teams, and each part then has a team
    combined: bool = False  # parts are merged by a kernel of their own, not by the last CTA
    tile_n: int = 64
    num_stages: int = 3  # slots of K, and of V
    ctas_per_sm: int = 1
    num_sms: int = 132
    team: int = 8  # CTAs, at most, that read neighbouring heads at the same time
    start: int = 1  # the time of a unit's begin and end, in blocks of keys
    least: int = 1  # blocks of keys of a CTA, at least
    merge: int = 2  # the time of writing and merging parts, in blocks of keys
    most_whole: int = 0  # blocks of keys of units that are not cut where they are many
    most_by_room: int = SHORT_PART  # bytes of parts of units that are cut by their room, at most
    rescale_threshold: float = 8.0  # powers of two before sums and outputs are scaled down
    overlaps: bool = True  # the next launch may begin while this one ends

    tile_m: ClassVar[int] = ROWS
    flags_of_unit: ClassVar[int] = 1

    def of(self, problem: AttentionProblem) -> Self:
        """This config for the scores and the cache of a problem with lengths."""
        assert isinstance(problem, DecodeProblem)
        return replace(super().of(problem), used_k=True, page_size=problem.page_size)

    def work(self, problem: DecodeProblem) -> tuple[float, float]:
        """The MMA FLOPs of a problem, with rows and keys rounded up to whole tiles, and those of
        one unit; 0 for the latter where units differ or are cut."""
        from cutex.device.attention.block_info import Band, BlockInfo

        left, right = problem.bounds
        band = Band(None if left is None else -left, 0 if problem.causal else right)
        pack = problem.heads_q // problem.heads_kv if self.packed else 1
        info = BlockInfo(self.tile_m, self.tile_n, band, pack)
        queries, blocks = problem.seqlen_q, []
        for keys in problem.lengths:
            for m_block in range(info.num_m_blocks(queries)):
                found = info.n_blocks(m_block, queries, keys)
                blocks.append(found.end - found.first)
        block = 2.0 * self.tile_m * self.tile_n * (self.head_dim + self.head_dim_v)
        whole = self.parts == "one" and min(blocks) == max(blocks)
        return block * sum(blocks) * (problem.heads_q // pack), block * blocks[0] * whole

    @property
    def ctas(self) -> int:
        """The CTAs that run at one time."""
        return self.num_sms * self.ctas_per_sm

    def is_whole(self, length: Any) -> Any:
        """Whether units of at most this length, their start included, are not cut: merging their
        parts would take as long."""
        return length <= self.merge + self.start

    def is_short(self, blocks: int) -> bool:
        """Whether parts of this many blocks are short enough to be cut by the cache's room, for
        shorter lengths."""
        return blocks * (self.k_bytes + self.v_bytes) <= self.most_by_room

    def are_whole_alone(self, longest: Any, share: Any) -> Any:
        """Whether units of up to `longest` blocks, one per CTA, are faster whole than in shares of
        `share` blocks whose parts must be merged: two CTAs in three saturate memory, and units of
        few blocks end before they could be merged (docs/facts/decode.md#whole-alone)."""
        of_few = (longest * 2 <= share * 5) & (longest <= share + FEW_MORE)
        return (longest * 2 <= share * 3) | of_few | (longest <= share + self.merge)

    @property
    def single_rows(self) -> bool:
        """Whether keys are loaded row by row: a box of several rows could cross into another
        page."""
        return bool(self.page_size and (self.page_size % ATOM_ROWS or self.leftpad))

    @property
    def copies_rows(self) -> bool:
        """Whether single rows are copied by threads, not by TMA."""
        return self.single_rows

    @property
    def load_warps(self) -> int:
        """The warps that load: several where rows are copied one by one."""
        return 4 if self.single_rows else 1

    @property
    def widens(self) -> bool:
        """Whether one warpgroup widens 8-bit K to 16 bits, in smem, and another one V."""
        return self.fp8 and not self.few_rows

    @property
    def tells_parts(self) -> bool:
        """Whether only the load warps walk over the lengths and pass each part on to the other
        roles, instead of each role walking before its first tile (docs/facts/decode.md#e4m3-told,
        #told-256)."""
        return (self.widens or self.q_in_smem or self.in_shares) and not self.by_room

    @property
    def registers(self) -> RoleRegisters | None:
        """The registers of each role, where they differ from what all threads start with.

        With five warps in a CTA a sub-core has two, with ten in two CTAs three, which leaves 168
        registers per thread: ptxas then waits for every wgmma
        (docs/facts/decode.md#two-ctas-registers).
        """
        if self.widens:
            return WIDENING if self.ctas_per_sm == 1 else WIDENING_TWO
        return TWO_CTAS if self.ctas_per_sm == 2 else None

    @property
    def most_accumulators(self) -> int:
        """The registers of a computing thread that are available to accumulators."""
        if self.registers is not None:
            return self.registers.compute - SCALARS
        return min(MOST_REGISTERS, REGISTERS // (self.num_threads * self.ctas_per_sm)) - SCALARS

    @property
    def registers_of_sm(self) -> int:
        """The registers of all threads of an SM's CTAs."""
        if self.registers is None:
            return 0  # those that threads begin with always fit
        compute, load, widen = self.registers
        of_warpgroups = compute + load + 2 * widen * self.widens
        return WARPGROUP * of_warpgroups * self.ctas_per_sm

    @property
    def num_threads(self) -> int:
        if self.registers is None:
            return WARPGROUP + WARP * self.load_warps
        # NOTE: only a whole warpgroup has registers of its own
        return (2 + 2 * self.widens) * WARPGROUP

    @property
    def columns_of_pv(self) -> int:
        """The columns of a wgmma of PV.

        NOTE: one of 256 needs more registers, before setmaxnreg, than each of 512 threads has, in
        one CTA or in two.
        """
        halved = (self.widens or self.ctas_per_sm > 1) and self.head_dim_v > 192
        return self.head_dim_v // 2 if halved else self.head_dim_v

    @property
    def q_in_smem(self) -> bool:
        """Whether operand A of QK is read from smem, for lack of registers."""
        return self.head_dim > 192

    @property
    def q_bytes(self) -> int:
        return ROWS * self.head_dim * ELEMENT if self.q_in_smem else 0

    @property
    def cache_element(self) -> int:
        """Bytes of an element of the caches."""
        return 1 if self.fp8 else ELEMENT

    @property
    def k_bytes(self) -> int:
        return self.tile_n * self.head_dim * self.cache_element

    @property
    def v_bytes(self) -> int:
        return self.tile_n * self.head_dim_v * self.cache_element

    @property
    def wide_bytes(self) -> int:
        """Bytes of the slots for K and V widened to 16 bits in smem."""
        tile = self.tile_n * (self.head_dim + self.head_dim_v) * ELEMENT
        return self.widens * WIDE_SLOTS * tile

    @property
    def smem_bytes(self) -> int:
        rings = (self.k_bytes + self.v_bytes) * self.num_stages
        return self.q_bytes + rings + self.wide_bytes + self.sums_bytes

    @property
    def sums_bytes(self) -> int:
        """Bytes of each warp's O and LSE, where each warp processes keys of its own."""
        return self.few_rows * FEW_WARPS * 4 * (FEW_ROWS * self.head_dim_v + 2 * WARP)

    @property
    def consumers(self) -> int:
        """The number of warps that read a slot."""
        return 1 if self.few_rows else WARPGROUP // WARP

    @property
    def accumulators(self) -> int:
        """The accumulator registers of a thread: S, P, O and Q."""
        if self.few_rows:
            return self.row_groups * (3 * self.tile_n + 2 * self.head_dim_v + self.head_dim) // 4
        q = 0 if self.q_in_smem else self.head_dim
        return (3 * self.tile_n + 2 * self.head_dim_v + q) // 4

    def why_not_computed(self, problem: AttentionProblem | None = None) -> str | None:
        """The reason why no kernel computes it or, of `problem`, why this config does not, or
        None."""
        if reason := super().why_not_computed(problem):
            return reason
        if self.varlen_k or self.used_q:
            return "varlen_k or used_q: keys are in caches, and all queries are used"
        if self.parts not in ("one", "even", "shares"):
            return f"parts={self.parts!r}: one, even or shares"
        if self.one_block and problem is not None:
            group = problem.heads_q // problem.heads_kv if self.packed else 1
            if problem.seqlen_q * group > self.tile_m:
                rows = problem.seqlen_q * group
                return f"one_block=True: {rows} packed rows, a block has {self.tile_m}"
        if self.few_rows and (reason := self.why_not_few(problem)):
            return reason
        if not 1 <= self.row_groups <= (MOST_GROUPS if self.few_rows else 1):
            return f"row_groups={self.row_groups}: up to {MOST_GROUPS} with few_rows, else 1"
        if self.appended and not self.used_k:
            return "appended=True: needs the caches' lengths"
        if self.appends and (reason := self.why_not_appending()):
            return f"appends=True: {reason}"
        if self.page_size < 0 or (self.page_size and self.batch_idx):
            return f"page_size={self.page_size}: at least 1, or 0; pages have no cache_batch_idx"
        if self.single_rows and any(x * self.cache_element % 128 for x in self.head_dims):
            return f"page_size={self.page_size}: single rows of {self.head_dims} are too short"
        if (
            self.num_stages < 2
            or self.ctas_per_sm < 1
            or min(self.least, self.team) < 1
            or self.start < 0
        ):
            return (
                f"num_stages={self.num_stages}, ctas_per_sm={self.ctas_per_sm}, "
                f"least={self.least}, start={self.start}: at least 2, 1, 1 and 0"
            )
        return None

    def why_not_appending(self) -> str | None:
        """Why the load warps cannot append, or None: each new row must belong to one part, and a
        part's rows of a head to one warp."""
        if not self.appended or self.varlen_new or self.varlen_q:
            return "takes k_new and v_new of as many rows, and queries, of each sequence"
        if not (self.one_block and self.packed) or self.load_warps > 1 or self.leftpad:
            return "takes one block of packed rows, and a warp that loads whole pages"
        if any(self.window):
            return "takes no window, outside of which no part is"
        return None

    @property
    def appended_before(self) -> bool:
        """Whether k_new and v_new are appended by a separate launch before."""
        return self.appended and not self.appends

    def why_not_few(self, problem: AttentionProblem | None) -> str | None:
        """Why each warp cannot process keys of its own, or None."""
        if not self.one_block or self.q_in_smem or self.head_dim_v % (8 * FEW_WARPS):
            return f"few_rows=True: one block of rows, head dims {self.head_dims} by 32, to 192"
        if self.num_stages % FEW_WARPS:
            # NOTE: a slot is one warp's, which else could take a fill before for its own
            return f"num_stages={self.num_stages}: with few_rows a multiple of {FEW_WARPS}"
        if problem is not None:
            rows = problem.seqlen_q * problem.heads_q // problem.heads_kv
            if rows > FEW_ROWS * self.row_groups:
                return f"few_rows=True: {rows} packed rows, mma.sync has {FEW_ROWS} of each group"
        return None

    def why_no_room(self, arch: Any) -> str | None:
        """Why the CTAs of an SM of `arch` do not fit into its smem, or None."""
        taken = self.smem_bytes + BARRIERS
        room = (arch.smem_per_cta + RESERVED) // self.ctas_per_sm - RESERVED
        if taken > room:
            return f"num_stages={self.num_stages}: {taken} bytes of smem, a CTA has {room}"
        return None

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        if reason := self.why_not_computed(problem):
            return reason
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            return f"tile_n={self.tile_n}: a multiple of 16, up to 256"
        if self.accumulators > self.most_accumulators:
            return (
                f"tile_n={self.tile_n}: {self.accumulators} registers of accumulators a thread, "
                f"{self.ctas_per_sm} CTAs of an SM have {self.most_accumulators}"
            )
        if self.registers_of_sm > REGISTERS:
            # NOTE: setmaxnreg would wait for ever for what no warpgroup gives back
            return (
                f"ctas_per_sm={self.ctas_per_sm}: roles want {self.registers_of_sm} registers, an "
                f"SM has {REGISTERS}"
            )
        begun_with = REGISTERS // (self.num_threads * self.ctas_per_sm)
        if not self.few_rows and self.columns_of_pv > 192 and begun_with < WGMMA_OF_256:
            return (
                f"head_dim_v={self.head_dim_v}: a wgmma of so many columns needs {WGMMA_OF_256} "
                f"registers, threads begin with {begun_with}"
            )
        return None if arch is None else self.why_no_room(arch)
