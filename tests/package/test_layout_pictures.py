from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from cutex.analysis.layout import main
from cutex.analysis.traced import MMAS, bank_conflict, mma, offsets, smem_addresses, tma, tmem_reads

ROOT = Path(__file__).resolve().parents[2]


def test_the_offsets_are_those_of_the_layout():
    assert offsets((4, 8), (8, 1), None) == [[8 * i + j for j in range(8)] for i in range(4)]
    assert offsets(6, 2, None) == [[0, 2, 4, 6, 8, 10]]
    hierarchical = offsets(((2, 4), (4, 2)), ((4, 8), (1, 32)), None)
    assert hierarchical[1] == [4, 5, 6, 7, 36, 37, 38, 39]


def test_a_swizzle_permutes_each_row():
    swizzled = offsets((8, 8), (8, 1), (3, 0, 3))
    assert swizzled == [[8 * i + (j ^ i) for j in range(8)] for i in range(8)]


@pytest.mark.parametrize(("swizzle", "turns"), [(16, 1), (32, 2), (64, 4), (128, 8)])
def test_the_swizzle_of_operands_takes_all_bank_conflicts_away(swizzle, turns):
    plain, permuted = smem_addresses(swizzle, "bf16", rows=8)
    for unit in range(swizzle // 16):
        assert bank_conflict([row[unit] for row in plain]) == turns
        assert bank_conflict([row[unit] for row in permuted]) == 1
    for row in range(8):  # a permutation within each row
        assert sorted(permuted[row]) == plain[row]


def test_wgmma_spreads_a_row_over_four_threads():
    """PTX ISA, "Register Fragments for wgmma.mma_async": D of m64nNk16."""
    found = mma("wgmma", (64, 32), "bf16")
    assert (found.shape, found.threads) == ((64, 32, 16), 128)
    for (row, column), owners in found.corner.items():
        thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
        value = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
        assert owners == [(thread, value)]
    assert len(found.corner) == 64 * 32


def test_tcgen05_keeps_rows_in_lanes_and_columns_in_columns():
    one = mma("tcgen05", (128, 256), "bf16")
    assert (one.shape, one.ctas) == ((128, 256, 16), 1)
    assert (one.lanes, one.columns) == (list(range(128)), list(range(256)))
    pair = mma("tcgen05-pair", (256, 128), "fp16")
    assert (pair.shape, pair.ctas) == ((256, 128, 16), 2)
    assert pair.lanes == list(range(128))


def test_a_box_is_as_wide_as_its_swizzle():
    box = tma((128, 64), 128, "bf16")
    assert (box.rows, box.elements, box.instructions, box.bytes) == (128, 64, 1, 16384)
    assert tma((128, 64), 64, "bf16").instructions == 2
    assert tma((256, 128), 128, "bf16").instructions == 2


def test_each_warp_reads_its_own_quarter_of_tensor_memory():
    lanes, columns, loads = tmem_reads((128, 256), "bf16")
    assert (lanes[-1], columns[-1], len(loads)) == (127, 255, 4)
    for threads in loads:
        assert threads == list(range(128))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "argv",
    [
        ["layout", "(4,8):(8,1)"],
        ["layout", "(8,8):(8,1)", "--swizzle", "3,0,3"],
        ["tv", "((4,8),(2,2)):((32,1),(16,8))", "--tile", "16,8"],
        ["swizzle", "128"],
        ["mma", "wgmma"],
        ["mma", "tcgen05-pair", "--tile", "256,256"],
        ["tma", "--tile", "128,128"],
        ["tmem"],
    ],
    ids=" ".join,
)
def test_each_picture_is_a_file_that_stands_alone(argv, tmp_path):
    path = tmp_path / "picture.svg"
    assert main([*argv, "--out", str(path)]) == 0
    root = ElementTree.fromstring(path.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter())) > 12
    right = float(root.get("width"))
    for mark in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(mark.get("x")) + float(mark.get("width")) <= right


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["layout", "(4,8)"], "a layout is shape:stride"),
        (["layout", "(4,8):(8)"], "nested alike"),
        (["layout", f"(4,8):(8,{10**23})"], "takes numbers up to 281474976710656"),
        (["layout", f"4:-{10**23}"], "takes numbers up to 281474976710656"),
        (["layout", "(4,-8):(8,1)"], "whole numbers"),
        (["layout", "(__import__('os'),1):(1,1)"], "a layout is shape:stride"),
        (["layout", "(400,800):(8,1)"], "cannot be read"),
        (["tv", "(4,8):(8,1)", "--tile", "4"], "--tile 4: 2 whole numbers"),
        (["tv", "(4,8):(8,100)", "--tile", "4,8"], "outside of a tile"),
        (["mma", "wgmma", "--tile", "128,64"], "computes 64 rows"),
        (["mma", "tcgen05", "--tile", "128,300"], "16 to 256 columns"),
        (["tma", "--tile", "128,24"], "a multiple of the 128-byte swizzle"),
        (["swizzle", "128", "--rows", "3"], "a multiple of 8"),
        (["tmem", "--tile", "64,64"], "128 rows"),
    ],
)
def test_bad_input_is_answered_with_one_sentence(argv, says, capsys):
    assert main(argv) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("cutex: ")
    assert says in sentence


def test_the_picture_can_be_printed(capsys):
    assert main(["layout", "(2,2):(2,1)", "--out", "-"]) == 0
    assert capsys.readouterr().out.startswith("<svg ")
    assert MMAS.keys() == {"wgmma", "tcgen05", "tcgen05-pair"}


def boxes(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Each text of a picture with its approximate box: left, top, right, bottom."""
    found = []
    for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        words, size = "".join(text.itertext()), float(text.get("font-size", 12))
        wide, x, y = 0.5 * size * len(words), float(text.get("x")), float(text.get("y"))
        left = x - wide * {"middle": 0.5, "end": 1.0}.get(text.get("text-anchor", ""), 0.0)
        found.append((words, left, y - 0.7 * size, left + wide, y))
    return found


PICTURES = [
    "mma wgmma --tile 64,128", "mma wgmma --tile 64,16", "mma tcgen05-pair", "mma tcgen05",
    "mma tcgen05 --tile 128,256", "swizzle 16", "swizzle 32", "swizzle 64", "swizzle 128", "tma",
    "tmem", "tmem --tile 128,32",
]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("command", PICTURES)
def test_no_label_lies_over_another_or_leaves_the_picture(command, capsys):
    assert main([*command.split(), "--out", "-"]) == 0
    svg = capsys.readouterr().out
    width, height = map(float, ElementTree.fromstring(svg).get("viewBox").split()[2:])
    texts = boxes(svg)
    for i, (words, left, top, right, bottom) in enumerate(texts):
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, words
        for other, l2, t2, r2, b2 in texts[:i]:
            apart = right <= l2 or r2 <= left or bottom <= t2 or b2 <= top
            assert apart, f"{words!r} lies over {other!r}"


@pytest.mark.parametrize("rows", ["0", "12", "100000000"])
def test_a_swizzle_of_too_many_rows_is_refused_at_once(rows, capsys):
    assert main(["swizzle", "128", "--rows", rows]) == 2
    assert f"--rows {rows}: a multiple of 8 up to 1024" in capsys.readouterr().err


@pytest.mark.sweep(3)
@pytest.mark.parametrize("file", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda file: file.stem)
def test_the_text_of_a_page_s_picture_can_be_read_in_a_column_of_500_px(file):
    picture = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    texts = picture.iter("{http://www.w3.org/2000/svg}text")
    smallest = min(float(text.get("font-size", 12)) for text in texts)
    assert smallest * min(1.0, 500 / float(picture.get("width"))) >= 7.5
