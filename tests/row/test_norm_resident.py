"""Norms of aligned rows taken in turn: right against float64; faults are found."""

from __future__ import annotations

import pytest
import torch
from cutlass import cute
from row_calls import DTYPES, ORDERS, launched, near, rows

import cutex
from cutex.compile import compile
from cutex.device.row import reduction
from cutex.device.row.tile import RowTile
from cutex.dtypes import of_torch
from cutex.kernels.row import choose, choose_norm
from cutex.kernels.row.norm_resident import FullColumns, NormResident, ResidentConfig
from cutex.ops.row.rows import arch_of
from cutex.sim import simulate
from cutex.sim.errors import SimError

TILES = {  # rows, threads, CTAs, vectors; vectors of a row
    "rows of four threads": ((32, 4, 1, 3), 11),
    "a row of two warps": ((2, 64, 1, 2), 125),
    "a row of four warps, all of them whole": ((1, 128, 1, 1), 128),
    "parts of a row": ((1, 64, 2, 2), 197),
}


def wanted(x, w, b, eps):
    """The norm in float64, its mean and rstd; without a bias that of an RMS norm."""
    mean = x.double().mean(-1, keepdim=True)
    apart = x.double() - (0 if b is None else mean)
    rstd = (apart.square().mean(-1, keepdim=True) + eps).rsqrt()
    return apart * rstd * w.double() + (0 if b is None else b.double()), mean[:, 0], rstd[:, 0]


@pytest.mark.sweep(96)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms norm", "layer norm"])
@pytest.mark.parametrize("how", TILES.values(), ids=TILES)
@pytest.mark.parametrize("m", [67, 1])
def test_norms_of_rows_taken_in_turn(device, how, m, centred, dtype):
    # rows of a view, NaN around them; fewer CTAs than rows; every third row is NaN
    tile, n = RowTile(*how[0], 16 // dtype.itemsize), how[1] * (16 // dtype.itemsize)
    x, y = (
        torch.full((m, n + 16), torch.nan, dtype=dtype, device=device)[:, 8:][:, :n]
        for _ in range(2)
    )
    x.copy_(rows(device, (m, n), dtype))
    x[: m // 2, : n // 3] += 64  # the parts of a row, which meet, differ
    x[2::3] = torch.nan
    w, b = (rows(device, (n,), torch.bfloat16, seed=seed) for seed in (1, 2))
    mean, rstd = torch.full((2, m), torch.nan, device=device)
    config = ResidentConfig(tile, centred, weight="bf16", bias="bf16" * centred, saves=True)
    device_arch = "sm_90a" if device == "cpu" else arch_of(x.device, "a norm")
    kernel = compile(NormResident(config), of_torch(dtype).name, device_arch)
    optional = (w, b, mean, rstd) if centred else (w, rstd)
    launched(kernel, device, x, y, *optional, 1e-5, 2)
    right = [i for i in range(m) if i % 3 != 2]
    norm, means, inverse = wanted(x, w, b if centred else None, 1e-5)
    near(y[right], norm[right], dtype, 8)
    near(rstd[right], inverse[right], torch.float32, 4)
    if centred:
        near(mean[right], means[right], torch.float32, 4)
    assert y[2::3].isnan().all()
    whole = y.as_strided((m, n + 16), (n + 16, 1), 0)
    assert whole[:, :8].isnan().all() and whole[:, 8 + n :].isnan().all()


IN_TURN = [  # columns, dtype, layer norm
    (200, torch.float16, True), (8200, torch.bfloat16, False), (132, torch.float32, True),
    (20_488, torch.float16, False), (12_296, torch.bfloat16, True),
]  # fmt: skip


@pytest.mark.sweep(5)
@pytest.mark.parametrize("n, dtype, centred", IN_TURN)
def test_a_norm_takes_its_rows_in_turn(device, asked, monkeypatch, n, dtype, centred):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("rows are taken in turn from sm_90 on")
    monkeypatch.setattr(choose_norm.resident, "__defaults__", (0,))
    x = rows(device, (5, n), dtype)
    w, b = (rows(device, (n,), torch.float32, seed=seed) for seed in (1, 2))
    y = cutex.layer_norm(x, w, b, eps=1e-5) if centred else cutex.rms_norm(x, w, eps=1e-5)
    near(y, wanted(x, w, b if centred else None, 1e-5)[0], dtype, 8)
    assert {kind for kind, *_ in asked} == {NormResident}


def test_every_tile_of_rows_taken_in_turn_holds_them():
    for n in range(8, 200_000, 72):
        for width, centred in ((8, True), (8, False), (4, True)):
            found = choose_norm.resident(1 << 20, n, RowTile(width=width), centred, "sm_90a")
            if found is None:
                long = n > 98_304 or (width == 8 and n >= choose_norm.RESIDENT_LONG)
                assert not centred or n < choose_norm.RESIDENT_LEAST[centred] or long
                continue
            tile = found.tile
            assert tile.why_not() is None and n <= tile.columns
            assert n > tile.threads * tile.ctas * (tile.vectors - 1) * width  # as FullColumns says
            assert found.resident * tile.num_threads == choose.BULK_THREADS


FAULTS = {
    "none": None,
    "what is behind the row counts": (FullColumns, "where_held", lambda _, x: x),
    "all threads have the last vector": (FullColumns, "own", lambda c: 8.0 * c.tile.vectors),
    "warps do not wait for each other": (cute.arch, "sync_threads", lambda: None),
    "one place for two rows' sums": (reduction, "SLOTS", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("fifo", 0), *ORDERS, ("eager", 0)])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("ctas", [1, 2])
def test_a_fault_of_rows_taken_in_turn_is_found(ctas, fault, order, seed, monkeypatch):
    if fault is not None and order != "fifo":
        pytest.skip("a fault is found in the default order")
    if fault is not None and fault[0] is not FullColumns and ctas > 1:
        pytest.skip("warps of several CTAs wait for mbarriers, which let one place do")
    if fault is not None:
        monkeypatch.setattr(*fault)
    tile, n = RowTile(1, 64, ctas, 2, 8), 8 * (100 * ctas - 3)
    kernel = compile(NormResident(ResidentConfig(tile, True)), "bf16", "sm_90a", cache=False)
    x, y = rows("cpu", (23, n), torch.bfloat16), torch.full((23, n), torch.nan).bfloat16()
    x[::3] += 200
    try:
        assert not simulate(kernel, x, y, 1e-5, 2, order=order, seed=seed).findings
        near(y, torch.nn.functional.layer_norm(x.double(), (n,), eps=1e-5), torch.bfloat16, 8)
        found = False
    except (AssertionError, SimError):
        found = True
    assert found == (fault is not None)
