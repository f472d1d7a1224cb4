"""Gradients of norms of dense rows by bulk copies, and of rows too long for one pass."""

from __future__ import annotations

import pytest
import torch
from cutlass import Int32, cute
from row_calls import DTYPES, ORDERS, launched, near, rows

import cutex
from cutex.arch import arch
from cutex.compile import compile
from cutex.device.row.bulk import BulkRing, Run
from cutex.device.row.tile import RowTile
from cutex.device.row.words import Words
from cutex.dtypes import of_torch
from cutex.kernels.row import choose, choose_gradient
from cutex.kernels.row.norm_backward_bulk import BackwardBulkConfig, NormBackwardBulk
from cutex.ops.row.rows import arch_of
from cutex.sim import simulate
from cutex.sim.errors import SimError

EPS = 1e-5
GROUPS = 4


def reference(x, dy, w, dsummed, centred):
    """dx, dweight and dbias in float64, and the means and rstd of rows."""
    wide, dy = x.double(), dy.double()
    mean = wide.mean(-1, keepdim=True)
    wide = wide - mean if centred else wide
    rstd = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    xhat = wide * rstd
    g = dy if w is None else dy * w.double()
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    dx = (dx - g.mean(-1, keepdim=True) if centred else dx) * rstd
    dx = dx if dsummed is None else dx + dsummed.double()
    return dx, (dy * xhat).sum(0), dy.sum(0), mean[:, 0].float(), rstd[:, 0].float()


def case(device, n, m, dtype, config, apart=0):
    """Compare with the reference; rows with NaN around them."""

    def dense(filled=None, first=8):
        whole = torch.full((m * n + 32,), torch.nan, dtype=dtype, device=device)
        made = whole[first + apart :][: m * n].view(m, n)
        return made if filled is None else made.copy_(filled)

    x, dy, dsummed = (dense(rows(device, (m, n), dtype, seed=seed)) for seed in (0, 1, 2))
    x[1, : n // 3] += 64  # the parts of the row, which meet, differ
    first = 8 if config.vector else 1
    w = rows(device, (n + first,), torch.bfloat16, seed=3)[first:] if config.weight else None
    given = reference(x, dy, w, dsummed if config.summed else None, config.centred)
    dx, dweight, dbias, mean, rstd = given
    out = dense(first=16)  # in a line x and dx begin differently
    made = {name: torch.full((n,), torch.nan, dtype=torch.bfloat16, device=device)
            for name in config.sums}  # fmt: skip
    parts = {f"{name}_parts": torch.full((GROUPS, n), torch.nan, device=device) for name in made}
    operands = {"weight": w, "mean": mean, "dsummed": dsummed, **made, **parts}
    kernel = compile(
        NormBackwardBulk(config),
        of_torch(dtype).name,
        "sm_90a" if device == "cpu" else arch_of(x.device, "a norm"),
    )
    optional = [operands[name] for name in config.optional]
    launched(kernel, device, x, dy, out, rstd, *optional, GROUPS)
    near(out, dx, dtype, 16)
    for name, wanted in (("dweight", dweight), ("dbias", dbias)):
        if name in made:
            near(made[name], wanted, torch.bfloat16, m)
    whole = out.as_strided((m * n + 32,), (1,), 0)
    assert whole[: 16 + apart].isnan().all() and whole[16 + apart + m * n :].isnan().all()


BULK = {  # threads, CTAs; columns; whether by vectors, and relayed
    "a row of a warp": ((32, 1), 137, False, False),
    "a row of two warps": ((64, 1), 301, False, False),
    "parts of a row": ((64, 4), 785, False, False),
    "whole vectors": ((32, 1), 144, False, False),
    "a row by vectors": ((64, 1), 744, True, False),
    "parts by vectors, relayed": ((64, 4), 3960, True, True),
    "parts of a row, relayed": ((64, 4), 787, False, True),
}


@pytest.mark.sweep(1200)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize("summed, held", [(True, "smem"), (False, "registers"), (True, "memory")])
@pytest.mark.parametrize("how", BULK.values(), ids=BULK)
@pytest.mark.parametrize("slots", [3, 2])
@pytest.mark.parametrize("m", [37, 3])
@pytest.mark.parametrize("apart", [3, 0])
def test_gradients_by_bulk_copies(device, how, m, apart, slots, summed, held, centred, dtype):
    # fewer CTAs than rows, slots that come round again, a first and a last row within 16 bytes
    (threads, ctas), n, by_vectors, relays = how
    if by_vectors and (apart or held != "registers"):
        pytest.skip("vectors begin at a multiple of their size, and stay in registers")
    tile = RowTile(1, threads, ctas, 1, 16 // dtype.itemsize, False)
    by = choose.vectors_of(n, tile) if by_vectors else (choose.words_of(n, tile),)
    config = BackwardBulkConfig(
        tile, centred, weight="bf16", bias="bf16" * centred, summed=summed, held=held,
        slots=slots + relays, relays=relays,
        **dict(zip(("words", "vector", "open"), by, strict=False)),
    )  # fmt: skip
    case(device, n, m, dtype, config, apart)


@pytest.mark.slow
@pytest.mark.parametrize("n, dtype", [(20_489, torch.bfloat16), (2051, torch.float32)])
@pytest.mark.parametrize("centred", [True, False], ids=["layer norm", "rms norm"])
def test_rows_come_by_bulk_copies(device, asked, monkeypatch, n, dtype, centred):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies begin with sm_90")
    monkeypatch.setattr(choose, "BULK_LEAST", 0)
    x, dy, dh = (rows(device, (5, n), dtype, seed=seed) for seed in range(3))
    w, b, r = rows(device, (n,), seed=3), rows(device, (n,), seed=4), torch.zeros_like(x)
    for v in (x, w, b, r):
        v.requires_grad_()
    if centred:
        y, h = cutex.layer_norm(x, w, b, eps=EPS, residual=r)
    else:
        y, h = cutex.rms_norm(x, w, eps=EPS, residual=r)
    given = (x, w, b) if centred else (x, w)
    found = torch.autograd.grad([y, h], given, [dy, dh])
    wanted = reference(x.detach(), dy, w.detach(), dh, centred)[: len(found)]
    for a, b, of in zip(found, wanted, given, strict=True):
        near(a, b, of.dtype, 16)
    assert [kind.__name__ for kind, *_ in asked[1:]] == ["NormBackwardBulk"] * (len(asked) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("n, dtype, kind", [
    (163_843, torch.bfloat16, "NormBackward"), (131_075, torch.float16, "NormBackwardBulk"),
])  # fmt: skip
def test_the_longest_rows_have_gradients(device, asked, n, dtype, kind):
    """Which a cluster holds by bulk copies, and one whose sums nobody holds in one pass."""
    x, dy = (rows(device, (2, n), dtype, seed=seed) for seed in range(2))
    w, b = rows(device, (n,), seed=3), rows(device, (n,), seed=4)
    given = [v.requires_grad_() for v in (x, w, b)]
    found = torch.autograd.grad(cutex.layer_norm(*given, eps=EPS), given, dy)
    wanted = reference(x.detach(), dy, w.detach(), None, True)[:3]
    for a, b, of in zip(found, wanted, given, strict=True):
        near(a, b, of.dtype, 16)
    assert asked[-1][0].__name__ == kind


def test_every_tile_of_a_gradient_holds_its_rows():
    smem = arch("sm_90a").smem_per_cta
    taken = 0
    for n in range(100, 300_000, 1013):
        for widest, sums, weight_bytes in ((8, 2, 2), (8, 2, 4), (8, 1, 4), (4, 2, 4), (8, 0, 0)):
            found = choose_gradient.bulk_gradient(1 << 22, n, widest, sums, weight_bytes, "sm_90a")
            if found is None:
                continue
            taken += 1
            tile, per = found.tile, widest // 4
            assert tile.why_not() is None and tile.rows == 1
            part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
            last, open_words = n - part * (tile.ctas - 1), 1 + (tile.ctas > 1)
            assert found.words * per * tile.threads >= part + per - 1
            assert (found.words - open_words) * per * tile.threads <= last  # but these are whole
            slot = tile.threads * found.words * 4 + 32
            weights = (found.held == "smem") * tile.threads * found.words * per * weight_bytes
            room = smem - choose.BULK_SPARE
            assert found.resident * ((2 * found.slots - 1) * slot + weights) <= room
            assert found.resident * tile.threads == choose.BULK_THREADS
    assert taken > 200
    assert choose_gradient.bulk_gradient(1 << 22, 4097, 8, 2, 2, "sm_80") is None


def test_every_tile_of_a_gradient_by_vectors_holds_its_rows():
    room, taken = arch("sm_90a").smem_per_cta - choose.BULK_SPARE, 0
    for n in range(1024, 300_000, 1032):
        for sums, largest in ((1, 16), (2, 16), (2, 8)):
            found = choose_gradient.bulk_gradient(
                1 << 22, n, 8, sums, 4, "sm_90a", aligned=True, largest=largest
            )
            if found is None or not found.vector:
                continue
            taken += 1
            tile = found.tile
            assert tile.why_not() is None and tile.ctas <= largest
            part = n if tile.ctas == 1 else -(-n // (8 * tile.ctas)) * 8
            last, row = n - part * (tile.ctas - 1), tile.threads * found.vector * 2
            assert found.words * 2 * tile.threads >= part and found.words % found.vector == 0
            assert (found.words // found.vector - found.open) * row <= last  # but these are whole
            assert found.slots >= 2 + found.relays and found.words * 2 <= 32
            assert found.resident * (2 * found.slots - 1) * (tile.threads * found.words * 4) <= room
    assert taken > 200


FAULTS = {
    "none": None,
    "rows not waited for": (BulkRing, "wait", lambda *_: None),
    "stored before all are done": (cute.arch, "sync_threads", lambda: None),
    "the async proxy is not told": (cute.arch, "fence_view_async_shared", lambda: None),
    "a slot filled before it is read": (cute.arch, "cp_async_bulk_wait_group", lambda *_, **__: 0),
    "ends stored that others share": (Run, "inner", lambda r: (r.lead & -8, (r.end + 7) & -8)),
    "elements of other rows counted": (Words, "mask", lambda *_: Int32(-1)),
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
    tile, m = RowTile(1, *how, 1, 8, False), 23
    config = BackwardBulkConfig(tile, True, words=choose.words_of(n, tile))
    kernel = compile(NormBackwardBulk(config), "bf16", "sm_90a", cache=False)
    x, dy = (rows("cpu", (m, n), torch.bfloat16, seed=seed) for seed in range(2))
    x[::3] += 200
    dx = torch.full((m, n), torch.nan).bfloat16()
    wanted, _, _, mean, rstd = reference(x, dy, None, None, True)
    try:
        assert not simulate(kernel, x, dy, dx, rstd, mean, 2, order=order, seed=seed).findings
        near(dx, wanted, torch.bfloat16, 16)
        found = False
    except (AssertionError, SimError):
        found = True
    assert found == (fault is not None)
