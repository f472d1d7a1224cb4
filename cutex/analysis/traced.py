"""Layouts and instructions as the DSL traces them: offsets, owners and sizes as Python values.

No GPU is needed; the objects are those that the kernels use.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MOST_CELLS = 4096
LARGEST = 1 << 48  # of a shape or a stride: offsets of MOST_CELLS cells fit 64 bits
BANKS, BANK_BYTES, UNIT = 32, 4, 16  # shared memory; swizzles permute units of UNIT bytes
MMAS = {"wgmma": "sm_90a", "tcgen05": "sm_100a", "tcgen05-pair": "sm_100a"}

Shape = Any  # an int, or a tuple of shapes


def traced(arch_name: str, body: Callable[..., Any], *fake: Any) -> Any:
    """Trace `body` with the DSL for an arch, and return its result: Python values, where static."""
    from cutlass import cute

    returned: list[Any] = []

    def traced_body(*arguments: Any) -> None:
        returned.append(body(*arguments))

    cute.compile[cute.GPUArch(arch_name)](cute.jit(traced_body), *fake)
    return returned[0]


def parse_layout(text: str) -> tuple[Shape, Shape]:
    """Parse "(4,8):(8,1)" into a shape and a stride of the same profile. Raises ValueError for
    other text."""
    shape_text, colon, stride_text = text.replace(" ", "").partition(":")
    try:
        shape, stride = ast.literal_eval(shape_text), ast.literal_eval(stride_text)
    except (ValueError, SyntaxError):
        raise ValueError(f"layout {text!r}: a layout is shape:stride, as (4,8):(8,1)") from None
    if not colon or not _alike(shape, stride, positive=True):
        raise ValueError(f"layout {text!r}: shape and stride must be whole numbers, nested alike")
    if any(int(number) > LARGEST for number in re.findall(r"[0-9]+", f"{shape} {stride}")):
        raise ValueError(f"layout {text!r}: takes numbers up to {LARGEST}")
    return shape, stride


def _alike(shape: Shape, stride: Shape, positive: bool) -> bool:
    if isinstance(shape, tuple) and isinstance(stride, tuple):
        pairs = list(zip(shape, stride, strict=False))
        return (
            bool(shape) and len(shape) == len(stride) and all(_alike(*p, positive) for p in pairs)
        )
    return type(shape) is int and type(stride) is int and shape > 0


def offsets(shape: Shape, stride: Shape, swizzle: tuple[int, int, int] | None) -> list[list[int]]:
    """Return the offset of each coordinate of a layout, as rows and columns; modes beyond two join
    the columns."""

    def body() -> list[list[int]]:
        from cutlass import cute

        layout = cute.make_layout(shape, stride=stride)
        if cute.rank(layout) == 1:
            layout = cute.append(cute.make_layout(1), layout, up_to_rank=2)
            layout = cute.make_layout((1, shape), stride=(0, stride))
        elif cute.rank(layout) > 2:
            layout = cute.group_modes(layout, 1, cute.rank(layout))
        rows, columns = cute.size(layout, mode=[0]), cute.size(layout, mode=[1])
        _fits(rows, columns)
        if swizzle is not None:
            layout = cute.make_composed_layout(cute.make_swizzle(*swizzle), 0, layout)
        return [[int(layout((i, j))) for j in range(columns)] for i in range(rows)]

    return traced("sm_90a", body)


def _fits(rows: int, columns: int) -> None:
    if rows * columns > MOST_CELLS:
        raise ValueError(f"{rows} x {columns} cells cannot be read, at most {MOST_CELLS} are drawn")


def owners(tv: Any, tile: tuple[int, int]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the owners of each (row, column) of a tile: (thread, value) of a traced TV layout,
    whose offsets count down the columns of the tile."""
    from cutlass import cute

    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for thread in range(cute.size(tv, mode=[0])):
        for value in range(cute.size(tv, mode=[1])):
            at = int(tv((thread, value)))
            found.setdefault((at % tile[0], at // tile[0]), []).append((thread, value))
    return found


def tv_owners(
    shape: Shape, stride: Shape, tile: tuple[int, int]
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    _fits(*tile)
    if not isinstance(shape, tuple) or len(shape) != 2:
        raise ValueError(f"tv: a TV layout has two modes, threads and values, not {shape}")

    def body() -> Any:
        from cutlass import cute

        return owners(cute.make_layout(shape, stride=stride), tile)

    found = traced("sm_90a", body)
    outside = [at for at in found if at[1] >= tile[1]]
    if outside:
        raise ValueError(f"tv: the layout reaches {outside[0]}, outside of a tile of {tile}")
    return found


def smem_addresses(swizzle: int, dtype: str, rows: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return byte addresses of the 16-byte units of `rows` rows, without and with the swizzle, in
    the layout of operands in shared memory (cutex/device/atoms/mma.py).

    NOTE: the swizzle permutes bits of byte addresses; the DSL puts it on the pointer, so a composed
    layout must be recast to bytes before its offsets mean anything.
    """

    def body() -> tuple[list[list[int]], list[list[int]]]:
        from cutlass import cute

        from cutex.device.atoms.mma import slots_layout

        kind = _dtype(dtype)
        layout = slots_layout(kind, rows, swizzle * 8 // kind.width, 1, swizzle)
        plain = cute.recast_layout(8, kind.width, layout.outer)
        permuted = cute.make_composed_layout(layout.inner, 0, plain)
        units = range(0, swizzle, UNIT)
        return tuple(  # type: ignore[return-value]
            [[int(x((row, unit, 0))) for unit in units] for row in range(rows)]
            for x in (plain, permuted)
        )

    return traced("sm_90a", body)


def _dtype(name: str) -> Any:
    import cutlass

    return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[name]


def bank_conflict(addresses: Sequence[int]) -> int:
    """The number of turns of a warp's access to these 16-byte units, of which one turn serves
    eight."""
    groups = [address // UNIT % (BANKS * BANK_BYTES // UNIT) for address in addresses]
    return max(groups.count(group) for group in groups)


@dataclass(frozen=True)
class Mma:
    """One tensor core instruction, and the owners of its accumulator."""

    name: str
    shape: tuple[int, int, int]
    ctas: int
    threads: int
    corner: dict[tuple[int, int], list[tuple[int, int]]]  # owners of C, wgmma only
    lanes: list[int]  # tensor memory lane of each row of C, tcgen05 only
    columns: list[int]  # tensor memory column of each column of C


def mma(name: str, tile: tuple[int, int], dtype: str) -> Mma:
    """The instruction that the kernels of this arch use on a tile (rows, columns) of C."""
    if name not in MMAS:
        raise ValueError(f"mma {name!r} is not one of {', '.join(MMAS)}")
    m, n = tile
    rows = {"wgmma": 64, "tcgen05": 128, "tcgen05-pair": 256}[name]
    if m != rows:
        raise ValueError(f"--tile {m},{n}: one {name} instruction computes {rows} rows of C")
    if n % 16 or not 16 <= n <= 256:
        raise ValueError(f"--tile {m},{n}: one instruction takes 16 to 256 columns, in steps of 16")

    def body() -> Mma:
        from cutlass import cute

        from cutex.device.atoms.umma import Umma
        from cutex.device.atoms.wgmma import Wgmma

        if name == "wgmma":
            tiled = Wgmma(n, _dtype(dtype), warpgroups=m // 64).tiled()
            corner = owners(tiled.tv_layout_C, (m, n))
            lanes, columns = [], []
        else:
            pair = name == "tcgen05-pair"
            tiled = Umma(m, n, _dtype(dtype), pair=pair).tiled()
            acc = tiled.make_fragment_C(tiled.partition_shape_C((m, n)))
            layout, corner = acc.layout, {}
            per_cta = cute.size(layout, mode=[0, 0])
            lanes = [int(layout(((i, 0), 0, 0))) >> 16 for i in range(per_cta)]
            columns = [int(layout(((0, j), 0, 0))) & 0xFFFF for j in range(n)]
        shape = tuple(int(size) for size in tiled.shape_mnk)
        threads = int(cute.size(tiled.thr_id))
        ctas = threads if name != "wgmma" else 1
        return Mma(name, shape, ctas, threads, corner, lanes, columns)  # type: ignore[arg-type]

    return traced(MMAS[name], body)


@dataclass(frozen=True)
class Box:
    """The box that one TMA load of an operand's tile moves, and the layout that it is moved to."""

    rows: int
    elements: int  # elements of a row
    instructions: int  # TMA loads for the whole tile
    bytes: int
    smem: str


def tma(tile: tuple[int, int], swizzle: int, dtype: str) -> Box:
    rows, k = tile
    kind_bits = 16
    if k * kind_bits // 8 % swizzle:
        raise ValueError(
            f"--tile {rows},{k}: rows must be a multiple of the {swizzle}-byte swizzle"
        )
    if rows % 8 or not 8 <= rows <= 256:
        raise ValueError(f"--tile {rows},{k}: a box has 8 to 256 rows, in steps of 8")

    def body(mX: Any) -> Box:
        from cutlass import cute

        from cutex.device.atoms.mma import slots_layout
        from cutex.device.atoms.tma import load_operand

        info = load_operand(mX, slots_layout(_dtype(dtype), rows, k, 1, swizzle))
        moved = int(cute.size(info.atom.layout_dst_tv, mode=[1]))
        elements = moved // rows
        text = str(info.smem_layout)
        return Box(rows, elements, k // elements, moved * kind_bits // 8, text)

    return traced("sm_90a", body, _fake_matrix(dtype))


def _fake_matrix(dtype: str) -> Any:
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    shape = cute.sym_int(), cute.sym_int(divisibility=8)
    stride = cute.sym_int64(divisibility=8), 1
    return make_fake_tensor(_dtype(dtype), shape, stride, assumed_align=16)


def tmem_reads(tile: tuple[int, int], dtype: str) -> tuple[list[int], list[int], list[list[int]]]:
    """Return the lanes and columns of an accumulator, and for each load of the epilogue the lane
    that each of its threads reads."""
    m, n = tile

    def body() -> tuple[list[int], list[int], list[list[int]]]:
        from cutlass import cute

        from cutex.device.atoms import tmem
        from cutex.device.atoms.umma import Umma

        tiled = Umma(m, n, _dtype(dtype)).tiled()
        acc = tiled.make_fragment_C(tiled.partition_shape_C((m, n)))[(None, None), 0, 0]
        width = tmem.load_columns(n)
        part = cute.flat_divide(acc, (tmem.LANES, width))[None, None, 0, 0]
        load = tmem.make_load(part)
        tv = load.layout_dst_tv_tiled  # offsets count down the tiler's columns
        threads = int(cute.size(tv, mode=[0]))
        tiler = load.tiler_mn[0]  # the tile's rows in the order in which tv counts them
        rows = [int(tiler(int(tv((thread, 0))) % tmem.LANES)) for thread in range(threads)]
        layout = acc.layout
        lanes = [int(layout((i, 0))) >> 16 for i in range(m)]
        columns = [int(layout((0, j))) & 0xFFFF for j in range(n)]
        return lanes, columns, [rows for _ in range(n // width)]

    return traced("sm_100a", body)
