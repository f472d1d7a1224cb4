"""Norms of rows in every form: by smem, dense, by words, by bulk copies; faults are found."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from cutlass import Int32, cute
from row_calls import DTYPES, ORDERS, launched, near, rows

import cutex
from cutex.arch import arch
from cutex.compile import compile
from cutex.device.row import relayed
from cutex.device.row.bulk import BulkRing, Run
from cutex.device.row.tile import RowTile
from cutex.device.row.words import Words
from cutex.dtypes import of_torch
from cutex.kernels.row import choose, choose_norm
from cutex.kernels.row.norm_bulk import BulkConfig, NormBulk
from cutex.kernels.row.norm_by_tickets import NormByTickets, TicketsConfig
from cutex.kernels.row.norm_dense import DenseConfig, NormDense
from cutex.kernels.row.softmax import Softmax
from cutex.ops.row import launches
from cutex.ops.row.launches import bulk_groups
from cutex.ops.row.norm import NORM
from cutex.ops.row.rows import arch_of
from cutex.sim import simulate
from cutex.sim.errors import SimError


@pytest.fixture
def none_in_turn(monkeypatch, none_are_few):
    """As if few rows were many, and none were taken in turn."""
    monkeypatch.setattr(choose, "BULK_LEAST", 0)
    monkeypatch.setattr(choose_norm, "resident", lambda *_, **__: None)


@pytest.mark.parametrize("centred", [False, True], ids=["rms norm", "layer norm"])
@pytest.mark.parametrize("saves", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_long_rows_of_a_norm_come_by_smem(device, asked, none_in_turn, saves, centred):
    whole = torch.full((3, 47_728), torch.nan, dtype=torch.bfloat16, device=device)
    x = whole[1:2, :47_720].copy_(rows(device, (1, 47_720), torch.bfloat16))
    if centred:  # far from 0, and the parts of the row, which meet, differ
        x[:, :20_000] += 64
    w = rows(device, (47_720,), torch.float32, seed=1)
    wide = x.double()
    mean = wide.mean(-1) if centred else torch.zeros(1, dtype=torch.float64, device=device)
    apart = wide - mean
    rstd = (apart.square().mean(-1) + 1e-6).rsqrt()
    if saves:
        found, _, mean_kept, kept = NORM(x, w, None, None, 1e-6, centred)
        near(kept, rstd, torch.float32, 4)
        if centred:
            near(mean_kept, mean, torch.float32, 4)
    else:
        found = (cutex.layer_norm if centred else cutex.rms_norm)(x, w, eps=1e-6)
    near(found, apart * rstd[:, None] * w.double(), torch.bfloat16, 8)
    assert [kind.__name__ for kind, *_ in asked] == ["NormStaged"]


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    "n, dtype, ctas",
    [(n, torch.float16, 1) for n in (5520, 2056, 4104, 10_240, 20_472)]  # three tiles of one CTA
    + [(n, torch.float32, 1) for n in (2184, 5520, 10_240, 16_384)]
    + [(20_000, torch.float32, 4), (28_672, torch.float32, 4)],
)
def test_a_layer_norm_of_whole_vectors_comes_by_smem(device, asked, none_in_turn, n, dtype, ctas):
    x = rows(device, (3, n), dtype, scale=4.0)
    x[1, : n // 3] += 64  # the parts of the row, which meet, differ
    x[2, n // 2] = 6e4
    w, b = (rows(device, (n,), torch.float16, seed=seed) for seed in (1, 2))
    y = cutex.layer_norm(x, w, b, eps=1e-5)
    want = F.layer_norm(x.double(), (n,), w.double(), b.double(), 1e-5)
    if dtype == torch.float32:
        near(y, want, dtype, 8)
    else:
        bound = 2**-11 * (2 * want.abs() + b.double().abs())  # y and what b is added to, rounded
        assert ((y.double() - want).abs() <= bound + 2**-14).all()
    ((kind, config, *_),) = asked
    assert kind.__name__ == "NormStaged" and config.tile.ctas == ctas


@pytest.mark.parametrize("n", [4096, 5520, 20_000])
@pytest.mark.usefixtures("none_are_few")
def test_rows_by_half_a_vector_come_to_registers(device, monkeypatch, n):
    """Of bf16 whose rows begin in the middle of 16 bytes, by smem they would be half as wide."""
    whole = torch.zeros(2 * n + 8, dtype=torch.bfloat16, device=device)
    made = []

    def run(launch, kernel, *_):
        made.append(kernel)
        return lambda *_: None

    monkeypatch.setattr(launches.Launch, "run", run)
    cutex.layer_norm(whole[4 : 4 + 2 * n].view(2, n))
    ((kind, config, _),) = made
    assert not config.by_smem and kind.__name__ != "NormStaged"


@pytest.mark.sweep(12)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("n, centred", [(137, True), (1023, False), (1023, True)])
@pytest.mark.usefixtures("none_are_few")
def test_columns_of_rows_that_begin_anywhere_go_round_the_threads(device, asked, n, saves, centred):
    # rows beside others, a first and a last one in the middle of a vector, NaN around them; every
    # third row is NaN, which stays there though vectors lie across two rows
    whole = torch.full((23 * n + 16,), torch.nan, dtype=torch.bfloat16, device=device)
    x = whole[8 : 8 + 23 * n].view(23, n).copy_(rows(device, (23, n), torch.bfloat16))
    x[1, : n // 3] += 64  # the parts of the row, which meet, differ
    x[2::3] = torch.nan
    w, b = (rows(device, (n + 1,), torch.bfloat16, seed=seed)[1:] for seed in (1, 2))
    bias = b if centred else None
    if saves:
        y, _, mean, rstd = NORM(x, w, bias, None, 1e-5, centred)
    elif centred:
        y = cutex.layer_norm(x, w, b, eps=1e-5)
    else:
        y = cutex.rms_norm(x, w, eps=1e-5)
    wide = x.double()
    apart = wide - wide.mean(-1, keepdim=True) if centred else wide
    inverse = (apart.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = apart * inverse * w.double() + (b.double() if centred else 0)
    right = [i for i in range(23) if i % 3 != 2]
    near(y[right], want[right], torch.bfloat16, 8)
    assert y[2::3].isnan().all()
    if saves:
        near(rstd[right], inverse[right, 0], torch.float32, 4)
        near(mean[right], wide.mean(-1)[right], torch.float32, 4) if centred else None
    ((kind, *_),) = asked
    assert kind.__name__ == "NormByElement"


@pytest.mark.sweep(128)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "n, centred", [(33, True), (137, False), (137, True), (250, True), (3, True)]
)
@pytest.mark.parametrize("m", [203, 64])
@pytest.mark.usefixtures("none_are_few")
def test_norms_of_dense_rows(device, asked, monkeypatch, n, centred, dtype, saves, m):
    # rows that begin in the middle of a vector or of a word, with NaN around them; every third
    # row is NaN, which stays there though words lie in two rows
    monkeypatch.setattr(choose_norm.dense, "__defaults__", (0,))
    whole = torch.full((m * n + 16,), torch.nan, dtype=dtype, device=device)
    x = whole[8 : 8 + m * n].view(m, n).copy_(rows(device, (m, n), dtype))
    x[1, : n // 3] += 64  # the parts of the row, which meet, differ
    x[2::3] = torch.nan
    w, b = (rows(device, (n + 1,), torch.bfloat16, seed=seed)[1:] for seed in (1, 2))
    if saves:
        y, _, mean, rstd = NORM(x, w, b if centred else None, None, 1e-5, centred)
    else:
        y = cutex.layer_norm(x, w, b, eps=1e-5) if centred else cutex.rms_norm(x, w, eps=1e-5)
    wide = x.double()
    apart = wide - wide.mean(-1, keepdim=True) if centred else wide
    inverse = (apart.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = apart * inverse * w.double() + (b.double() if centred else 0)
    right = [i for i in range(m) if i % 3 != 2]
    near(y[right], want[right], dtype, 8)
    assert y[2::3].isnan().all()
    if saves:
        near(rstd[right], inverse[right, 0], torch.float32, 4)
        near(mean[right], wide.mean(-1)[right], torch.float32, 4) if centred else None
    ((kind, *_),) = asked
    assert kind.__name__ == "NormDense"


BULK = {  # rows, threads, CTAs; columns; by vectors
    "four rows of a warp each": ((4, 32, 1), 137, False),
    "rows of half a warp": ((8, 16, 1), 75, False),
    "a row of two warps": ((1, 64, 1), 301, False),
    "parts of a row": ((1, 64, 4), 785, False),
    "parts that begin in either half of a word": ((1, 64, 4), 787, False, True),
    "whole vectors": ((2, 32, 1), 144, False),
    "a row by vectors": ((1, 64, 1), 744, True),
    "parts by vectors": ((1, 64, 4), 3960, True),
    "parts of whole vectors": ((1, 64, 2), 1024, True),
}


def words_of(n, tile, by_vectors, ahead=2):
    """The words of a thread of a BulkConfig, and its stages."""
    stages = {"stages": 2 + ahead * (tile.ctas > 1), "ahead": ahead * (tile.ctas > 1)}
    if not by_vectors:
        return {"words": choose.words_of(n, tile), **stages}
    words, vector, last = choose.vectors_of(n, tile)
    return {"words": words, "vector": vector, "open": last, **stages}


@pytest.mark.sweep(240)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms norm", "layer norm"])
@pytest.mark.parametrize("how", BULK.values(), ids=BULK)
@pytest.mark.parametrize("m, ahead", [(37, 1), (37, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.parametrize("tickets", [False, True], ids=["shares", "tickets"])
def test_norms_by_bulk_copies(device, how, m, ahead, apart, centred, dtype, tickets):
    # fewer CTAs than rows, slots that come round again, a first and a last row in the middle of 16
    # bytes, NaN around them; every third row is NaN, which stays there though words lie in two rows
    tile, n = RowTile(*how[0], 1, 16 // dtype.itemsize, False), how[1]
    if (how[2] and apart) or (ahead == 2 and (tile.ctas == 1 or not centred)):
        pytest.skip("vectors begin at a multiple of their size, only layer norms' clusters relay")
    if tickets and len(how) > 3:
        pytest.skip("rows by tickets begin alike")
    config = (TicketsConfig if tickets else BulkConfig)(
        tile, centred, weight="bf16", bias="bf16" * centred, saves=True, halves=len(how) > 3,
        **words_of(n, tile, how[2], ahead),
    )  # fmt: skip
    x, y = (
        torch.full((m * n + 32,), torch.nan, dtype=dtype, device=device)[first + apart :][: m * n]
        for first in (8, 16)  # of a line, in which they begin differently
    )
    x, y = (z.view(m, n) for z in (x, y))
    x.copy_(rows(device, (m, n), dtype))
    x[1, : n // 3] += 64  # the parts of the row, which meet, differ
    x[2::3] = torch.nan
    first = 8 if how[2] else 1
    w, b = (rows(device, (n + first,), torch.bfloat16, seed=seed)[first:] for seed in (1, 2))
    mean, rstd = torch.full((2, m), torch.nan, device=device)
    optional = (w, b, mean, rstd) if centred else (w, rstd)
    drawn = torch.zeros(2, dtype=torch.int32, device=device)
    optional += (drawn,) * tickets
    kernel = compile(
        (NormByTickets if tickets else NormBulk)(config),
        of_torch(dtype).name,
        "sm_90a" if device == "cpu" else arch_of(x.device, "a norm"),
    )
    launched(kernel, device, x, y, *optional, 1e-5, 3 if how[2] or config.halves else 4)
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    inverse = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = wide * inverse * w.double() + (b.double() if centred else 0)
    right = [i for i in range(m) if i % 3 != 2]
    near(y[right], want[right], dtype, 8)
    near(rstd[right], inverse[right, 0], torch.float32, 4)
    if centred:
        near(mean[right], x.double().mean(-1)[right], torch.float32, 4)
    assert y[2::3].isnan().all()
    whole = y.as_strided((m * n + 32,), (1,), 0)
    assert whole[: 16 + apart].isnan().all() and whole[16 + apart + m * n :].isnan().all()
    assert not drawn.any()


@pytest.mark.sweep(20)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    "n, centred, kind",
    [
        (33_001, True, "NormBulk"),
        (1203, False, "NormByTickets"),
        (296, True, "NormByTickets"),
        (1601, True, "NormByTickets"),
        (6501, False, "NormByTickets"),
    ],
)
@pytest.mark.usefixtures("none_are_few")
def test_rows_come_by_bulk_copies(device, asked, monkeypatch, n, centred, kind, saves):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies begin with sm_90")
    monkeypatch.setattr(choose_norm.bulk, "__defaults__", (0,))
    x = rows(device, (5, n), torch.bfloat16)
    w, b = (rows(device, (n,), torch.float32, seed=seed) for seed in (1, 2))
    if saves:
        y, _, _, rstd = NORM(x, w, b if centred else None, None, 1e-5, centred)
    else:
        y = cutex.layer_norm(x, w, b, eps=1e-5) if centred else cutex.rms_norm(x, w, eps=1e-5)
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    inverse = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    near(y, wide * inverse * w.double() + (b.double() if centred else 0), torch.bfloat16, 8)
    if saves:
        near(rstd, inverse[:, 0], torch.float32, 4)
    assert {how.__name__ for how, *_ in asked} == {kind}


def test_rows_of_a_group_begin_alike(monkeypatch):
    # 15 clusters run at one time; an odd number of them only where rows are whole words
    monkeypatch.setattr(launches, "clusters_at_once", lambda *_: 15)
    config = BulkConfig(RowTile(1, 64, 2, 1, 8, False), True, words=16, stages=5, ahead=2)
    sizes = {(n, dtype): bulk_groups(NormBulk, config, torch.empty(40, n, dtype=dtype), "sm_90a")
             for n in (2000, 2001, 2002) for dtype in (torch.bfloat16, torch.float32)}  # fmt: skip
    assert {key for key, groups in sizes.items() if groups != 15} == {(2001, torch.bfloat16)}
    assert sizes[2001, torch.bfloat16] == 14


@pytest.mark.parametrize("at_once, right", [(0, False), (7, True), (None, True)])
def test_large_clusters_only_where_a_gpu_has_room(monkeypatch, at_once, right):
    monkeypatch.setattr(launches, "kernel_for", lambda *_: None)
    monkeypatch.setattr(launches, "clusters_at_once", lambda *_: at_once)
    x, tiles = torch.empty(4, 64), [RowTile(1, 64, ctas, 1, 4) for ctas in (8, 16)]
    assert [launches.runs(Softmax, tile, x, "sm_90a") for tile in tiles] == [True, right]


def test_every_tile_by_bulk_copies_holds_its_rows():
    smem = arch("sm_90a").smem_per_cta
    for n in range(100, 262_145, 311):
        for width, centred in ((8, True), (8, False), (4, True)):
            other = choose.tile(n, 128 // width, "sm_90a", width, n % width > 0)
            found = choose_norm.bulk(1 << 22, n, other, centred, "sm_90a")
            if found is None:
                continue
            tile, per = found.tile, width // 4
            assert tile.why_not() is None and (tile.rows == 1 or tile.rows % 2 == 0)
            part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
            last, open_words = n - part * (tile.ctas - 1), 1 + (tile.ctas > 1)
            assert found.words * per * tile.threads >= part + (per - 1) * (not other.aligned)
            if found.vector:
                open_words = found.open * found.vector
                assert other.aligned and tile.rows == 1 and found.words % found.vector == 0
            assert (found.words - open_words) * per * tile.threads <= last  # but these are whole
            slot = tile.num_threads * found.words * 4 + 32
            assert found.stages * found.resident * slot <= smem - choose.BULK_SPARE


FAULTS = {
    "none": None,
    "words from the row's beginning": (Words, "column", lambda w, i: w.number(i) * w.per),
    "a column too many": (Words, "is_whole", lambda w, i: w.column(i) >= 0),
    "an edge taken whole": (Words, "is_edge", lambda w, i: i == 0),
    "stored before all are done": (cute.arch, "sync_threads", lambda: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_dense_rows_is_found(fault, monkeypatch):
    n, tile = 75, RowTile(32, 4, 1, 10, 8, False)
    if fault is not None:
        monkeypatch.setattr(*fault)
    config = DenseConfig(tile, True, words=10, turns=4)
    kernel = compile(NormDense(config), "bf16", "sm_90a", cache=False)
    x, y = rows("cpu", (70, n), torch.bfloat16), torch.full((70, n), torch.nan).bfloat16()
    try:
        assert not simulate(kernel, x, y, 1e-5).findings
        near(y, F.layer_norm(x.double(), (n,), eps=1e-5), torch.bfloat16, 8)
        found = False
    except (AssertionError, SimError):
        found = True
    assert found == (fault is not None)


BULK_FAULTS = {
    "none": None,
    "rows not waited for": (BulkRing, "wait", lambda *_: None),
    "stored before all are done": (cute.arch, "sync_threads", lambda: None),
    "the async proxy is not told": (cute.arch, "fence_view_async_shared", lambda: None),
    "a slot filled before it is read": (cute.arch, "cp_async_bulk_wait_group", lambda *_, **__: 0),
    "ends stored that others share": (Run, "inner", lambda r: (r.lead & -8, (r.end + 7) & -8)),
    "elements of other rows counted": (Words, "mask", lambda *_: Int32(-1)),
    "kept where a warp still relays": (relayed, "KEPT", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("fifo", 0), *ORDERS, ("eager", 0)])
@pytest.mark.parametrize("fault", BULK_FAULTS.values(), ids=BULK_FAULTS)
@pytest.mark.parametrize(
    "how, n, by_vectors",
    [((4, 32, 1), 75, False), ((1, 64, 2), 301, False), ((1, 64, 2), 1016, True)],
    ids=["rows", "parts", "vectors"],
)
def test_a_fault_of_bulk_copies_is_found(how, n, by_vectors, fault, order, seed, monkeypatch):
    if fault is not None and order != "fifo":
        pytest.skip("a fault is found in the default order")
    tile = RowTile(*how, 1, 8, False)
    if fault is not None and fault[0] is Words and tile.rows > 1:
        pytest.skip("rows that share words are read by the element at their ends")
    if fault is not None and by_vectors and fault[0] in (Run, Words):
        pytest.skip("vectors have no ends")
    if fault is not None and fault[0] is relayed and tile.ctas == 1:
        pytest.skip("only clusters relay")
    if fault is not None:
        monkeypatch.setattr(*fault)
    config = BulkConfig(tile, True, **words_of(n, tile, by_vectors))
    kernel = compile(NormBulk(config), "bf16", "sm_90a", cache=False)
    x, y = rows("cpu", (43, n), torch.bfloat16), torch.full((43, n), torch.nan).bfloat16()
    x[::3] += 200
    try:
        assert not simulate(kernel, x, y, 1e-5, 2, order=order, seed=seed).findings
        near(y, F.layer_norm(x.double(), (n,), eps=1e-5), torch.bfloat16, 8)
        found = False
    except (AssertionError, SimError):
        found = True
    assert found == (fault is not None)


@pytest.mark.parametrize("wide", [choose.WIDE, choose.NORM_WIDE])
def test_every_tile_of_short_rows_is_one(wide):
    for n in [*range(1, 300), *range(300, 3000, 37)]:
        for unit in (1, 2, 4, 8):
            found = choose.tile(
                n, 16, "sm_90a", unit, n % unit > 0, wide,
                choose.LEAST_THREADS, in_warp=choose.IN_WARP,
            )  # fmt: skip
            assert found.why_not() is None and found.columns >= n


def test_every_tile_of_dense_rows_holds_them():
    for n in range(1, 1200):
        for width, centred in ((8, True), (8, False), (4, True), (4, False)):
            other = RowTile(1, 128, 1, 1, width, False)
            found = choose_norm.dense(1 << 22, n, other, centred)
            if found is None:
                continue
            tile, words, turns = found
            assert tile.why_not() is None and tile.rows % 2 == 0
            per = width // 4
            assert words * per * tile.threads >= n + per - 1
            assert words == 1 or (words - 1) * per * tile.threads <= n  # but the last one is whole
            chunk = tile.num_threads * tile.vectors * width
            assert chunk >= tile.rows * turns * n + tile.lead
            assert chunk * 32 // per // 8 <= 48 * 1024


def test_every_tile_by_the_element_holds_its_rows():
    for n in range(1, 24_000):
        for width, centred in ((8, True), (8, False), (4, True)):
            other = RowTile(1, 128, 1, 1, width, False)
            found = choose_norm.by_element(n, other, centred)
            if found is None:
                continue
            tile, elements, _ = found
            assert tile.columns >= n and tile.why_not() is None
            assert (elements - 1) * tile.threads < n <= elements * tile.threads


def test_few_long_rows_of_a_layer_norm_are_held_whole():
    rng, taken = random.Random(0), 0
    for _ in range(2000):
        m, n = rng.randint(1, 9), 8 * rng.randint(1, 1 << 15)
        for largest in (16, 8):
            if (tile := choose_norm.few_long(m, n, "sm_90a", largest)) is not None:
                assert tile.why_not() is None and tile.columns >= n and tile.ctas <= largest
                taken += 1
    assert taken > 1000
    assert choose_norm.few_long(1, 65_536, "sm_80") is None
