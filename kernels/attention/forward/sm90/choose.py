"""The choice of an attention config on Hopper: tiles by head dim, packed heads where queries are
few, pairs of CTAs where sequences are long."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any

from cutex.device.attention.split_row import MOST_PARTS, SECOND, START
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.spec import AttentionSpec, Shape

if TYPE_CHECKING:
    from cutex.arch import Arch

# by head dims of K and of V: the tiles that fit smem and registers
_TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"tile_m": 192, "tile_n": 128, "num_stages": 4, "halves": True},
    (96, 96): {"tile_m": 192, "tile_n": 96, "num_stages": 3},
    (128, 128): {"tile_m": 128, "tile_n": 128, "halves": True},
    (192, 128): {"tile_m": 128, "tile_n": 128, "q_stages": 1, "o_parts": 2},
    (192, 192): {"tile_m": 128, "tile_n": 96, "q_stages": 1, "o_parts": 2},
    # 64 keys tell little of the others, and leave issue slots for guarding them all
    (256, 256): {
        "tile_m": 128,
        "tile_n": 64,
        "q_stages": 1,
        "o_parts": 2,
        "guards_all": True,
    },
}
# what is faster from a number of keys on
_LONG: dict[tuple[int, int], dict[int, dict[str, Any]]] = {
    (128, 128): {8192: {"q_in_registers": 128}, 16384: {"halves": False}},
    # `alternate` would give head dim 128 1 %, too; a row's last bits then depend on other tiles
    (256, 256): {
        4096: {"q_in_registers": 64},
        8192: {"q_in_registers": 128},
        16384: {"alternate": True},
    },
}
# the number of keys from which on two CTAs load K and V for each other: causal; full, where at head
# dim 256 all CTAs read the same keys at one time anyway, unless rows are few
_SHARED: dict[tuple[int, int], tuple[int, int | None]] = {
    (64, 64): (16384, 16384), (96, 96): (8192, 8192), (128, 128): (8192, 4096),
    (192, 128): (8192, 8192), (192, 192): (8192, 8192), (256, 256): (8192, None),
}  # fmt: skip
BOTH_ENDS = 4096  # keys from which on looking at block 0 early costs next to nothing
MANY_BLOCKS = 16  # of rows, in a sequence: little of the last tile of two CTAs is empty
L2_HEADS = 6  # heads of K and V, of which L2 does not hold as many where rows few read each
# blocks of keys, of two warpgroups, that merging takes as long as: with its first part, and with so
# many more
MERGING, PARTS_A_BLOCK = 5, 8
# how much longer CTAs of 128 rows take where each reads keys of its own: parts of the last round,
# and shares, of which neighbours have neighbouring rows; none of it while all keys fill HELD of L2,
# all of it beyond STREAMED times L2
APART, APART_SPLIT, HELD, STREAMED = 0.35, 0.12, 0.7, 1.3
MOSTLY = 0.5  # of that, from which on full rows of more tiles than half the SMs are split, too
IDLE = 0.2  # of the last round's time, that idle SMs save, were all: the others have more power
# blocks that whoever completes a tile takes to add each part of it, times the parts O is stored in
ADDING = 0.5
MOST_ROUNDS = 3  # of tiles that are split: of more the last one is a small part
FEW_BESIDE = 4  # times as many keys as queries, of which a causal mask hides few
# how much faster than whole tiles shares of many dense ones must be by this model: while SMs idle
# in the last round the others have more power
DENSE_GAIN = 1.25
FEWER_TILES = 0.9  # of those of single heads, where heads of longer sequences are packed
MOST_PACKED = 64  # packed heads, at most the rows of a warpgroup


def fitted(spec: AttentionSpec, shape: Shape, arch: Arch) -> Sm90ForwardConfig:
    """The tiles and rings that compute `spec` for `shape`."""
    config = Sm90ForwardConfig.computing(spec)
    config = replace(config, **_TILES.get((spec.head_dim, spec.head_dim_v), {}))
    if config.modified:  # a user's functions need registers of their own
        keys = min(config.tile_n, 96)
        config = replace(config, tile_m=128, tile_n=keys, q_in_registers=0, halves=False)
    else:
        for keys, better in _LONG.get((spec.head_dim, spec.head_dim_v), {}).items():
            config = replace(config, **better if shape.longest_k >= keys else {})
    if config.alternates:  # more columns of Q would spill
        config = replace(config, q_in_registers=64)
    # NOTE: at head dim 64 a causal kernel has no registers left for it, and spills
    short_of_registers = config.causal and config.head_dim == 64
    both_ends = shape.longest_k >= BOTH_ENDS and not short_of_registers
    config = replace(config, both_ends=both_ends)
    config = replace(config, pack=packed_heads(config, shape))
    if shares(config, shape, arch):
        config = replace(config, share=True, tile_m=2 * config.tile_m)
    return split(cut(config, shape, arch), shape, arch)


def packed_heads(config: Sm90ForwardConfig, shape: Shape) -> int:
    """The heads whose rows share a tile: where tiles would be partly empty."""
    heads = gcd(shape.heads_q // shape.heads_kv, MOST_PACKED)
    if shape.longest_q < config.tile_m:
        return heads
    if config.has_lengths and not on_caches(config):
        return 1
    alone = -(-shape.mean_q // config.tile_m) * heads
    together = -(-shape.mean_q * heads // config.tile_m)
    return heads if together < FEWER_TILES * alone else 1


def cut(config: Sm90ForwardConfig, shape: Shape, arch: Arch) -> Sm90ForwardConfig:
    """`config` with the tiles of the last round cut along their keys, where that is faster."""
    parts = replace(config, spread=True, num_ctas=arch.num_sms)
    if parts.why_not() is not None or not parts.tail(shape).is_cut:
        return config
    return min((parts, config), key=lambda x: time_of_rounds(x, shape, arch))


def time_of_rounds(config: Sm90ForwardConfig, shape: Shape, arch: Arch) -> float:
    """The time of all rounds of tiles, in blocks of keys."""
    steps, tail = -(-shape.longest_k // config.tile_n) + START, config.tail(shape)
    ctas = arch.num_sms // config.ctas
    rounds, left = divmod(tail.tiles, ctas)
    if not left:
        return float(rounds * steps)
    if not config.is_cut:
        return rounds * steps + steps * (1 - IDLE * (1 - left / ctas))
    last = left * (steps - START) / tail.shares + tail.cost
    last += ADDING * config.o_parts * tail.shares / left
    return rounds * steps + last * (1 + APART * streamed(config, shape, arch, left))


def streamed(config: Sm90ForwardConfig, shape: Shape, arch: Arch, tiles: int) -> float:
    """How much of the keys and values that so many tiles, in order, see comes from memory for each
    CTA that reads them, if all read others at one time: from 0, L2 holding them, to 1."""
    of_head = -(-shape.longest_q * config.pack // config.tile_m)  # tiles
    sharing = shape.heads_q // shape.heads_kv // config.pack
    heads = min(-(-tiles // (of_head * sharing)), shape.heads_kv * shape.batch)
    beyond = heads * head_bytes(config, shape) / arch.l2_bytes - HELD
    # NOTE: of more rows each key takes longer
    return max(0.0, min(beyond / (STREAMED - HELD), 1.0)) if config.rows <= 128 else 0.0


def head_bytes(config: Sm90ForwardConfig, shape: Shape) -> int:
    """The bytes of the keys and values of a head."""
    return shape.longest_k * (config.k_bytes + config.v_bytes) // config.tile_n


def on_caches(config: Sm90ForwardConfig) -> bool:
    """Whether keys are in pages, or only some of them are used: there shares of more tiles than
    half the SMs are faster, full or causal."""
    return bool(config.page_size or config.used_k)


def split(config: Sm90ForwardConfig, shape: Shape, arch: Arch) -> Sm90ForwardConfig:
    """`config` with tiles split into shares for all CTAs, where that is faster."""
    num_sms = arch.num_sms
    few = replace(config.uncut(), split=True, num_ctas=num_sms, dispatch="one", halves=False)
    few = replace(few, share=False, alternate=False, tile_m=fewest_rows(config, shape))
    if config.head_dim == 256:  # with more of Q in registers, what computes spills
        few = replace(few, q_in_registers=min(config.q_in_registers, 64))
    mean = shape._replace(longest_q=min(shape.mean_q + 1, shape.longest_q))  # of packed queries
    tiles = few.tiles(mean)
    if few.why_not() is not None or not 0 < tiles <= MOST_ROUNDS * num_sms:
        return config
    few_tiles = 2 * tiles <= num_sms or on_caches(config)
    if not few_tiles and (config.has_lengths or (not config.causal and tiles > num_sms)):
        return config
    # NOTE: rows of one tile that see fewer keys than those of others make shares unequal
    if config.causal and 2 * tiles > num_sms and shape.longest_k < FEW_BESIDE * shape.longest_q:
        return config
    steps, whole = -(-shape.longest_k // config.tile_n), config.tiles(mean)
    if config.causal or on_caches(config):
        rounds = -(-whole * config.ctas // num_sms) * (steps + START)
        gain = 1.0 if few_tiles else DENSE_GAIN
        return few if gain * time_of_shares(steps, tiles, num_sms) < rounds else config
    apart = streamed(few, shape, arch, tiles)
    if not few_tiles and apart < MOSTLY:
        return config
    here = time_of_shares(steps, tiles, num_sms, APART_SPLIT * apart, config.o_parts)
    return few if here < time_of_rounds(config, mean, arch) else config


def time_of_shares(
    steps: int, tiles: int, ctas: int, apart: float = 0.0, o_parts: int = 1
) -> float:
    """The time of so many tiles of `steps` blocks of keys each that are split, in blocks: longer by
    `apart` where shares end anywhere, each of which leaves two pieces of O."""
    shares = (steps + START) * tiles / ctas * (1 + apart) + MERGING + SECOND * o_parts
    if tiles > ctas:
        return shares
    parts = min(ctas // tiles, MOST_PARTS)
    merging = MERGING + parts // PARTS_A_BLOCK if parts > 1 else 0
    return min(shares, float(-(-steps // parts) + START + merging))


def fewest_rows(config: Sm90ForwardConfig, shape: Shape) -> int:
    """The rows of a tile of one CTA that leave the least of the tiles empty. Of 192 rows each takes
    less time."""
    rows, most = shape.longest_q * config.pack, config.tile_m // config.ctas
    return min((most, 128), key=lambda m: -(-rows // m) * m * (1.1 if m < most else 1.0))


def shares(config: Sm90ForwardConfig, shape: Shape, arch: Arch) -> bool:
    """Whether a cluster of two CTAs multicasts K and V. It pays on long sequences, which power
    limits: less L2 traffic raises the clock; and where few rows see so many keys that L2 does not
    hold them until all have. Not with a window: the CTAs need different keys."""
    causal, full = _SHARED.get((config.head_dim, config.head_dim_v), (None, None))
    rows = shape.mean_q * config.pack
    few = rows < MANY_BLOCKS * config.tile_m
    keys = causal if config.causal or (few and full is None) else full
    if keys is None or shape.longest_k < keys or config.modified or any(config.window):
        return False
    if config.page_size:  # the CTAs would look up the same pages
        return False
    heads = shape.heads_q // config.pack * shape.batch
    if not few:
        return rows // config.tile_m * heads >= 2 * arch.num_sms
    m_blocks = -(-rows // config.tile_m)  # the last one may be partly empty
    whole = shape.mean_q == shape.longest_q and m_blocks > 0 and m_blocks % 2 == 0
    from_memory = not config.causal and L2_HEADS * head_bytes(config, shape) > arch.l2_bytes
    return whole and from_memory and m_blocks * heads >= arch.num_sms
