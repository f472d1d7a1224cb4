"""Tiles that are equally wide: right against float64, and silent beside the groups."""

from __future__ import annotations

import itertools
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
from cutex.arch import arch as arch_named
from cutex.compile import compile
from cutex.device.epilogue.epilogue_ops import Activation, Bias, Gate, Scale
from cutex.kernels.gemm.grouped import choose
from cutex.kernels.gemm.grouped.config import LevelConfig
from cutex.kernels.gemm.grouped.sm90.level import GroupedLevel
from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.ops.grouped import launch

bf16 = torch.bfloat16
ORDERS = ("fifo", "eager", "starved", "peer-late", "random")
TILES = Sm90Config(
    tile_m=128, tile_n=96, num_stages=3, warpgroups=2, pingpong=True, cluster_m=2, swap_ab=True,
    epi_n=32, epi_stages=2, num_ctas=4,
)  # fmt: skip
TOGETHER = replace(TILES, tile_m=256, pingpong=False)


def config(
    gated: bool,
    major: str,
    dtype: str = "bf16",
    tiles: Sm90Config = TILES,
    ops: Any = (),
    halves: bool = False,
) -> LevelConfig:
    row = OperandLayout(dtype)
    layouts = row, OperandLayout(dtype, major, batched=True), row
    product = GeneralConfig(tiles, *layouts, (Gate("silu"),) if gated else ops)
    return LevelConfig(product, step=32, halves=halves)


def wrong(got: Tensor, x: Tensor, w: Tensor, rows: list[int], gated: bool) -> str:
    """Where `got` is not what it should be, or "": rows of groups within the roundings of their
    sums, and those behind them NaN, as they were."""
    begin = 0
    unit = torch.finfo(got.dtype).eps / 2
    for group, count in enumerate(rows):
        mine = slice(begin, begin + count)
        want = x[mine].double() @ w[group].double()
        size = x[mine].double().abs() @ w[group].double().abs()
        slack = 2.0**-20 * size
        if gated:
            gates, ups = want[:, 0::2], want[:, 1::2]
            slack = slack[:, 0::2] * 1.2 * ups.abs() + slack[:, 1::2] * gates.abs()
            want = F.silu(gates) * ups
            slack = slack + 2.0**-18 * want.abs()
        off = (got[mine].double() - want).abs() - unit * want.abs() - slack - 2.0**-24
        if count and not (off <= 0).all():
            return f"group {group} of {rows}: {off.max().item()} beyond"
        begin += count
    return "" if got[begin:].isnan().all() else "a row of no group was written"


def run(
    number: int,
    gated: bool,
    major: str,
    dtype: torch.dtype = bf16,
    halves: bool = False,
    tiles: Sm90Config = TILES,
    **orders: Any,
) -> str:
    """Simulate one random problem; return what is wrong."""
    r, g = random.Random(number), torch.Generator().manual_seed(number)
    rows = [r.choice((0, 1, 31, 33, 64, 65, r.randrange(200))) for _ in range(r.choice((1, 3, 5)))]
    rows[-1] = r.randrange(97, 129)  # two tiles that are not as wide as they may be
    n, k = 16 * r.randrange(1, 30), 8 * r.randrange(20, 60)
    x = torch.randn((sum(rows) + 9, k), generator=g).to(dtype)
    w = (torch.randn((len(rows), n, k), generator=g) / k**0.5).to(dtype).mT
    w = w if major == "column" else w.contiguous()
    x[sum(rows) :] = math.nan
    out = torch.full((len(x), n // 2 if gated else n), math.nan, dtype=dtype)
    offs = torch.tensor(rows).cumsum(0).int()
    name = {bf16: "bf16", torch.float16: "fp16"}[dtype]
    compiled = compile(
        GroupedLevel(config(gated, major, name, tiles, halves=halves)), name, "sm_90a"
    )
    passed = torch.cat([w[..., 0::2].mT, w[..., 1::2].mT], 1).mT if halves else w
    found = cutex.simulate(compiled, x, passed, out, offs, **orders).findings
    return str(found) if found else wrong(out, x, w, rows, gated)


@pytest.mark.slow
def test_a_gated_product_is_right() -> None:
    assert run(23, True, "column", order="random", seed=5) == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("gated", "major"), [(True, "column"), (False, "column"), (False, "row")])
def test_randomized_problems_are_right(gated: bool, major: str, seed: int) -> None:
    dtype = torch.float16 if seed % 4 == 1 else bf16
    order = ORDERS[seed % len(ORDERS)]
    assert run(seed, gated, major, dtype, order=order, seed=seed) == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("gated", "major"), [(True, "column"), (False, "column"), (False, "row")])
def test_both_warpgroups_compute_a_tile(gated: bool, major: str, seed: int) -> None:
    how: Any = {"order": ORDERS[seed % len(ORDERS)], "seed": seed}
    dtype = torch.float16 if seed % 4 == 1 else bf16
    assert run(300 + seed, gated, major, dtype, tiles=TOGETHER, **how) == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_first_half_of_the_columns_gates_the_second(seed: int) -> None:
    how = {"order": ORDERS[seed % len(ORDERS)], "seed": seed}
    assert run(200 + seed, True, "column", (bf16, torch.float16)[seed % 2], True, **how) == ""


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_a_layer_is_that_of_other_tiles_to_the_bit(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer, whose groups are divided equally as if they were long."""
    monkeypatch.setattr(choose, "LEVEL_ROWS", 64)
    g = torch.Generator().manual_seed(1)
    x, *w = (torch.randn(s, generator=g).to(bf16) for s in ((90, 64), (5, 96, 64), (5, 64, 48)))
    weights = torch.rand((90, 3), generator=g)
    ids = torch.randint(0, 5, (90, 3), generator=g)
    results = []
    for long in (False, True):
        monkeypatch.setattr(choose, "levels_pay", lambda *_, long=long: long)
        given = [t.clone().requires_grad_(keep) for t in (x, weights, w[0].mT, w[1].mT)]
        with ops.simulated("sm_90a"):
            y = cutex.moe(given[0], given[1], ids, given[2], given[3])
            grads = torch.autograd.grad(y.sum(), given) if keep else ()
        results.append((y.detach(), *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_operations_take_the_numbers_of_their_rows_and_columns(seed: int) -> None:
    """A bias of each group, an activation, a number for each row."""
    g = torch.Generator().manual_seed(seed)
    rows, n, k = [0, 127, 31, 65 + seed, 1], 40 + 48 * seed, 72
    x = torch.randn((sum(rows) + 7, k), generator=g).to(bf16)
    w = torch.randn((len(rows), n, k), generator=g).to(bf16).mT
    bias = torch.randn((len(rows), n), generator=g).to(bf16)
    scale = torch.randn(len(x), generator=g)
    x[sum(rows) :] = math.nan
    out = torch.full((len(x), n), math.nan, dtype=bf16)
    offs = torch.tensor(rows).cumsum(0).int()
    operations = Bias("column", whole=n % 8 == 0), Activation("relu"), Scale("row_scale", "row")
    compiled = compile(GroupedLevel(config(False, "column", ops=operations)), "bf16", "sm_90a")
    orders: Any = {"order": ORDERS[seed % len(ORDERS)], "seed": seed}
    assert not cutex.simulate(compiled, x, w, out, offs, bias, scale, **orders).findings
    of_group = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    mine = slice(0, sum(rows))
    y = torch.einsum("tk,tkn->tn", x[mine].double(), w[of_group].double())
    want = (y + bias[of_group].double()).relu() * scale[mine, None].double()
    assert torch.allclose(out[mine].double(), want, rtol=2.0**-7, atol=1e-3)
    assert out[sum(rows) :].isnan().all()


@pytest.mark.slow
def test_grouped_mm_of_ragged_groups_is_that_of_others_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose, "LEVEL_ROWS", 64)
    g = torch.Generator().manual_seed(2)
    x, w, bias, dy = (
        torch.randn(s, generator=g).to(bf16) for s in ((99, 64), (3, 72, 64), (3, 72), (99, 72))
    )
    offs = torch.tensor([40, 40, 95], dtype=torch.int32)
    index = torch.randint(0, 99, (99,), generator=g, dtype=torch.int32)
    scale = torch.rand(99, generator=g)
    results = []
    for ragged in (False, True):
        monkeypatch.setattr(choose, "levels_pay", lambda *_, ragged=ragged: ragged)
        given = [t.clone().requires_grad_() for t in (x, w.mT, bias)]
        with ops.simulated("sm_90a"):
            y = cutex.grouped_mm(given[0], given[1], offs, bias=given[2], ragged=ragged)
            grads = torch.autograd.grad(y, given, dy)
            more = [
                cutex.grouped_mm(x, w.mT, offs, ragged=ragged, **options)
                for options in ({}, {"index": index, "row_scale": scale, "activation": "silu"})
            ]
        results.append([*grads, *(t[:95] for t in (y.detach(), *more))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(128, 0, 256), (100, 0, 200), (128, 128, 100), (0, 0, 0)])
def test_of_two_kernels_the_device_runs_the_one_that_the_groups_are_for(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...]
) -> None:
    """Each writes what it should, and the other nothing."""
    monkeypatch.setattr(choose, "LEVEL_ROWS", 64)
    monkeypatch.setattr(choose, "MUCH_WORK", 0)
    g = torch.Generator().manual_seed(sum(rows))
    x, w = (torch.randn(s, generator=g).to(bf16) for s in ((384, 64), (3, 72, 64)))
    offs = torch.tensor(rows).cumsum(0).int()
    found = {}
    with ops.simulated("sm_90a"):
        way = launch.ways(x, w.mT, (None, None, False), False, False)
        assert len(way) == 2
        for kind, options, call in way:
            out = torch.full((384, 72), torch.nan, dtype=bf16)
            launch.again(kind, options, [x, w.mT, out, offs], call)
            found[kind] = out
        both = cutex.grouped_mm(x, w.mT, offs)
    full = not any(r % 128 for r in rows)
    one, other = found["rows" if full else "level"], found["level" if full else "rows"]
    assert other.isnan().all() and one[sum(rows) :].isnan().all()
    for e, end in enumerate(offs.tolist()):
        mine = slice(end - rows[e], end)
        want = x[mine].double() @ w[e].double().mT
        assert torch.equal(one[mine], both[mine])
        assert torch.allclose(one[mine].double(), want, rtol=2.0**-8, atol=1e-3)


def test_what_is_chosen_fits_and_other_products_keep_their_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper = arch_named("sm_90a")
    for matrix in itertools.product((4096, 14336), (16, 2880, 4096)):
        for gated in (False, True):
            for most in (32, 1024):
                tiles = choose.level_tiles(matrix, gated, most)
                chosen = config(gated, "column", tiles=tiles)
                assert chosen.why_not(hopper) is None and tiles.num_stages >= 3
    x, w = torch.zeros(1, 64, dtype=bf16), torch.zeros(4, 96, 64, dtype=bf16).mT
    with ops.simulated("sm_90a"):
        assert launch.levels(x, 1024, w, None) and launch.levels(x, 1024, w, "gated_silu")
        assert not launch.levels(x, 1024, w.contiguous(), "gated_silu")
        assert launch.levels(x, 1024, w, "relu", with_more=True)
        assert not launch.levels(x, 1024, w, "gated_silu", with_more=True)
        assert not launch.levels(x, 4 * 95, w, None)

        def kinds(x: Tensor, w: Tensor, options: Any, scaled: bool, ragged: bool) -> list[str]:
            return [kind for kind, *_ in launch.ways(x, w, options, scaled, ragged)]

        long = x.expand(1024, 64)
        assert kinds(long, w, (None, "relu", False), scaled=True, ragged=True) == ["level"]
        assert kinds(long, w, (None, None, False), scaled=True, ragged=False) == ["rows"]
        assert kinds(long, w, (None, None, True), scaled=False, ragged=True) == ["rows"]
        odd = x.expand(1025, 64)  # no even groups of whole tiles
        assert kinds(odd, w, (None, None, False), scaled=False, ragged=False) == ["level"]
        assert kinds(odd, w, (None, None, True), scaled=False, ragged=False) == ["rows"]
        monkeypatch.setattr(choose, "MUCH_WORK", 1024 * 64 * 96)
        long = torch.zeros(1024, 64, dtype=bf16)
        plain = (None, None, False), False, False
        assert kinds(long, w, *plain) == ["level", "rows"]
        assert kinds(long[:512], w, *plain) == ["rows"]
        wide = torch.zeros(4, 416, 64, dtype=bf16).mT
        given = [long, wide, long.new_empty(1024, 416), torch.zeros(4, dtype=torch.int32)]
        of_both = [call(options, given)[0] for _, options, call in launch.ways(long, wide, *plain)]
        level, full = of_both
        assert level.only.unit == full.only.unit == 256 and full.only.full > level.only.full
        assert (full.product.tiles.tile_n, full.product.tiles.cluster_m) == (208, 2)
        assert all(c.why_not(hopper) is None for c in of_both)
    with ops.simulated("sm_100a"):
        assert not launch.levels(x, 1024, w, None)


def test_a_config_that_does_not_fit_says_why() -> None:
    hopper = arch_named("sm_90a")
    assert "equal widths" in (
        config(False, "column", tiles=choose._in_turn(64)).why_not(hopper) or ""
    )
    assert "a gate takes rows of K" in (config(True, "row").why_not(hopper) or "")
    row = OperandLayout()
    relu = GeneralConfig(TILES, row, row, row, (Activation("relu"),))
    assert "a (M, K), b (E, K, N)" in (LevelConfig(relu, step=32).why_not(hopper) or "")
    odd = LevelConfig(config(False, "column").product, step=24)
    assert "step=24" in (odd.why_not(hopper) or "")


def test_a_single_end_of_any_stride_is_passed_as_a_contiguous_one() -> None:
    one = torch.tensor([[3, 5]], dtype=torch.int32)[:, 1]
    assert one.stride() == (2,) and one.is_contiguous()
    found = launch.ends(one)
    assert found.stride() == (1,) and found.data_ptr() == one.data_ptr() and found.tolist() == [5]
