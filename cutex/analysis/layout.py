"""python -m cutex.layout: pictures of layouts and instructions, from the objects the kernels use.

layout   a CuTe layout: the offset of every coordinate
tv       a thread-value layout: the thread and value that own each element of a tile
swizzle  the shared memory layout of an operand, with the banks of its units
mma      the operands and the result of one tensor core instruction, and its accumulator's owners
tma      the box that one TMA instruction moves, and the addresses of its rows
tmem     tensor memory: the columns of an accumulator, and the lanes that each warp reads

Each picture is drawn from offsets that the DSL computes while it traces (cutex/analysis/traced.py);
no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cutex.analysis.traced import (
    BANK_BYTES,
    BANKS,
    MMAS,
    UNIT,
    bank_conflict,
    mma,
    offsets,
    parse_layout,
    smem_addresses,
    tma,
    tmem_reads,
    tv_owners,
)
from cutex.arch import arch
from cutex.command import Parser, answered
from cutex.svg import Canvas, alone
from cutex.whole_file import write_whole

# NOTE: pictures are narrow enough for their text to be read in a column of 500 px
CELL, LINE = 26.0, 12.0  # a cell's height, and that of a line of text
_MOST_ROWS = 1024  # rows of a swizzle's picture
DTYPES = ("bf16", "fp16")  # dtypes of the operands
PASTEL = ("#cfe0f7", "#f9dcc9", "#cdebd9", "#f3e2b3", "#e0d4f3", "#f6cfd9", "#cfeaea", "#e4e4d8")


@dataclass(frozen=True)
class Cell:
    """One square of a grid: its text, of one line or two, and the index of its pastel colour."""

    text: str
    tone: int


Grid = Sequence[Sequence[Cell]]


# ---- drawing


def draw_grid(title: str, grid: Grid, corner: str = "", cell: float = CELL) -> str:
    """Draw cells with their row and column numbers."""
    lines = [c.text.split("\n") for row in grid for c in row]
    wide = max(cell, 7.2 * max(len(line) for of_cell in lines for line in of_cell) + 6)
    high = cell + LINE * (max(map(len, lines)) - 1)
    left, top = 34.0, 58.0 if corner else 44.0
    width = max(left + wide * len(grid[0]) + 8, 14 + 8.0 * len(title))
    canvas = Canvas(width, top + high * len(grid) + 8, title)
    canvas.text(4, 14, title, "ink", 13, font_weight="600")
    canvas.text(4, 32, corner, size=11)
    _cells(canvas, left, top, wide, high, grid)
    return canvas.svg()


def _cells(canvas: Canvas, left: float, top: float, wide: float, high: float, grid: Grid) -> None:
    for j in range(len(grid[0])):
        canvas.text(left + wide * (j + 0.5), top - 6, str(j), size=10, text_anchor="middle")
    for i, row in enumerate(grid):
        canvas.text(left - 6, top + high * (i + 0.65), str(i), size=10, text_anchor="end")
        for j, c in enumerate(row):
            _square(canvas, left + wide * j, top + high * i, wide, high, c)


def _square(canvas: Canvas, x: float, y: float, w: float, h: float, cell: Cell) -> None:
    fill = PASTEL[cell.tone % len(PASTEL)]
    canvas.marks.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" '
        'stroke="#8a8a82" stroke-width=".5"/>'
    )
    lines = cell.text.split("\n") if cell.text else []
    first = y + h / 2 + 4 - LINE * (len(lines) - 1) / 2
    for i, line in enumerate(lines):  # dark on pastel in either theme
        canvas.marks.append(
            f'<text x="{x + w / 2:.1f}" y="{first + LINE * i:.1f}" fill="#1c1c1a" font-size="11" '
            f'text-anchor="middle">{line}</text>'
        )


def draw_layout(text: str, swizzle: tuple[int, int, int] | None = None) -> str:
    found = offsets(*parse_layout(text), swizzle)
    step = max(1, len(found[0]))
    name = f"S<{','.join(map(str, swizzle))}> o {text}" if swizzle else text
    grid = [[Cell(str(at), at // step) for at in row] for row in found]
    return draw_grid(name, grid)


def draw_tv(text: str, tile: tuple[int, int]) -> str:
    return _draw_owners(
        f"{text} on {tile[0]}x{tile[1]}", tv_owners(*parse_layout(text), tile), tile
    )


def _draw_owners(
    title: str, found: dict[tuple[int, int], list[tuple[int, int]]], tile: tuple[int, int]
) -> str:
    return draw_grid(title, _owner_grid(found, tile), "T thread, V value")


def _owner_grid(
    found: dict[tuple[int, int], list[tuple[int, int]]], tile: tuple[int, int]
) -> list[list[Cell]]:
    def cell(i: int, j: int) -> Cell:
        who = found.get((i, j))
        if not who:
            return Cell("", 7)
        thread, value = who[0]
        more = "+" if len(who) > 1 else ""
        return Cell(f"T{thread}\nV{value}{more}", thread)

    return [[cell(i, j) for j in range(tile[1])] for i in range(tile[0])]


def draw_swizzle(swizzle: int, dtype: str, rows: int = 8) -> str:
    """Draw two bank maps side by side: the same rows without and with the swizzle."""
    plain, permuted = smem_addresses(swizzle, dtype, rows)
    wide, high, left, top = 34.0, CELL, 34.0, 76.0
    units = len(plain[0])
    gap = max(left + wide * units + 14, 230)  # room for the text below
    canvas = Canvas(max(2 * gap, 560), top + high * rows + 44, f"{swizzle}-byte swizzle")
    name = f"{swizzle}-byte swizzle, {dtype}: banks of the 16-byte units of {rows} rows"
    canvas.text(4, 16, name, "ink", 13, font_weight="600")
    canvas.text(4, 34, "column: unit of a row; in each cell the first of its four banks", size=11)
    for k, (title, found) in enumerate((("rows as they are", plain), ("as stored", permuted))):
        x = left + gap * k
        canvas.text(x, 56, title, "ink", 12)
        grid = [
            [Cell(str(at // BANK_BYTES % BANKS), at // UNIT % 8) for at in row] for row in found
        ]
        _cells(canvas, x, top, wide, high, grid)
        turns = max(bank_conflict([row[u] for row in found[:8]]) for u in range(units))
        text = "no conflict" if turns == 1 else f"{turns} turns"
        canvas.text(x, top + high * rows + 18, f"8 rows of one unit: {text}", "ink", 12)
    return canvas.svg()


def draw_mma(name: str, tile: tuple[int, int], dtype: str) -> str:
    """Draw A on the left, B above, C between them; below, the owners of C's corner."""
    found = mma(name, tile, dtype)
    m, n, k = found.shape
    scale, deep = max(0.9, 230 / max(m, n)), 5.0
    wide = max(n * scale, 230)  # room for the labels
    left, top = 60 + k * deep, 70 + k * deep
    corner = (16, 16) if found.corner else (0, 0)
    cell_wide, cell_high = 38.0, CELL + LINE
    below = cell_high * corner[0] + 3 * CELL if found.corner else 40
    width = max(left + wide + 40, 34 + cell_wide * corner[1] + 20, 640)
    canvas = Canvas(width, top + m * scale + below + 20, name)
    who = f"{found.threads} threads" if name == "wgmma" else "one thread"
    pair = ", for a pair of CTAs" if found.ctas > 1 else ""
    title = f"{name} {m}x{n}x{k}, {dtype}: {2 * m * n * k} FLOP, started by {who}{pair}"
    canvas.text(4, 16, title, "ink", 13, font_weight="600")
    canvas.rect(left - 8 - k * deep, top, k * deep, m * scale, 1, fill_opacity=".25")
    canvas.text(left - 10 - k * deep, top - 6, f"A {m}x{k}, smem", "ink", 12)
    canvas.rect(left, top - 22 - k * deep, wide, k * deep, 2, fill_opacity=".25")
    canvas.text(left + 4, top - 6 - k * deep, f"B {n}x{k}, smem", "ink", 12)
    for cta in range(found.ctas if found.ctas > 1 else 0):
        at = left + wide * cta / found.ctas
        canvas.line(at, top - 22 - k * deep, at, top - 22, "soft", stroke_dasharray="3 3")
        canvas.text(at + 4, top - 28, f"in CTA {cta}", size=11)
    canvas.rect(left, top, wide, m * scale, 0, fill_opacity=".25")
    where = "registers" if found.corner else "tensor memory"
    canvas.text(left + 4, top + 16, f"C {m}x{n}, fp32, {where}", "ink", 12)
    parts = 4 if found.corner else found.ctas
    for part in range(parts):
        y = top + m * scale * part / parts
        canvas.line(left, y, left + wide, y, "soft", stroke_dasharray="3 3")
        owner = f"warp {part}" if found.corner else f"CTA {part}: lanes 0-{max(found.lanes)}"
        canvas.text(left + wide - 4, y + m * scale / parts - 4, owner, size=11, text_anchor="end")
    y = top + m * scale + 26
    if found.corner:
        canvas.text(4, y, "who holds the first 16x16 of C: T thread, V value", size=11)
        _cells(canvas, 34, y + 22, cell_wide, cell_high, _owner_grid(found.corner, corner))
    else:
        text = f"row r of each CTA in lane r, column c in column c: {max(found.columns) + 1} in all"
        canvas.text(4, y, text, size=11)
    return canvas.svg()


def draw_tma(tile: tuple[int, int], swizzle: int, dtype: str) -> str:
    box = tma(tile, swizzle, dtype)
    _, permuted = smem_addresses(swizzle, dtype, 8)
    rows, k = tile
    canvas = Canvas(620, 264, "TMA box")
    title = f"TMA load of a {rows}x{k} tile, {dtype}, {swizzle}-byte swizzle"
    canvas.text(4, 16, title, "ink", 13, font_weight="600")
    many = "s" if box.instructions > 1 else ""
    text = f"{box.instructions} instruction{many} of {box.rows}x{box.elements}"
    canvas.text(4, 34, f"{text}, {box.bytes} bytes each", size=11)
    high, wide = 150.0, 200.0 / box.instructions
    for i in range(box.instructions):
        canvas.rect(70 + wide * i, 60, wide - 3, high, i, fill_opacity=".3")
        canvas.text(74 + wide * i, 76, f"box {i}" if wide > 40 else str(i), "ink", 11)
    canvas.text(70, 226, f"{k} elements of K, {2 * k} bytes", size=11)
    canvas.text(4, 136, f"{rows} rows", size=11)
    canvas.path([(285, 135), (330, 135)], "soft", stroke_width="1.5")
    canvas.path([(323, 130), (330, 135), (323, 140)], "soft", stroke_width="1.5")
    for i in range(8):
        canvas.rect(345, 62 + 18 * i, 260, 15, i, fill_opacity=".3")
        first = permuted[i][0] % swizzle // UNIT
        words = f"row {i}: {swizzle} bytes, unit u at u ^ {first}"
        canvas.text(350, 73 + 18 * i, words, "ink", 10.5)
    canvas.text(345, 226, f"{swizzle * 8} bytes: the pattern's period", size=11)
    canvas.text(4, 250, f"smem layout {box.smem}", size=11)
    return canvas.svg()


def draw_tmem(tile: tuple[int, int], dtype: str) -> str:
    """Draw 128 lanes by 512 columns: the accumulator, each warp's quarter of the lanes, the
    loads."""
    columns_here = arch("sm_100a").tmem_columns
    m, n = tile
    if m != 128 or n % 16 or not 16 <= n <= 256:
        raise ValueError(
            f"--tile {m},{n}: an accumulator has 128 rows, and 16 to 256 columns by 16"
        )
    lanes, columns, loads = tmem_reads(tile, dtype)
    scale, high, left, top = 1.2, 220.0, 64.0, 64.0
    canvas = Canvas(left + columns_here * scale + 20, top + high + 40, "tensor memory")
    many = "s" if len(loads) > 1 else ""
    each = n // len(loads)
    title = f"tensor memory: a {m}x{n} accumulator, {len(loads)} load{many} of {each} columns"
    canvas.text(4, 16, title, "ink", 13, font_weight="600")
    whole = f"128 lanes x {columns_here} columns of 32 bits; lanes {lanes[0]}-{lanes[-1]}, "
    canvas.text(4, 34, f"{whole}columns {columns[0]}-{columns[-1]} are taken", size=11)
    canvas.rect(left, top, columns_here * scale, high, "grid")
    step = n // len(loads)
    for i, threads in enumerate(loads):
        for warp in range(4):
            mine = threads[32 * warp : 32 * warp + 32]
            y = top + high * min(mine) / 128
            x = left + scale * columns[i * step]
            h = high * (max(mine) - min(mine) + 1) / 128
            canvas.rect(x, y, scale * step - 2, h - 2, warp, fill_opacity=".35")
            if scale * step > 60:
                canvas.text(x + 4, y + 16, f"warp {warp}", "ink", 11)
    for warp in range(4):
        canvas.text(4, top + high * (warp + 0.55) / 4, f"{32 * warp}-{32 * warp + 31}", size=11)
    for column in range(0, columns_here + 1, 64):
        x = left + scale * column
        canvas.text(x, top + high + 16, str(column), size=10.5, text_anchor="middle")
    canvas.text(left, top + high + 32, "column", size=11)
    return canvas.svg()


# ---- the command


def parser() -> Parser:
    p = Parser(prog="python -m cutex.layout", description="Draw layouts and instructions as SVG.")
    common = Parser(add_help=False)
    common.add_argument("--out", metavar="FILE", help="default: KIND.svg; - prints it")
    common.add_argument("--dtype", default="bf16", choices=DTYPES)
    sub = p.add_subparsers(dest="kind", required=True, metavar="layout|tv|swizzle|mma|tma|tmem")
    one = sub.add_parser("layout", parents=[common], help="offsets of a CuTe layout")
    one.add_argument("layout", help='as "(4,8):(8,1)"')
    one.add_argument("--swizzle", metavar="B,M,S", help="composed with a swizzle of offsets")
    one = sub.add_parser("tv", parents=[common], help="who holds what of a tile")
    one.add_argument("layout", help='threads and values, as "((4,8),(2,2)):((32,1),(16,8))"')
    one.add_argument("--tile", default="16,8", metavar="M,N")
    one = sub.add_parser("swizzle", parents=[common], help="bank map of an operand in smem")
    one.add_argument("bytes", type=int, choices=(16, 32, 64, 128))
    one.add_argument("--rows", type=int, default=8)
    one = sub.add_parser("mma", parents=[common], help="a tensor core instruction")
    one.add_argument("name", choices=MMAS)
    one.add_argument("--tile", metavar="M,N", help="default: its rows, 64 columns")
    one = sub.add_parser("tma", parents=[common], help="the box of a TMA load")
    one.add_argument("--tile", default="128,64", metavar="ROWS,K")
    one.add_argument("--swizzle", type=int, default=128, choices=(32, 64, 128))
    one = sub.add_parser("tmem", parents=[common], help="an accumulator in tensor memory")
    one.add_argument("--tile", default="128,256", metavar="M,N")
    return p


def _numbers(option: str, text: str, count: int) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if len(found) != count or min(found) < 0:
        raise ValueError(f"{option} {text}: {count} whole numbers are needed")
    return found


def draw(args: argparse.Namespace) -> str:
    """Return the picture that the command line names. Raises ValueError, with one sentence, for bad
    input."""

    def tile() -> tuple[int, int]:
        m, n = _numbers("--tile", args.tile, 2)
        return m, n

    match args.kind:
        case "layout":
            swizzle = _numbers("--swizzle", args.swizzle, 3) if args.swizzle else None
            return draw_layout(args.layout, swizzle)  # type: ignore[arg-type]
        case "tv":
            return draw_tv(args.layout, tile())
        case "swizzle":
            if not 8 <= args.rows <= _MOST_ROWS or args.rows % 8:
                raise ValueError(f"--rows {args.rows}: a multiple of 8 up to {_MOST_ROWS}")
            return draw_swizzle(args.bytes, args.dtype, args.rows)
        case "mma":
            rows = {"wgmma": 64, "tcgen05": 128, "tcgen05-pair": 256}[args.name]
            args.tile = args.tile or f"{rows},64"
            return draw_mma(args.name, tile(), args.dtype)
        case "tma":
            return draw_tma(tile(), args.swizzle, args.dtype)
        case _:
            return draw_tmem(tile(), args.dtype)


@answered
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        picture = alone(draw(args))
    except ValueError as error:
        print(f"cutex: {error}", file=sys.stderr)
        return 2
    if args.out == "-":
        print(picture, end="")
        return 0
    path = Path(f"{args.kind}.svg" if args.out is None else args.out)
    write_whole(path, picture)
    print(f"wrote {path}")
    return 0
