"""The tiles of keys of the backward's main kernel: how many there are, and how the work of few is
divided among the CTAs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from cutex.device.attention.block_info import Band, BlockInfo
from cutex.kernels.attention.backward.choose import Config
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.tail import MOST_BLOCKS, Ramp, RampTail, Tail
from cutex.ops.attention.call import AttentionCall
from cutex.ops.attention.plan import longest_k, longest_q

# tiles of one sequence for each CTA, up to which query heads may be divided; the queries that take
# the time of a further part, with its sums; of the steps before, the most that it may take
FEW_PARTS, PART_COST, WORTH = 2, 512, 0.9
MOST_RANGES = 16  # of queries that a tile of keys is divided into
ABOUT = 1.05  # of the least steps, which fewer parts may take
WORTH_RANGES = 0.8  # of the steps of divided heads, the most that ranges may take
WORTH_LAST = 0.95  # of all rounds' steps, the most that dividing the last round may leave
# of tiles of the last round: the queries that take the time of a further round's beginning and end,
# and of each part's sums
ROUND_COST, LAST_PART_COST = 128, 64
L2_BYTES = 55 << 20  # of q, dO and the sums of dQ in work at one time, which L2 about holds
ALIKE = 0.75  # of the longest tile's steps, which the mean of tiles that take equally long exceeds


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


def begins_with_zeros(call: AttentionCall, config: BackwardConfig) -> bool:
    """Whether main would begin with zeroing all sums of dQ, one warp for each tile of keys, so that
    preprocess is faster: where it zeroes two rounds of tiles ahead, and there are no more."""
    rows, units = call.k.shape[-3], call.heads[1]
    if config.varlen_k:
        return (rows // config.tile_n + call.batch) * units <= 2 * config.num_ctas
    return -(-rows // config.tile_n) * call.batch * units <= 2 * config.num_ctas


class Parts(NamedTuple):
    """The parts that each tile of keys is divided into."""

    heads: int = 1  # groups of the query heads that share a head of K and V
    ranges: int = 1  # of blocks of queries, of each group

    @property
    def total(self) -> int:
        return self.heads * self.ranges


class Load(NamedTuple):
    """The work of a call by tiles of keys, those of a cluster counting as one, in steps of a block
    of queries of one head."""

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
            BlockInfo(config.tile_m, config.tile_n * config.key_ctas, band),
            int(longest_q(call)),
            rows_k,
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

    def steps(self, config: BackwardConfig, parts: Parts) -> float:
        """The steps of the CTA that takes the most, where each tile is divided into parts."""
        ctas = config.num_ctas // config.key_ctas
        more = cost_of_part(config) if parts.total > 1 else 0
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
    group = heads // heads_kv
    blocks = -(-longest_k(call) // config.tile_n)
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    if (in_l2 := heads_for_l2(call, config)) > 1:
        return Parts(in_l2)
    if blocks * heads_kv > FEW_PARTS * config.num_ctas:
        return Parts()
    load = Load.of(call, config)
    # NOTE: in one order, a part's adds wait for those of the parts before it
    most = 1 if config.deterministic else max(min(MOST_RANGES, load.longest), 1)
    found = Parts()
    for ranges, worth in ((1, WORTH), (most, WORTH_RANGES)):
        choices = [Parts(n, i) for i in range(1, ranges + 1) for n in divisors]
        steps = {parts: load.steps(config, parts) for parts in choices}
        least = min(steps.values())
        if least < worth * load.steps(config, found):
            good = [parts for parts in choices if steps[parts] <= ABOUT * least]
            found = min(good, key=lambda parts: (parts.total, parts.ranges))
    return found


def heads_for_l2(call: AttentionCall, config: BackwardConfig) -> int:
    """The parts that query heads are divided into for what is in work at one time to fit L2."""
    if (config.head_dim, config.head_dim_v) != (192, 192) or config.deterministic:
        return 1
    heads, heads_kv = call.heads
    group, blocks = heads // heads_kv, -(-longest_k(call) // config.tile_n)
    # NOTE: without pairs L2 did not keep up with the adds of all heads (1334 us instead of 938)
    units = min(2 * config.num_ctas / blocks, heads_kv * call.batch)  # in work at one time
    rows = units * longest_q(call) * config.head_dim * (4 + 2 + 2)
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    return min((n for n in divisors if rows * group / n <= L2_BYTES), default=group)


def steps_of(call: AttentionCall, config: BackwardConfig, parts: Parts) -> float:
    """The steps of the CTA that takes the most, where tiles are divided into `parts`."""
    if parts.total == 1 or heads_for_l2(call, config) == 1:
        return Load.of(call, config).steps(config, parts)
    return 0.0  # the reason for these parts is another one


class LastParts(NamedTuple):
    """The tiles of keys, those of a cluster counting as one, of a call that sees all keys."""

    whole: int  # those that are not divided: whole rounds of the CTAs
    left: int  # those of the last round
    parts: int = 1  # that each of these is divided into
    steps: float = 0.0  # of all rounds

    def kept(self, key_ctas: int) -> int:
        """The tiles whose sums are kept for a tile's last part."""
        return self.left * key_ctas * (self.parts - 1)


def last_parts_of(call: AttentionCall, config: BackwardConfig) -> LastParts:
    """The parts of the tiles that do not fill a round of the CTAs, where all tiles take equally
    long: those with the fewest steps in all."""
    heads, heads_kv = call.heads
    ctas = config.num_ctas // config.key_ctas
    blocks = -(-call.q.shape[-3] // config.tile_m)
    tiles = -(-call.k.shape[-3] // (config.tile_n * config.key_ctas)) * heads_kv * call.batch
    whole, left = tiles // ctas * ctas, tiles % ctas
    each = blocks * (heads // heads_kv)
    most = (whole // ctas + 1) * each
    found = LastParts(whole, left, 1, most)
    alike = not (config.causal or config.ragged)
    if config.own_dq or config.deterministic or not alike or not whole or not left:
        return found
    for parts in range(2, min(MOST_RANGES, blocks) + 1):
        rounds, longest = -(-left * parts // ctas), ceil(blocks / parts) * (heads // heads_kv)
        cost = ((rounds - 1) * ROUND_COST + parts * LAST_PART_COST) / config.tile_m
        steps = whole // ctas * each + rounds * longest + cost
        if steps < WORTH_LAST * most and steps < found.steps:
            found = LastParts(whole, left, parts, steps)
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
    if config.last_parts:
        return ceil(last_parts_of(call, config).steps)
    if config.head_parts:
        return ceil(Load.of(call, config).steps(config, parts_of(call, config)))
    rounds, left = divmod(tail.tiles, tail.ctas)
    if config.spread and tail.is_cut:
        return rounds * tail.steps + -(-left * tail.steps // tail.shares) + tail.cost
    return (rounds + (left > 0)) * tail.steps
