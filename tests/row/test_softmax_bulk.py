"""Softmax of dense rows by bulk copies: right in every tile, faults are found."""

from __future__ import annotations

import pytest
import torch
from cutlass import cute
from row_calls import DTYPES, ORDERS, launched, near, rows

import cutex
from cutex.arch import arch
from cutex.compile import compile
from cutex.device.row.bulk import BulkRing, Run
from cutex.device.row.tile import RowTile
from cutex.device.row.words import Words
from cutex.dtypes import of_torch
from cutex.kernels.row import choose
from cutex.kernels.row.softmax_bulk import RowsBulkConfig, SoftmaxBulk
from cutex.kernels.row.softmax_by_tickets import RowsTicketsConfig, SoftmaxByTickets
from cutex.ops.row.rows import arch_of
from cutex.sim import simulate
from cutex.sim.errors import SimError

GROUPS = 4
HOW = {  # threads, CTAs; columns
    "a row of a warp": ((32, 1), 137),
    "a row of two warps": ((64, 1), 301),
    "parts of a row": ((64, 4), 785),
    "whole vectors": ((32, 1), 144),
}


def tile_of(how, dtype) -> RowTile:
    return RowTile(1, *how, 1, 16 // dtype.itemsize, False)


def arch_on(device) -> str:
    return "sm_90a" if device == "cpu" else arch_of(torch.device(device), "rows")


@pytest.mark.sweep(300)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("m", [37, 3])
@pytest.mark.parametrize("slots", [3, 5])
@pytest.mark.parametrize("apart", [3, 0])
@pytest.mark.parametrize("tickets", [False, True], ids=["shares", "tickets"])
def test_softmax_by_bulk_copies(device, how, m, apart, slots, dtype, tickets):
    # fewer CTAs than rows, slots that come round again, a first and a last row within 16 bytes,
    # NaN around them; every third row is NaN, which stays there though words lie in two rows
    n, tile = how[1], tile_of(how[0], dtype)

    def dense(first):
        whole = torch.full((m * n + 32,), torch.nan, dtype=dtype, device=device)
        return whole[first + apart :][: m * n].view(m, n)

    x, y = dense(8), dense(16)  # in a line they begin differently
    x.copy_(rows(device, (m, n), dtype, scale=4.0))
    x[0] -= 3000
    x[0, : n // 2] = x[1, ::2] = -torch.inf  # threads that have nothing else
    x[2::3] = torch.nan
    made = tile, choose.words_of(n, tile), slots, 1
    drawn = (torch.zeros(2, dtype=torch.int32, device=device),) * tickets
    softmax = SoftmaxBulk(RowsBulkConfig(*made))
    if tickets:
        softmax = SoftmaxByTickets(RowsTicketsConfig(*made))
    kernel = compile(softmax, of_torch(dtype).name, arch_on(device))
    launched(kernel, device, x, y, *drawn, GROUPS)
    right = [i for i in range(m) if i % 3 != 2]
    near(y[right], x.double().softmax(-1)[right], dtype, 2**-6)
    assert y[2::3].isnan().all()
    whole = y.as_strided((m * n + 32,), (1,), 0)
    assert whole[: 16 + apart].isnan().all() and whole[16 + apart + m * n :].isnan().all()
    assert not drawn or not drawn[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("n", [20_489, 11_003])
def test_rows_come_by_bulk_copies(device, asked, monkeypatch, n):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies begin with sm_90")
    monkeypatch.setattr(choose.bulk_rows, "__defaults__", (0,))
    x = rows(device, (5, n), torch.bfloat16)
    near(cutex.softmax(x), x.double().softmax(-1), torch.bfloat16, 2**-6)
    assert {kind.__name__ for kind, *_ in asked} == {"SoftmaxByTickets"}


def test_every_tile_by_bulk_copies_holds_its_rows():
    smem = arch("sm_90a").smem_per_cta
    taken = 0
    for n in range(100, 300_000, 1013):
        for widest in (8, 4):
            found = choose.bulk_rows(1 << 22, n, widest, "sm_90a")
            if found is None:
                continue
            taken += 1
            tile, per = found.tile, widest // 4
            assert tile.why_not() is None and tile.rows == 1 and found.slots >= 3
            part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
            last, open_words = n - part * (tile.ctas - 1), 1 + (tile.ctas > 1)
            assert found.words * per * tile.threads >= part + per - 1
            assert (found.words - open_words) * per * tile.threads <= last  # but these are whole
            slot = tile.threads * found.words * 4 + 32
            assert found.resident * found.slots * slot <= smem - choose.BULK_SPARE
    assert taken > 200
    assert choose.bulk_rows(1 << 22, 40_097, 8, "sm_80") is None


FAULTS = {
    "none": None,
    "rows not waited for": (BulkRing, "wait", lambda *_: None),
    "stored before all are done": (cute.arch, "sync_threads", lambda: None),
    "the async proxy is not told": (cute.arch, "fence_view_async_shared", lambda: None),
    "a slot filled before it is read": (cute.arch, "cp_async_bulk_wait_group", lambda *_, **__: 0),
    "ends stored that others share": (Run, "inner", lambda r: (r.lead & -8, (r.end + 7) & -8)),
    "elements of other rows counted": (Words, "is_edge", lambda w, i: i == 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("fifo", 0), *ORDERS, ("eager", 0)])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("how, n", [((64, 1), 301), ((64, 2), 301)], ids=["rows", "parts"])
def test_a_fault_of_bulk_copies_is_found(how, n, fault, order, seed, monkeypatch):
    if fault is not None and order != "fifo":
        pytest.skip("a fault is found in the default order")
    if fault is not None:
        monkeypatch.setattr(*fault)
    tile = tile_of(how, torch.bfloat16)
    config = RowsBulkConfig(tile, choose.words_of(n, tile), 3, 1)
    kernel = compile(SoftmaxBulk(config), "bf16", "sm_90a", cache=False)
    x, y = rows("cpu", (23, n), torch.bfloat16), torch.full((23, n), torch.nan).bfloat16()
    x[::3] += 200
    try:
        assert not simulate(kernel, x, y, 2, order=order, seed=seed).findings
        near(y, x.double().softmax(-1), torch.bfloat16, 2**-6)
        found = False
    except (AssertionError, SimError):
        found = True
    assert found == (fault is not None)
