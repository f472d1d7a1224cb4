"""A mixture's gate in the store of the up product, which keeps what it gates: right against
float64, silent beside the groups, and a layer to the bit that of a gate of its own."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutex
from cutex import ops
from cutex.compile import compile
from cutex.kernels.gemm.grouped import choose
from cutex.kernels.gemm.grouped.config import LevelConfig
from cutex.kernels.gemm.grouped.sm90.level import GroupedLevel
from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.mixture.gate_ops import KeptGate
from cutex.ops.mixture import registered

bf16 = torch.bfloat16
NAMES = {bf16: "bf16", torch.float16: "fp16"}
ORDERS = ("fifo", "eager", "starved", "peer-late", "random")
TILES = Sm90Config(
    tile_m=128, tile_n=64, num_stages=3, warpgroups=2, pingpong=True, cluster_m=2, swap_ab=True,
    epi_n=32, epi_stages=2, num_ctas=4,
)  # fmt: skip


def beyond(got: Tensor, want: Tensor, slack: Tensor) -> str:
    """What of `got` is further from `want` than its rounding and `slack` are, or is not NaN behind
    it."""
    count, unit = len(want), torch.finfo(got.dtype).eps / 2
    over = (got[:count].double() - want).abs() - unit * want.abs() - slack - 2.0**-24
    if not (over <= 0).all():
        return f"{over.max().item()} beyond"
    return "" if got[count:].isnan().all() else "a row of no group was written"


def run(seed: int, dtype: torch.dtype, tile_n: int = 64, fault: bool = False) -> str:
    """Simulate one random product; return what is wrong, or with a `fault` what is found of
    another gate's results."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [r.choice((0, 1, 31, 33, 65)) for _ in range(r.choice((1, 2)))]
    counts.append(r.randrange(33, 64))
    n, k = 16 * r.randrange(1, 20), 8 * r.randrange(9, 30)
    x = torch.randn((sum(counts) + 9, k), generator=g).to(dtype)
    x[sum(counts) :] = math.nan
    w = (torch.randn((len(counts), n, k), generator=g) / k**0.5).to(dtype).mT
    y, h = (torch.full((len(x), size), math.nan, dtype=dtype) for size in (n // 2, n))
    name, offs = NAMES[dtype], torch.tensor(counts).cumsum(0).int()
    row, column = OperandLayout(name), OperandLayout(name, "column", batched=True)
    gate: Any = (KeptGate(name),)
    product = GeneralConfig(replace(TILES, tile_n=tile_n), row, column, row, gate)
    compiled = compile(GroupedLevel(LevelConfig(product, step=32)), name, "sm_90a")
    how: dict[str, Any] = {"order": ORDERS[seed % len(ORDERS)], "seed": seed}
    if found := cutex.simulate(compiled, x, w, y, offs, h, **how).findings:
        return str(found)
    parts = list(zip(x.double().split([*counts, 9])[:-1], w.double(), strict=True))
    want = torch.cat([a @ b for a, b in parts])
    # 16 products at a time are truncated
    if bad := beyond(h, want, 2.0**-20 * torch.cat([a.abs() @ b.abs() for a, b in parts])):
        return f"h: {bad}"
    if fault:
        h = h.roll(1, 1)
    gates, ups = (h[: sum(counts), i::2].double() for i in range(2))
    want = F.silu(gates) * ups  # of what was stored
    return beyond(y, want, 2.0**-18 * (want.abs() + ups.abs()))


@pytest.mark.parametrize("fault", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_gate_keeps_what_it_gates(fault: bool) -> None:
    assert (run(4, bf16, fault=fault) != "") == fault


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_randomized_stores_are_right(seed: int) -> None:
    dtype = torch.float16 if seed % 4 == 1 else bf16
    assert run(seed, dtype, (96, 64, 32)[seed % 3]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [bf16, torch.float16])
def test_a_layer_is_that_of_a_gate_of_its_own(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "levels_pay", lambda *_: True)
    monkeypatch.setattr(choose, "LEVEL_ROWS", 64)
    g = torch.Generator().manual_seed(1)
    x, *w = (torch.randn(s, generator=g).to(dtype) for s in ((90, 64), (5, 96, 64), (5, 64, 48)))
    weights, ids = torch.rand((90, 3), generator=g), torch.randint(0, 6, (90, 3), generator=g)
    results = []
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(registered, "gates_in_store", lambda *_: False)
        given = [t.clone().requires_grad_() for t in (x, weights, w[0].mT, w[1].mT)]
        with ops.simulated("sm_90a"):
            y = cutex.moe(given[0], given[1], ids, given[2], given[3])
            results.append((y.detach(), *torch.autograd.grad(y.sum(), given)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
