"""Gradients of attention by our kernels: preprocess, main and convert, in one call.

They need, besides the gradients, fp32 sums of dQ, as large as q in fp32 with each sequence's rows
rounded up to a tile, and two numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from cutex.device.attention.block_info import Band, BlockInfo
from cutex.kernels.attention.backward.choose import CONFIGS, Config, fitted
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.tail import (
    MOST_BLOCKS,
    Ramp,
    RampTail,
    Tail,
    spare_sums,
)
from cutex.ops.attention import torch_backward
from cutex.ops.attention.call import DTYPES, AttentionCall, kernel_dims
from cutex.ops.attention.plan import (
    ALIGN,
    COUNTER,
    arch_name,
    arch_of,
    longest_k,
    longest_q,
    packed,
    resources,
    stepped,
    why_copied,
)
from cutex.ops.device import SEVERAL_GPUS, current, launcher, per_device
from cutex.ops.plain import empty_of
from cutex.ops.workspace import flags_of
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.compile import Compiled

MANY_ZEROS = 1024  # queries whose sums of dQ a warp of main, at 14 GB/s, takes too long to zero
FEW = 8  # tiles of keys a CTA, up to which `rotated` pays at head dim 64, too
# head dims whose tiles are never cut; those of a kernel that cuts them, and what its steps take of
# the others' time
UNCUT, CUT, WIDER = (96, 96), (128, 128), 1.25
# tiles of one sequence for each CTA, up to which query heads may be divided; the queries that take
# the time of a further part, with its sums; of the steps before, the most that it may take
FEW_PARTS, PART_COST, WORTH = 2, 512, 0.9
MOST_RANGES = 16  # of queries that a tile of keys is divided into
ABOUT = 1.05  # of the least steps, which fewer parts may take
WORTH_RANGES = 0.8  # of the steps of divided heads, the most that ranges may take
L2_BYTES = 55 << 20  # of q, dO and the sums of dQ in work at one time, which L2 about holds
ALIKE = 0.75  # of the longest tile's steps, which the mean of tiles that take equally long exceeds
UNTIMED = ("sm_100a", "sm_103a")  # whose kernels have run in the simulator only


def why_not(call: AttentionCall) -> str | None:
    """The reason why our kernels do not compute the gradients of the call, or None."""
    arch = arch_name(call.q.device)
    if arch not in CONFIGS:
        return f"the backward's kernels are for {', '.join(CONFIGS)}, q is on {arch}"
    if call.score_mod is not None or call.mask_mod is not None:
        return "score_mod or mask_mod, whose derivative is not known"
    if call.alibi_slopes is not None:
        return "alibi_slopes, which the backward's kernels do not know"
    if arch in UNTIMED and call.q.device.type == "cuda" and torch_backward.why_not(call) is None:
        return f"on {arch} torch's flash backward is taken where it can, until ours was timed"
    return None


def plan_for(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    grad_lse: Tensor | None,
    sink: bool = False,
) -> Plan | None:
    """The plan of a call's gradients, with `sink` one that also returns delta; None if our kernels
    do not compute them, or there is nothing to compute."""
    tensors = (call.q, call.k, call.v, grad_out, out, grad_lse, call.cu_seqlens_q,
               call.cu_seqlens_k, call.seqused_q, call.seqused_k)  # fmt: skip
    key = (
        *[None if x is None else (x.shape, x.stride(), x.data_ptr() % ALIGN) for x in tensors],
        call.alibi_slopes is None, call.q.dtype, call.q.device, call.max_seqlen_q,
        call.max_seqlen_k, call.softmax_scale, call.causal, tuple(call.window_size), call.softcap,
        call.deterministic, torch.are_deterministic_algorithms_enabled(), sink,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None and why_not(call) is None and not is_empty(call, out):
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(call, grad_out, out, grad_lse is not None, sink)
    return plan


MOST_PLANS = 1024
_plans: dict[tuple[Any, ...], Plan] = per_device({})


class Plan:
    """The kernel for one call's gradients, and what is allocated and prepared for them."""

    def __init__(
        self, call: AttentionCall, grad_out: Tensor, out: Tensor, dlse: bool, sink: bool = False
    ) -> None:
        c = self.config = config_for(call, dlse, sink)
        self.compiled = kernel_for(c, DTYPES[call.q.dtype], arch_of(call.q.device))
        self.device = call.q.device
        one_list = {"q": c.used_q and not c.varlen_q, "k": c.used_k and not c.varlen_k}
        given = (call.q, "q"), (call.k, "k"), (call.v, "k"), (out, "q"), (grad_out, "q")
        # how each operand is prepared: None if TMA can step through it as it is
        self.prepare: list[Callable[[Tensor], Tensor] | None] = [
            None if takes(x, one_list[side]) else partial(prepared, one_list=one_list[side])
            for x, side in given
        ]
        self.empty = empty_of(self.device, SEVERAL_GPUS)
        self.tiles = num_tiles(call, c)
        self.numbers = scalars(call, c)
        spare = 0
        if c.spread:
            spare = spare_sums(tail_of_call(call, c))
        elif c.head_parts:
            spare = kept_parts(call, cast(BackwardConfig, c))
        self.counter = flags_of(self.device, COUNTER + c.sum_warps * spare)
        # NOTE: rows that belong to no sequence are not written
        self.gradients = [
            (tuple(x.shape), row_major(x.shape), x.dtype, zeroed)
            for x, zeroed in ((call.q, c.ragged_q), (call.k, c.ragged_k), (call.v, c.ragged_k))
        ]
        of_tiles = (self.tiles, c.row_stats * c.tile_m), (self.tiles, c.tile_m * c.head_dim)
        turns = [(self.tiles, c.turns)] if c.deterministic else []
        self.before = [*map(numbers_of, of_tiles), *(numbers_of(x, torch.int32) for x in turns)]
        self.counts = c.counted or c.head_parts
        self.behind = []  # what the counter is followed by
        if c.late_zeros:
            self.behind.append(numbers_of((call.batch * call.heads[1],), torch.int32))
        if c.spread or c.head_parts:
            self.behind.append(numbers_of((max(spare, 1), c.partial_numbers)))
        if c.ranked:
            self.behind.append(numbers_of((call.batch + 1, 3), torch.int32))
        self.launch: Callable[..., None] | None = None

    def __call__(
        self,
        call: AttentionCall,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, contiguous; those of rows of no sequence are 0. A plan with
        a sink writes `delta`, (.., heads, rows), of the rows of sequences: the sum of grad_out *
        out less the gradient of LSE."""
        of_rows = [] if grad_lse is None else [grad_lse.float()]
        if delta is not None:
            of_rows.append(delta)
        given = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k
        lengths = [x for x in given if x is not None]
        with current(self.device):
            return self.run((call.q, call.k, call.v, out, grad_out), lse, of_rows, lengths)

    def run(
        self,
        operands: Sequence[Tensor],
        lse: Tensor,
        of_rows: Sequence[Tensor],
        lengths: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients, on the current device; `operands` are q, k, v, out and its gradient."""
        empty, device = self.empty, self.device
        operands = [
            x if prepare is None else prepare(x)
            for x, prepare in zip(operands, self.prepare, strict=True)
        ]
        dq, dk, dv = [
            torch.zeros(shape, dtype=dtype, device=device)
            if zeroed
            else empty(shape, strides, dtype)
            for shape, strides, dtype, zeroed in self.gradients
        ]
        workspace = [empty(*x) for x in self.before]
        if self.counts:
            workspace.append(self.counter())
        workspace += [empty(*x) for x in self.behind]
        arguments = (
            *operands, lse, dq, dk, dv, *workspace, *of_rows, *[x.contiguous() for x in lengths],
            *self.numbers,
        )  # fmt: skip
        if self.launch is None:
            self.launch = launcher(self.compiled, list(arguments))
        self.launch(*arguments)
        return dq, dk, dv


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def numbers_of(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """The shape, strides and dtype of a contiguous workspace."""
    return shape, row_major(shape), dtype


def is_empty(call: AttentionCall, out: Tensor) -> bool:
    """Whether the call has no row, or no row has a key."""
    return 0 in (*out.shape, call.batch, longest_q(call), longest_k(call))


def config_for(call: AttentionCall, dlse: bool, sink: bool = False) -> Config:
    dims = kernel_dims(*call.head_dims)
    assert dims is not None, "check refuses other head dims"
    found = of_dims(call, dlse, sink, *dims)
    if dims == UNCUT and isinstance(found, BackwardConfig):
        wider = of_dims(call, dlse, sink, *CUT)
        assert isinstance(wider, BackwardConfig)
        if wider.spread and WIDER * most_steps(call, wider) < most_steps(call, found):
            return wider
    return found


def of_dims(call: AttentionCall, dlse: bool, sink: bool, head_dim: int, head_dim_v: int) -> Config:
    """The config of a call by the kernel of these head dims."""
    left, right = call.window
    target = arch_of(call.q.device)
    # NOTE: CTAs wait for each other, so no more may be launched than run at one time
    num_sms, _ = resources(call.q.device, target)
    found = fitted(
        CONFIGS[target](
            num_ctas=num_sms,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=right == 0,
            window=(left is not None, bool(right)),
            varlen_q=call.cu_seqlens_q is not None,
            varlen_k=call.cu_seqlens_k is not None,
            used_q=call.seqused_q is not None,
            used_k=call.seqused_k is not None,
            softcap=call.softcap != 0,
            dlse=dlse,
            sink=sink,
            deterministic=call.deterministic or torch.are_deterministic_algorithms_enabled(),
        ),
        DTYPES[call.q.dtype],
    )
    tiles = -(-call.k.shape[-3] // found.tile_n) * call.batch * call.heads[1]
    if not isinstance(found, BackwardConfig):
        return found
    if found.may_rotate and tiles <= FEW * num_sms:
        found = replace(found, rotated=True)
    if found.may_ramp and pays_to_cut(call, found):
        return replace(found, spread=True, late_zeros=False)
    if found.spread and waits_for_zeros(call, found):
        return replace(found, late_zeros=False)
    if not found.spread and parts_of(call, found).total > 1:
        return replace(found, head_parts=True, late_zeros=False)
    return found


def takes(x: Tensor, one_list: bool) -> bool:
    """Whether TMA can step through x as it is."""
    return why_copied(x, one_list) is None and stepped(x, one_list) is x


def prepared(x: Tensor, one_list: bool) -> Tensor:
    """x with strides that TMA takes, or a copy."""
    return packed(x) if why_copied(x, one_list) is not None else stepped(x, one_list)


def num_tiles(call: AttentionCall, config: Config) -> int:
    """The tiles of queries of all heads (signature.RowTiles)."""
    tile, rows = config.tile_m, call.q.shape[-3]
    if config.varlen_q:
        return (rows // tile + call.batch) * call.heads[0]
    return -(-rows // tile) * call.batch * call.heads[0]


def tail_of_call(call: AttentionCall, config: Config) -> Tail:
    """The tiles of keys of a call, of which the last are cut; with a causal mask all of them."""
    heads, heads_kv = call.heads
    rows_q, rows_k = call.q.shape[-3], call.k.shape[-3]
    units, count = call.batch * heads_kv, -(-rows_k // config.tile_n)
    blocks, group = -(-rows_q // config.tile_m), heads // heads_kv
    how = config.num_ctas, *config.tail_steps
    if not config.causal:
        return Tail(count * units, blocks * group, *how)
    ramp = Ramp(count, blocks, group, rows_k - rows_q, config.tile_m, config.tile_n)
    return RampTail(count * units, ramp.before(count), *how, ramp)


def pays_to_cut(call: AttentionCall, config: BackwardConfig) -> bool:
    """Whether causal tiles are so few that the longest ones would take longer than equal shares of
    all of them."""
    tail = tail_of_call(call, config)
    assert isinstance(tail, RampTail)
    few = tail.tiles <= 2 * tail.ctas and tail.ramp.count <= MOST_BLOCKS
    return few and most_steps(call, replace(config, spread=True)) < tail.ramp.steps_of(0)


def waits_for_zeros(call: AttentionCall, config: BackwardConfig) -> bool:
    """Whether main would begin with zeroing all sums of dQ, one warp for each tile of keys, and
    these be long: where no CTA takes a second tile."""
    return tail_of_call(call, config).whole == 0 and call.q.shape[-3] >= MANY_ZEROS


class Parts(NamedTuple):
    """The parts that each tile of keys is divided into."""

    heads: int = 1  # groups of the query heads that share a head of K and V
    ranges: int = 1  # of blocks of queries, of each group

    @property
    def total(self) -> int:
        return self.heads * self.ranges


class Load(NamedTuple):
    """The work of a call by tiles of keys, in steps of a block of queries of one head."""

    tiles: float  # as many as take as long, if all were of the longest sequence
    longest_tiles: int  # of the longest sequence
    group: int  # query heads of a tile
    longest: int  # steps of one of these, of the longest tile
    mean: float  # of all tiles

    @staticmethod
    def of(call: AttentionCall, config: BackwardConfig) -> Load:
        left, right = call.window
        band = Band(None if left is None else -left, right)
        rows_k, (heads, heads_kv) = int(longest_k(call)), call.heads
        blocks = blocks_seen(
            BlockInfo(config.tile_m, config.tile_n, band), int(longest_q(call)), rows_k
        )
        alike, tiles = float(call.batch), len(blocks) * heads_kv
        longest_tiles = tiles * call.batch
        if call.cu_seqlens_k is not None and call.batch > 1:
            # NOTE: the others' lengths are unknown: between all alike, and as few as there may be
            others = max(call.k.shape[0] / rows_k - 1, 0)
            alike = 1 + (others + others**2 / (call.batch - 1)) / 2
            if others < call.batch - 1:
                longest_tiles = tiles
        mean = sum(blocks) / len(blocks)
        return Load(tiles * alike, longest_tiles, heads // heads_kv, max(blocks), mean)

    def steps(self, ctas: int, parts: Parts, cost: int) -> float:
        """The steps of the CTA that takes the most, where each tile is divided into parts."""
        more = cost if parts.total > 1 else 0
        heads = self.group // parts.heads
        longest = heads * ceil(self.longest / parts.ranges) + more
        mean = heads * self.mean / parts.ranges + more
        rounds = 1
        # NOTE: short tiles fill the gaps that long ones leave
        if self.mean > ALIKE * self.longest:
            rounds = ceil(self.longest_tiles * parts.total / ctas)
        return max(self.tiles * parts.total / ctas * mean, rounds * mean, longest)


@lru_cache(maxsize=64)
def blocks_seen(info: BlockInfo, rows_q: int, rows_k: int) -> list[int]:
    """How many blocks of queries see each block of keys of a sequence."""
    found = []
    for n_block in range(-(-rows_k // info.tile_n)):
        blocks = info.m_blocks(n_block, rows_q, rows_k)
        found.append(max(int(blocks.end - blocks.first), 0))
    return found


def parts_of(call: AttentionCall, config: BackwardConfig) -> Parts:
    """The parts of each tile of keys: few, but enough that the longest tile takes no longer than an
    equal share of all."""
    heads, heads_kv = call.heads
    group, cost = heads // heads_kv, cost_of_part(config)
    blocks = -(-longest_k(call) // config.tile_n)
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    if config.wide and not config.pairs and not config.deterministic:
        # NOTE: half a pair's keys, so twice its adds, which L2 has to keep up with
        units = min(2 * config.num_ctas / blocks, heads_kv * call.batch)  # in work at one time
        rows = units * longest_q(call) * config.head_dim * (4 + 2 + 2)
        fitting = [n for n in divisors if rows * group / n <= L2_BYTES]
        if min(fitting, default=group) > 1:
            return Parts(min(fitting, default=group))
    if blocks * heads_kv > FEW_PARTS * config.num_ctas:
        return Parts()
    load, ctas = Load.of(call, config), config.num_ctas
    # NOTE: in one order, a part's adds wait for those of the parts before it
    most = 1 if config.deterministic else max(min(MOST_RANGES, load.longest), 1)
    found = Parts()
    for ranges, worth in ((1, WORTH), (most, WORTH_RANGES)):
        choices = [Parts(n, i) for i in range(1, ranges + 1) for n in divisors]
        steps = {parts: load.steps(ctas, parts, cost) for parts in choices}
        least = min(steps.values())
        if least < worth * load.steps(ctas, found, cost):
            good = [parts for parts in choices if steps[parts] <= ABOUT * least]
            found = min(good, key=lambda parts: (parts.total, parts.ranges))
    return found


def cost_of_part(config: BackwardConfig) -> int:
    """The steps that a further part takes, with its sums."""
    # NOTE: CTAs that begin together wait for the adds of each other, less if of more heads
    return 0 if config.flips else PART_COST // config.tile_m


def kept_parts(call: AttentionCall, config: BackwardConfig) -> int:
    """The shares of the parts whose sums are kept for a tile's last one (tiles.HeadParts)."""
    tile, rows = config.key_ctas * config.tile_n, call.k.shape[-3]
    tiles = rows // tile + call.batch if config.varlen_k else -(-rows // tile) * call.batch
    parts = parts_of(call, config).total
    return tiles * config.key_ctas * call.heads[1] * (parts - 1)


def most_steps(call: AttentionCall, config: BackwardConfig) -> int:
    """The steps of the CTA that takes the most, of a call whose sequences have one length."""
    tail = tail_of_call(call, config)
    if isinstance(tail, RampTail):
        if config.spread:
            return -(-tail.steps_in_all // tail.shares) + tail.cost
        return max(tail.ramp.steps_of(0), -(-tail.steps_in_all // tail.ctas))
    if config.head_parts:
        parts = parts_of(call, config)
        return ceil(Load.of(call, config).steps(tail.ctas, parts, cost_of_part(config)))
    rounds, left = divmod(tail.tiles, tail.ctas)
    if config.spread and tail.is_cut:
        return rounds * tail.steps + -(-left * tail.steps // tail.shares) + tail.cost
    return (rounds + (left > 0)) * tail.steps


def scalars(call: AttentionCall, config: Config) -> list[float | int]:
    left, right = call.window
    found: list[float | int] = [call.scale]
    if config.softcap:
        found.append(float(call.softcap))
    if left is not None:
        found.append(-left)
    if right:
        found.append(right)
    if config.varlen_q:
        found.append(int(longest_q(call)))
    if config.varlen_k:
        found.append(int(longest_k(call)))
    if config.head_parts:
        parts = parts_of(call, cast(BackwardConfig, config))
        found += [parts.total, parts.ranges]
    return found


@lru_cache(maxsize=1024)
def kernel_for(config: Config, dtype: str, arch: str) -> Compiled:
    from cutex.compile import compile

    place = f"{package('attention_backward', arch)}.{config.kernel_module}"
    return compile(import_module(place).Backward(config), dtype, arch)
