"""The choice of a decode config: tiles by head dims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutex.kernels.attention.decode.config import FEW_ROWS, ROWS, DecodeConfig
from cutex.kernels.attention.decode.sm100.config import Sm100DecodeConfig
from cutex.kernels.attention.decode.splits import are_many

# by arch and head dims: what differs from the config's defaults
_TILES: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    # NOTE: one CTA an SM, and no more bytes under way than it takes: else memory is slower
    # (docs/facts/decode.md#one-cta-an-sm, #fewer-slots)
    "sm_90a": {
        (64, 64): {"tile_n": 128, "num_stages": 6},
        (96, 96): {"tile_n": 128},
        (128, 128): {"tile_n": 128, "num_stages": 2},
        (192, 128): {"num_stages": 4},
        (192, 192): {"num_stages": 3},
        # (docs/facts/decode.md#two-256)
        (256, 256): {
            "tile_n": 32,
            "num_stages": 2,
            "ctas_per_sm": 2,
            "most_whole": 16,
            "least": 2,
            "merge": 4,
        },
    },
    "sm_100a": {
        (64, 64): {"num_stages": 6},
        (96, 96): {"num_stages": 4},
        (192, 128): {"num_stages": 2},
        (192, 192): {"tile_n": 64},
        (256, 256): {"tile_n": 64, "num_stages": 2},
    },
}
# the same, where single rows are loaded: beside the warps that do it, threads of two CTAs have too
# few registers
_SINGLE_ROWS: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {(256, 256): {"most_whole": 32}},
}
# NOTE: units of few keys take as long to begin and to end as to be read, so that where there are
# more than SMs two CTAs of an SM with smaller blocks are faster (docs/facts/decode.md#short-more)
_SHORT: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {
        (64, 64): {"tile_n": 64, "num_stages": 6, "ctas_per_sm": 2, "most_whole": 16},
        (128, 128): {"tile_n": 64, "num_stages": 3, "ctas_per_sm": 2, "most_whole": 16},
    },
}
SHORT = 1024  # keys that a sequence has room for
# longer, where units are at least one for three SMs, and no more (docs/facts/decode.md#two-medium)
_MEDIUM: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {(128, 128): {"tile_n": 64, "num_stages": 3, "ctas_per_sm": 2}},
}
MEDIUM = 4096
# where they are two for three SMs or more, each is whole (docs/facts/decode.md#medium-whole)
_MEDIUM_WHOLE: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    arch: {dims: {**x, "merge": MEDIUM // x["tile_n"], "overlaps": False} for dims, x in of.items()}
    for arch, of in _MEDIUM.items()
}
# blocks of keys of a part at head dim 256, at least, where it has many rows to store and to merge
# (docs/facts/decode.md#least-256)
LEAST_OF_ROWS = 5
# of more rows than a block has products bind, not memory: one of two CTAs of an SM computes
# exponentials while the tensor cores have the other's products (docs/facts/decode.md#many-rows-two,
# #two-from-65)
MANY_ROWS = ROWS + 1
_MANY: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {
        (64, 64): {"tile_n": 64, "num_stages": 6, "ctas_per_sm": 2},
        (128, 128): {"tile_n": 64, "num_stages": 3, "ctas_per_sm": 2},
    },
}
# NOTE: of few rows a warp has every fourth block: many units of few keys wait less for each other's
# steps, and e4m3 is widened by four warps at once (docs/facts/decode.md#few-rows, #few-e4m3)
_FEW: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {
        (64, 64): {
            "tile_n": 64,
            "num_stages": 4,
            "ctas_per_sm": 2,
            "merge": 12,
            "least": 4,
            "start": 4,
        },
        (128, 128): {
            "tile_n": 32,
            "num_stages": 4,
            "ctas_per_sm": 2,
            "merge": 12,
            "least": 4,
            "start": 4,
        },
    },
}
_FEW_KEYS = {(64, 64): 16384, (128, 128): SHORT}  # of room, at most
# where units are no more than SMs, and where sequences are long (docs/facts/decode.md#few-long)
_FEW_ALONE: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {
        (64, 64): {"tile_n": 64, "num_stages": 8, "merge": 12, "least": 4, "start": 4},
        (128, 128): {"tile_n": 32, "num_stages": 8, "merge": 12, "least": 4, "start": 4},
    },
}
_FEW_LONG: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {
        (64, 64): {"tile_n": 64, "num_stages": 8, "merge": 12, "least": 4, "start": 4},
        (128, 128): {"tile_n": 64, "num_stages": 4, "merge": 6, "least": 2, "start": 3},
    },
}
# of units that are no more than SMs, but a third of them or more, each is whole: they take all that
# memory gives, and nothing is merged (docs/facts/decode.md#third-whole)
WHOLE_BLOCKS, WHOLE_BLOCKS_OF_PAGES = 96, 32  # of 16 KB of keys and values
# of fewer, units are cut by their room into parts that are not short, since to look at all
# lengths takes as long as an SM reads 200 KB; of pages one load warp would take too long
# (docs/facts/decode.md#few-medium, #by-room-longer)
MOST_OF_SM = 1 << 20  # bytes of keys and values: what one SM reads, should others have few
_FEW_BY_ROOM: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    arch: {dims: {**tiles, "most_by_room": MOST_OF_SM} for dims, tiles in of_arch.items()}
    for arch, of_arch in _FEW_ALONE.items()
}
_FEW_BY_ROOM_TWO: dict[str, dict[tuple[int, int], dict[str, Any]]] = {  # CTAs of an SM
    arch: {dims: {**tiles, "most_by_room": MOST_OF_SM // 2} for dims, tiles in of_arch.items()}
    for arch, of_arch in _FEW.items()
}
# many units, whole: what ends early leaves its share of memory to others, and nothing is merged
# (docs/facts/decode.md#few-whole); of pages not timed
MOST_WHOLE = 128  # blocks of keys
_FEW_WHOLE: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    arch: {dims: {**tiles, "most_whole": MOST_WHOLE} for dims, tiles in of_arch.items()}
    for arch, of_arch in _FEW.items()
}
_FEW_E4M3: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {
        (64, 64): {"tile_n": 128, "num_stages": 8},
        (128, 128): {"tile_n": 64, "num_stages": 8},
    },
}
# many units of few keys, whole, in two CTAs of an SM: at hd 128 64 bytes are spilled
# (docs/facts/decode.md#few-e4m3-whole)
_FEW_WHOLE_E4M3: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {
        dims: {"tile_n": tile_n, "num_stages": 4, "ctas_per_sm": 2, "merge": 12, "least": 4,
               "most_whole": 64}
        for dims, tile_n in (((64, 64), 128), ((128, 128), 64))
    },
}  # fmt: skip
# of two groups of rows, which a warp widens each of its blocks for once; short units take longer to
# begin and to end (docs/facts/decode.md#e4m3-two-groups)
TWO_GROUPS_FROM = 2048  # keys that a sequence has room for
_TWO_GROUPS_E4M3: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {(64, 64): {"row_groups": 2, "tile_n": 64, "num_stages": 16}},
}
# of more rows a warpgroup widens tiles of e4m3 in smem, and a second CTA computes meanwhile where
# there are registers for it (docs/facts/decode.md#e4m3-widened, #e4m3-two-ctas)
_E4M3: dict[str, dict[tuple[int, int], dict[str, Any]]] = {
    "sm_90a": {
        (64, 64): {"tile_n": 64, "num_stages": 8, "ctas_per_sm": 2},
        (96, 96): {"num_stages": 8},
        # NOTE: teams of 4, of which 132 SMs are a multiple, where products bind, not memory
        (128, 128): {"tile_n": 128, "num_stages": 3, "team": 4},
        (192, 128): {"num_stages": 6},
        (192, 192): {"tile_n": 32, "num_stages": 8},
        (256, 256): {"tile_n": 32, "num_stages": 6},
    },
}
# keys of room up to which units are whole, if they fill the GPU: to begin and to end a part takes
# as long as many of its blocks (docs/facts/decode.md#e4m3-whole)
_WHOLE_E4M3: dict[str, dict[tuple[int, int], int]] = {
    "sm_90a": {(64, 64): 2048, (128, 128): 2048},
}
CONFIGS: dict[str, type[DecodeConfig]] = {"sm_90a": DecodeConfig, "sm_100a": Sm100DecodeConfig}


def fitted(config: DecodeConfig, room: int, units: int, rows: int = ROWS) -> DecodeConfig:
    """`config`, which says what is computed, with its tiles chosen for `units` of `rows` packed
    rows with room for `room` keys each."""
    arch = next(name for name, kind in CONFIGS.items() if kind is type(config))
    if rows <= FEW_ROWS and (few := _few(config, arch, room, units)) is not None:
        return replace(config, few_rows=True, **few)
    if config.fp8 and room >= TWO_GROUPS_FROM and FEW_ROWS < rows <= 2 * FEW_ROWS:
        two = _TWO_GROUPS_E4M3.get(arch, {}).get(config.head_dims, {})
        if two:
            return replace(config, few_rows=True, **two)
    # (docs/facts/decode.md#single-rows-short)
    short = room <= SHORT and not (config.single_rows and config.head_dims == (64, 64))
    tiles = _TILES[arch].get(config.head_dims, {})
    if config.single_rows:
        tiles = _SINGLE_ROWS.get(arch, {}).get(config.head_dims, tiles)
    if short and units > config.num_sms and not config.fp8:
        tiles = _SHORT.get(arch, {}).get(config.head_dims, tiles)
    medium = SHORT < room <= MEDIUM and not (config.single_rows or config.fp8)
    if medium and units <= config.num_sms <= 3 * units:
        of_units = _MEDIUM_WHOLE if are_many(units, config.num_sms) else _MEDIUM
        tiles = of_units.get(arch, {}).get(config.head_dims, tiles)
    many_rows = rows >= MANY_ROWS and room > SHORT and not config.fp8
    if many_rows and "ctas_per_sm" not in tiles:
        tiles = _MANY.get(arch, {}).get(config.head_dims, tiles)
    if rows > FEW_ROWS and "least" in tiles:
        tiles = {**tiles, "least": LEAST_OF_ROWS}
    if config.fp8:
        tiles = _E4M3.get(arch, {}).get(config.head_dims, tiles)
        whole = _WHOLE_E4M3.get(arch, {}).get(config.head_dims, 0)
        if room <= whole and are_filled(units, config.num_sms * tiles.get("ctas_per_sm", 1)):
            tiles = {**tiles, "most_whole": whole // tiles["tile_n"]}
    if rows <= FEW_ROWS and not config.q_in_smem:  # parts of few rows are merged in less time
        tiles = {**tiles, "most_whole": 0}
    return replace(config, **tiles)


def are_filled(units: int, ctas: int) -> bool:
    """Whether whole units, one per CTA, keep the CTAs busy for at least three quarters of the
    time."""
    waves = -(-units // ctas)
    return units > 0 and 3 * waves * ctas <= 4 * units


def _few(config: DecodeConfig, arch: str, room: int, units: int) -> dict[str, Any] | None:
    """The changes to the config's defaults where each warp processes keys of its own; None if the
    warpgroup should process them together."""
    dims = config.head_dims
    if config.fp8:
        whole = _FEW_WHOLE_E4M3.get(arch, {}).get(dims)
        if whole is None or config.single_rows or units <= config.num_sms:
            tiles = _FEW_E4M3.get(arch, {}).get(dims)
            if tiles is None or config.page_size or not units:
                return tiles
            return {**tiles, "most_by_room": MOST_OF_SM}  # (docs/facts/decode.md#e4m3-by-room)
        short = room <= whole["most_whole"] * whole["tile_n"]
        return _overlapping(config, whole, units) if short else _FEW_E4M3[arch][dims]
    if config.single_rows or not units or arch not in _FEW:
        return None
    many = units > config.num_sms
    whole = None if config.page_size else _FEW_WHOLE[arch].get(dims)
    if whole is not None and many and room <= MOST_WHOLE * whole["tile_n"]:
        return _overlapping(config, whole, units)
    of_units = _FEW if many else _FEW_ALONE
    alone = _FEW_ALONE[arch].get(dims)
    if alone is not None and not many and 3 * units >= config.num_sms:
        most = WHOLE_BLOCKS_OF_PAGES if config.page_size else WHOLE_BLOCKS
        if room <= most * alone["tile_n"]:
            return {**alone, "merge": most}
    if room > _FEW_KEYS.get(dims, 0) or (units <= config.num_sms and room > SHORT):
        of_units = _FEW_LONG
        if dims == (128, 128) and _is_cut_by_room(config, _FEW[arch][dims], room, units):
            one = _is_cut_by_room(config, _FEW_LONG[arch][dims], room, units)
            of_units = of_units if one else _FEW
    tiles = of_units[arch].get(dims)
    if tiles is None or many or config.page_size or _is_cut_by_room(config, tiles, room, units):
        return tiles
    return _cut_by_longer_room(config, arch, room, units) or tiles


def _cut_by_longer_room(
    config: DecodeConfig, arch: str, room: int, units: int
) -> dict[str, Any] | None:
    """What differs from the config's defaults where parts by room are not short, but no longer than
    it takes to look at all lengths; None if they are."""
    one, two = (tiles[arch][config.head_dims] for tiles in (_FEW_BY_ROOM, _FEW_BY_ROOM_TWO))
    able = _is_cut_by_room(config, one, room, units)
    parts, blocks = config.num_sms // units, -(-room // one["tile_n"])
    whole = blocks <= -(-blocks // parts) + one["merge"]
    if able and (whole or 4 * parts * units >= 3 * config.num_sms):
        return one
    if _is_cut_by_room(config, two, room, units, least=2):
        return two  # parts of half an SM each, which fill the GPU better
    return one if able else None


def is_crowded(ctas: int, config: DecodeConfig) -> bool:
    """Whether a launch of so many CTAs should not begin while one before it, of as many, ends: both
    do not fit, and, without pages, a quarter of the GPU is idle
    (docs/facts/decode.md#crowded)."""
    quarters = 4 if config.page_size else 3
    return config.ctas < 2 * ctas and 4 * ctas <= quarters * config.ctas


def comes_in_waves(config: DecodeConfig, units: int) -> bool:
    """Whether each of `units` whole units has a CTA to itself, which an SM takes when it has ended
    another: of lengths that differ the last end together, where otherwise a CTA has every so manyth
    unit. Of many more units than CTAs their begins take longer than that
    (docs/facts/decode.md#whole-waves, #more-waves)."""
    return config.few_rows and not config.fp8 and config.ctas < units <= 5 * config.ctas // 2


def _overlapping(config: DecodeConfig, whole: dict[str, Any], units: int) -> dict[str, Any]:
    """The tiles for units that are `whole`, and whether launches may overlap."""
    # NOTE: of fewer CTAs than there is room for, those that begin while others end would go to
    # some SMs by two, and to others not at all (docs/facts/decode.md#two-by-two)
    return {**whole, "overlaps": units >= whole["ctas_per_sm"] * config.num_sms}


def _is_cut_by_room(
    config: DecodeConfig, tiles: dict[str, Any], room: int, units: int, least: int = 1
) -> bool:
    """Whether parts of `units` would be short: with these tiles of few rows, one part per CTA and
    `least` or more per unit."""
    config = replace(config, few_rows=True, **tiles)
    parts = config.ctas // units
    return parts >= least and config.is_short(-(-room // (config.tile_n * parts)))
