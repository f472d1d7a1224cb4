"""Packed weights of 4 bits: `cutex.pack_w4`, and `cutex.matmul` with one, simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from w4_formats import FORMATS

import cutex
from cutex import ops
from cutex.arch import BOARDS
from cutex.arch import arch as arch_named
from cutex.compile import compile
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.w4.signature import W4Signature
from cutex.kernels.gemm.w4.sm90.choose import configs_for, ranked
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.kernels.gemm.w4.sm90.decode import W4Decode
from cutex.kernels.gemm.w4.sm90.decode_config import W4DecodeConfig
from cutex.kernels.gemm.w4.sm90.kernel import W4Gemm
from cutex.kernels.gemm.w4.sm90.one_row import W4OneRow
from cutex.ops.w4.packed import W4Weight
from cutex.problem.w4 import W4Problem, draw, packing
from cutex.problem.w4.layout import W4Format
from cutex.sim import simulate

bf16, fp16 = torch.bfloat16, torch.float16
ARCHS = ("sm_90a", "sm_100a")
ORDERS = ("fifo", "eager", "starved", "random")


# ---- products


@pytest.mark.sweep(144)
@pytest.mark.parametrize("seed", range(18))
@pytest.mark.parametrize("arch", ARCHS)
def test_randomized_products_are_right(arch: str, seed: int) -> None:
    problem = draw(seed)
    with ops.simulated(arch, order=ORDERS[seed % 4], seed=seed):
        wrong = problem.run("cpu", cutex.pack_w4, cutex.matmul)
    assert not wrong, f"{wrong}: {problem}"


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(4))
@pytest.mark.parametrize("arch", ARCHS)
def test_forty_more_randomized_products_are_right(arch: str, tenth: int) -> None:
    for seed in range(100 + 10 * tenth, 110 + 10 * tenth):
        with ops.simulated(arch, order=ORDERS[seed % 4], seed=seed):
            problem = draw(seed)
            wrong = problem.run("cpu", cutex.pack_w4, cutex.matmul)
        assert not wrong, f"{wrong}: {problem}"


def altered(change: Callable[[W4Weight], W4Weight]) -> str:
    """What the check says of a product with a weight that is not the one packed."""
    problem = W4Problem(5, 72, 256, "uint4", 64)

    def product(x: Tensor, w: W4Weight, **given: Any) -> Tensor:
        return (x.double() @ change(w).dequantize(torch.float64).mT).to(x.dtype)

    return problem.run("cpu", cutex.pack_w4, product)


def test_a_wrong_scale_zero_or_code_is_off_by_more_than_the_tolerance() -> None:
    def rewritten(w: W4Weight, which: int, by: int) -> W4Weight:
        parts = list(packing.unpack(w.packed, w.n, w.k, w.format, w.dtype))
        changed = parts[which].clone()
        at = (3, 2)
        changed[at] = changed[at] * 1.25 if which == 1 else (changed[at] + by) % 16
        parts[which] = changed
        return w._replace(packed=packing.pack(*parts, w.format))

    assert altered(lambda w: w) == ""
    for which in range(3):
        assert "out[" in altered(lambda w, which=which: rewritten(w, which, 8)), which


def test_infinite_and_nan_scales_stay_in_their_rows() -> None:
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    codes[:, 0] = 15
    scales = torch.ones(64, 2, dtype=bf16)
    scales[3, 1], scales[7, 0] = torch.nan, torch.inf
    x = torch.randn(4, 128, dtype=bf16)
    with ops.simulated("sm_90a"):
        out = cutex.matmul(x, cutex.pack_w4((codes, scales), group_size=64))
    finite = out.isfinite().all(0)
    assert not finite[3] and not finite[7]
    assert finite.sum() == 62


def test_an_infinity_of_x_is_one_of_out_unless_a_weight_is_zero() -> None:
    """Zeros are taken off the weights, not off the sums, where they would be inf - inf."""
    w = cutex.pack_w4(torch.randn(64, 128, dtype=bf16), group_size=64)
    x = torch.randn(4, 128, dtype=bf16)
    x[1, 5], x[2, 70], x[3, :2] = torch.inf, -torch.inf, torch.tensor([torch.inf, -torch.inf])
    want = x.double() @ w.dequantize(torch.float64).mT
    with ops.simulated("sm_90a"):
        out = cutex.matmul(x, w)
    assert torch.equal(out.isnan(), want.isnan()) and want[1:].isinf().sum() > 64
    infinite = want.isinf()
    assert torch.equal(out[infinite].double(), want[infinite])


ROWS = {  # of x, by K
    "normal": lambda x: x,
    "one in 97 far above": lambda x: (
        x * torch.where(torch.arange(x.shape[1]) % 97 == 5, 2.0**30, 1)
    ),
    "of all magnitudes": lambda x: x * torch.exp2(torch.randint(-40, 30, x.shape).float()),
    "below the least normal number": lambda x: x * 2.0**-120,
    "next to the largest": lambda x: x * 2.0**110,
    "zeros": lambda x: 0 * x,
    "infinities": lambda x: torch.where(torch.arange(x.shape[1]) % 250 == 7, torch.inf, x),
    "both, and NaN": lambda x: x.index_fill(1, torch.tensor([3, 600]), -torch.inf).index_fill(
        1, torch.tensor([70]), torch.nan
    ),
}


@pytest.mark.parametrize(
    ("dtype", "group", "n", "k", "tile"),
    [
        (bf16, 128, 72, 712, (64, 1, 1, 1)),
        pytest.param(torch.float16, None, 200, 712, (128, 2, 1, 1), marks=pytest.mark.slow),
        pytest.param(bf16, 256, 904, 1536, (256, 2, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_one_row_of_any_magnitudes_is_right(
    dtype: torch.dtype, group: int | None, n: int, k: int, tile: tuple[int, ...]
) -> None:
    """By digits of 7 bits: of an element 2^-51 of the largest of its 128 may be lost."""
    k -= k % 128 if group else 0
    codes, scales = torch.randint(0, 16, (n, k)), torch.rand(n, k // group if group else 1) + 0.1
    scales = scales.to(dtype)
    w = cutex.pack_w4((codes, scales), dtype=dtype, group_size=group)
    weight = (codes.double() - 8) * scales.double().repeat_interleave(group or k, 1)
    names = ("tile_m", "warpgroups", "split_k", "columns")
    tiles = W4Config(
        swap_ab=True, k_bytes=256, epi_stages=1, format=w.format, tile_n=16, epi_n=16, few=True,
        eight=True, digits=16, num_stages=3, **dict(zip(names, tile, strict=True)),
    )  # fmt: skip
    assert tiles.why_not(None, arch_named("sm_90a")) is None
    kind = {bf16: "bf16", torch.float16: "fp16"}[dtype]
    kernel = compile(W4OneRow(W4Signature(tiles, kind, OperandLayout("fp32"))), kind, "sm_90a")
    factor = 1.0 if w.factor is None else w.factor.double()
    for name, of in ROWS.items():
        x = of(torch.randn(1, k)).to(dtype)
        out = torch.full((1, n), torch.nan)
        simulate(kernel, x, w.packed, out)
        found, want = out.double() * factor, x.double() @ weight.mT
        finite = want.isfinite() & (want.abs() < torch.finfo(torch.float32).max)
        assert torch.equal(found.isnan(), want.isnan()), name
        assert torch.equal(found[want.isinf()], want[want.isinf()]), name
        bound = 2.0**-20 * (x.double().abs() @ weight.abs().mT)  # of fp32 sums of each digit
        assert ((found - want).abs()[finite] <= bound[finite]).all(), name


DECODED = [  # tile_m, tile_n, warps, num_stages
    (16, 1, 16, 4), (32, 8, 8, 3), (64, 8, 4, 2), (32, 1, 4, 5), (16, 8, 8, 2), (32, 4, 8, 3),
    (16, 2, 4, 2),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tile", DECODED, ids=str)
@pytest.mark.parametrize("of", FORMATS, ids=str)
def test_rings_of_warps_of_any_tile(of: W4Format, tile: tuple[int, ...]) -> None:
    names = "tile_m", "tile_n", "warps", "num_stages"
    tiles = W4DecodeConfig(format=of, resident=1, **dict(zip(names, tile, strict=True)))
    assert tiles.why_not(None, arch_named("sm_90a")) is None
    signature = W4Signature(tiles, "bf16", OperandLayout("fp32"))
    kernel = compile(W4Decode(signature), "bf16", "sm_90a")
    for seed, (n, k) in enumerate(((200, 136), (72, 1280), (16, 3072), (520, 640))):
        k -= k % 32 if of.group else 0
        groups = -(-k // of.group) if of.group else 0
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        scales = torch.randn(n, groups) if groups else None
        if of.kind == "fp4" and scales is not None:
            scales = scales.abs() * 2.0**100
        scales = scales if scales is None else scales.to(bf16)
        zeros = torch.randint(0, 16, (n, groups)) if of.zeros else None
        packed = packing.pack(codes, scales, zeros, of)
        m = tiles.tile_n - seed % -(-tiles.tile_n // 2)
        x, out = torch.randn(m, k).to(bf16), torch.full((m, n), torch.nan)
        simulate(kernel, x, packed, out, order=ORDERS[seed], seed=seed)
        w = packing.values(packed, n, k, of, bf16).double()
        error = (out.double() - x.double() @ w.mT).abs()
        assert (error <= 2.0**-7 * (x.double().square() @ w.square().mT).sqrt()).all()


IN_TURN = [  # tile_m, warpgroups, turns, tile_n, split_k, num_stages, few; N, K
    (128, 4, 2, 32, 2, 4, False, 40, 640),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (64, 2, 2, 32, 2, 4, False, 40, 640),
            (128, 3, 3, 16, 2, 6, True, 136, 1160),
            (64, 3, 3, 64, 3, 9, False, 136, 128 * 11),
            (256, 2, 2, 48, 1, 4, False, 264, 72),  # one block for two warpgroups
            (192, 2, 2, 16, 1, 6, False, 400, 520),
            (256, 4, 2, 16, 1, 6, True, 400, 520),
            (64, 4, 4, 32, 2, 12, False, 136, 1160),
        )
    ),
]


@pytest.mark.parametrize(("m", "groups", "turns", "n", "split", "stages", "few", "w", "k"), IN_TURN)
def test_warpgroups_that_take_blocks_in_turn(
    m: int, groups: int, turns: int, n: int, split: int, stages: int, few: bool, w: int, k: int
) -> None:
    packed = cutex.pack_w4(torch.randn(w, k), group_size=None if k % 128 else 128, dtype=bf16)
    tiles = W4Config(
        tile_m=m, warpgroups=groups, tile_n=n, split_k=split, columns=1, num_stages=stages, few=few,
        turns=turns, swap_ab=True, k_bytes=256, epi_n=16, epi_stages=1, format=packed.format,
    )  # fmt: skip
    arch = arch_named("sm_90a")
    assert tiles.why_not(None, arch) is None
    for wrong in ({"num_stages": turns}, {"num_stages": 2 * turns + 1}, {"columns": 0}):
        assert replace(tiles, **wrong).why_not(None, arch), wrong
    # NOTE: rows of whole vectors have a store of their own; splits one for both
    whole = split > 1 or few
    config = W4Signature(tiles, "bf16", OperandLayout("bf16", whole=whole))
    kernel = compile(W4Gemm(config), "bf16", "sm_90a")
    x, out = torch.randn(n - 3, k).to(bf16), torch.full((n - 3, w), torch.nan, dtype=bf16)
    want = x.double() @ packed._replace(factor=None).dequantize(torch.float64).mT
    for seed, order in enumerate(ORDERS if k > 640 else ("random",)):
        simulate(kernel, x, packed.packed, out.fill_(torch.nan), order=order, seed=seed)
        assert (out.double() - want).norm() <= 2.0**-8 * want.norm(), order


def test_no_field_hides_a_property_of_the_general_config() -> None:
    """A field named as one was read by the general epilogue, which waited for warps that had
    ended."""
    of_bases = {k for b in W4Config.__mro__[1:] for k, v in vars(b).items() if type(v) is property}
    assert not of_bases & set(vars(W4Config)["__annotations__"])


def test_few_rows_take_the_rings_of_warps_that_are_the_fastest() -> None:
    """As timed (docs/facts/scaled.md#w4-decode-placed)."""
    for mnk, placed in (  # tile_m, warps, resident, num_stages
        ((1, 4096, 4096), (32, 8, 2, 5)),
        ((8, 4096, 4096), (32, 8, 2, 3)),
        ((8, 4096, 14336), (32, 16, 1, 3)),
        ((1, 5120, 5120), (16, 8, 3, 4)),
        ((8, 6144, 4096), (32, 8, 2, 3)),
        ((1, 8192, 8192), (32, 8, 2, 4)),
        ((1, 10240, 8192), (16, 8, 4, 4)),
        ((8, 10240, 8192), (32, 8, 3, 2)),
        ((1, 14336, 4096), (32, 8, 4, 2)),
        ((1, 28672, 4096), (32, 4, 5, 4)),
        ((8, 18944, 3584), (32, 4, 5, 2)),
        ((8, 57344, 8192), (32, 4, 4, 3)),
        ((1, 5440, 8576), (32, 8, 2, 4)),
        ((2, 4096, 4096), (32, 8, 2, 5)),
        ((4, 4096, 4096), (32, 8, 2, 4)),
        ((2, 3072, 5120), (32, 8, 2, 5)),
        ((4, 4096, 14336), (32, 16, 1, 4)),
        ((1, 1536, 8960), (16, 16, 1, 6)),
        ((8, 1088, 9472), (16, 8, 2, 4)),
        ((2, 16512, 7808), (32, 8, 3, 3)),
        ((3, 14464, 4096), (32, 4, 4, 4)),
        ((4, 6208, 5888), (16, 8, 3, 4)),
        ((5, 28672, 4096), (32, 4, 4, 3)),
        ((16, 8192, 8192), None),
    ):
        tiles = configs_for(mnk, W4Format())[0]
        decoded = isinstance(tiles, W4DecodeConfig)
        found = (tiles.tile_m, tiles.warps, tiles.resident) if decoded else None
        assert found == (placed and placed[:3]), mnk
        assert not decoded or tiles.num_stages == placed[3], mnk
        assert not decoded or tiles.tile_n // 2 < mnk[0] <= tiles.tile_n  # rows are loaded so


def test_the_next_launch_waits_where_there_are_no_more_tiles_than_sms() -> None:
    """As timed (docs/facts/scaled.md#w4-next-behind)."""
    for mnk, behind in (
        ((1, 4096, 4096), True),
        ((4, 4096, 14336), False),  # a CTA has all of an SM
        ((8, 4224, 4096), True),
        ((8, 4224, 8192), False),  # a tile on every SM, of longer K than a ring
        ((8, 1088, 9472), True),
        ((2, 1088, 9472), False),
        ((1, 1088, 4096), False),
        ((1, 4608, 4096), True),
        ((1, 6144, 4096), False),
    ):
        tiles = configs_for(mnk, W4Format())[0]
        assert isinstance(tiles, W4DecodeConfig)
        assert tiles.next_behind is behind, mnk


def test_ctas_of_some_rows_share_sms_where_that_is_the_faster() -> None:
    """As timed (docs/facts/scaled.md#w4-shared-sms)."""
    for mnk, tile, ctas in (
        ((64, 4608, 3584), (64, 64, 2), 144),
        ((32, 5120, 2048), (64, 32, 2), 160),
        ((64, 4096, 4096), (64, 64, 2), 128),
        ((64, 8192, 8192), (128, 64, 2), 128),
    ):
        found = ranked(mnk, W4Format(), arch_named("sm_90a"))
        best = next(c for c in found if not c.in_turn)
        assert (best.tile_m, best.tile_n, best.split_k) == tile, mnk
        assert -(-mnk[1] // best.tile_m) * best.split_k == ctas
        assert best.shares_sm or ctas <= 132


def test_warpgroups_take_blocks_in_turn_where_that_is_the_faster() -> None:
    """As timed (docs/facts/scaled.md#w4-in-turn)."""
    for mnk, tile in (
        ((16, 4096, 14336), (64, 16, 3, 2)),
        ((16, 28672, 4096), (256, 16, 4, 1)),
        ((32, 8192, 8192), (128, 32, 3, 2)),
        ((16, 8192, 8192), (128, 16, 3, 2)),
        ((16, 4096, 4096), (64, 16, 3, 2)),
        ((64, 4096, 4096), (64, 64, 2, 2)),
        ((33, 8192, 8192), (128, 40, 3, 2)),
        ((50, 4096, 4096), (64, 56, 2, 2)),
    ):
        best = configs_for(mnk, W4Format())[0]
        assert best.in_turn
        assert best.few is (mnk == (16, 4096, 4096))  # else by wgmma
        assert (best.tile_m, best.tile_n, best.warpgroups, best.split_k) == tile, mnk
        of_fp16 = configs_for(mnk, W4Format(), dtype="fp16")[0]  # whose codes are not tiny numbers
        assert of_fp16.few is (tile[1] == 16)
    assert not configs_for((64, 57344, 8192), W4Format())[0].in_turn


def test_every_tile_of_a_split_is_its_own_in_each_run() -> None:
    problem = W4Problem(6, 72, 1024)
    x, w = problem.inputs()
    packed = cutex.pack_w4(w, dtype=bf16)
    with ops.simulated("sm_90a", order="random", seed=1):
        first = cutex.matmul(x, packed)
    with ops.simulated("sm_90a", order="random", seed=2):
        assert torch.equal(first, cutex.matmul(x, packed))


def test_no_rows_strided_rows_and_rows_of_more_dimensions() -> None:
    w = cutex.pack_w4(torch.randn(72, 256), dtype=bf16)
    x = torch.randn(2, 3, 512).to(bf16)
    want = x[..., ::2].double() @ w.dequantize(torch.float64).mT
    with ops.simulated("sm_90a"):
        out = cutex.matmul(x[..., ::2], w)
        assert cutex.matmul(x[:, :0, ::2], w).shape == (2, 0, 72)
        row = cutex.matmul(x[1, 2, ::2], w, out_dtype=torch.float32)
    assert out.shape == (2, 3, 72) and row.shape == (72,)  # as torch.nn.functional.linear
    assert (row.double() - want[1, 2]).abs().max() <= 2.0**-7 * want[1, 2].abs().max()
    assert (out.double() - want).abs().max() <= 2.0**-7 * want.abs().max()


@pytest.mark.slow
def test_a_call_like_one_before_is_launched_without_its_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = cutex.pack_w4(torch.randn(72, 128), dtype=bf16)
    x, bias, residual = (
        torch.randn(2, 3, 128).to(bf16),
        torch.randn(72).to(bf16),
        torch.randn(6, 72),
    )
    with ops.simulated("sm_90a"):
        calls: list[Callable[[], Tensor]] = [
            lambda: cutex.matmul(x, w),
            lambda: cutex.matmul(x[0], w, bias=bias, activation="silu"),
            lambda: cutex.matmul(x.view(6, 128), w, residual=residual, out_dtype=torch.float32),
        ]
        first = [call() for call in calls]
        monkeypatch.setattr("cutex.ops.w4.product.check", None)
        for call, want in zip(calls, first, strict=True):
            assert torch.equal(call(), want)
        x.mul_(-2)
        assert torch.equal(calls[0](), -2 * first[0])
        with pytest.raises(TypeError, match=r"a is torch\.bfloat16, but b is packed for"):
            cutex.matmul(x, w._replace(dtype=fp16))
        with pytest.raises(TypeError, match="not callable"):  # no plan broadcasts a residual
            cutex.matmul(x.view(6, 128), w, residual=residual[:1], out_dtype=torch.float32)


@pytest.mark.slow
def test_gradients_are_those_of_the_dequantized_weight() -> None:
    w = cutex.pack_w4(torch.randn(72, 128), kind="mxfp4", dtype=bf16)
    values = w.dequantize(torch.float32)
    given = [torch.randn(*s).to(bf16).requires_grad_() for s in ((5, 128), (72,), (5, 72))]
    plain = [t.detach().float().requires_grad_() for t in given]
    with ops.simulated("sm_90a"):
        out = cutex.matmul(given[0], w, bias=given[1], activation="silu", residual=given[2])
        dy = torch.randn(5, 72).to(bf16)
        out.backward(dy)
    y = torch.nn.functional.silu(plain[0] @ values.mT + plain[1]) + plain[2]
    y.backward(dy.float())
    for mine, due in zip(
        (out, *(t.grad for t in given)), (y, *(t.grad for t in plain)), strict=True
    ):
        assert (mine.float() - due).abs().max() <= 2.0**-5 * due.abs().max()


def test_torch_compile_sees_one_operator() -> None:
    w = cutex.pack_w4(torch.randn(72, 128), dtype=bf16)
    x = torch.randn(5, 128).to(bf16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def twice(x: Tensor) -> Tensor:
        return cutex.matmul(x, w) * 2

    with ops.simulated("sm_90a"):
        assert torch.equal(twice(x), cutex.matmul(x, w) * 2)


# ---- configs, and bad input


def test_every_candidate_fits_and_large_products_take_large_tiles() -> None:
    arch = arch_named("sm_90a")
    for of in FORMATS:
        for mnk in ((1, 4096, 4096), (64, 28672, 8192), (4096, 4096, 4096), (3, 8, 32)):
            found = ranked(mnk, of, arch)
            assert found and all(c.why_not(None, arch) is None for c in found)
    for sms in (1, 4):  # of which no cluster of four fills nine tenths
        few = replace(arch, num_sms=sms)
        assert ranked((16, 4096, 4096), W4Format(), few)[0].split_k <= sms
    best = configs_for((4096, 4096, 4096), W4Format())[0]
    assert best.tile_m * best.tile_n == 256 * 128 and best.num_ctas == 0
    of_board = configs_for((1, 57344, 8192), W4Format(), "H100 PCIe")
    assert {c.num_ctas for c in of_board} == {BOARDS["H100 PCIe"].num_sms}


X, W = torch.zeros(4, 128, dtype=bf16), cutex.pack_w4(torch.ones(8, 128))
FP4 = cutex.pack_w4(torch.ones(8, 128), kind="mxfp4", dtype=bf16)
CODES, ONES = torch.zeros(8, 128, dtype=torch.uint8), torch.ones(8, 1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cutex.matmul(X[:, :64], W), r"takes a \(.., 128\), got \(4, 64\)"),
        (lambda: cutex.matmul(X.half(), W), "a is torch.float16, but b is packed for"),
        (lambda: cutex.matmul(X, W, alpha=2.0), "alpha is given: with a packed weight"),
        (lambda: cutex.matmul(X, W, out=X), "out is given: with a packed weight"),
        (lambda: cutex.matmul(X, W, activation="tanh"), "activation 'tanh' is not one of"),
        (lambda: cutex.matmul(X, W, activation=abs), "activation is a function: with a packed"),
        (lambda: cutex.matmul(X, W, bias=torch.ones(3)), "bias has shape"),
        (lambda: cutex.matmul(X, W), "runs on a Hopper or Blackwell GPU"),
        (lambda: cutex.matmul([1], W), "a must be a torch.Tensor, got list"),
        (lambda: cutex.matmul(X, W4Weight(*FP4[:7])), "b cannot be read: it has no layout version"),
        (lambda: cutex.matmul(X, W._replace(layout_version=7)), "in layout version 7, not 3: pack"),
        (lambda: cutex.matmul(X, FP4._replace(layout_version=7)), "in layout version 7, not 3"),
        (lambda: FP4._replace(layout_version=1).dequantize(), "in layout version 1, not 3: pack"),
        (lambda: cutex.matmul(X, FP4._replace(layout_version=-1)), "in layout version -1, not 3"),
        (lambda: FP4._replace(layout_version=0).dequantize(), "the weight cannot be read: it has"),
        (lambda: torch.ops.cutex.w4_mm(X, *FP4[:3], "fp4", 32, False, None, None, None, bf16),
         "no layout version"),
        (lambda: cutex.matmul(X, W._replace(packed=W.packed[:, :, :64])), "packed words of int32"),
        (lambda: cutex.matmul(X, W._replace(n=80)), r"int32 \(2, 1, 1024\), contiguous, got"),
        (lambda: cutex.matmul(X, W._replace(packed=W.packed.float())), "got torch.float32"),
        (lambda: cutex.matmul(X, W._replace(factor=ONES[:3, 0])), r"factor of float32 \(8,\) or"),
        (lambda: cutex.matmul(X, W._replace(format=W4Format("int2"))), "kind='int2' is not one of"),
        (lambda: cutex.matmul(X, W._replace(format=None)), r"b.format must be of W4Format, got"),
        (lambda: cutex.matmul(X, W._replace(factor=2.0)), "b.factor must be of Tensor or NoneType"),
        (lambda: cutex.pack_w4(X.double()), "w must be of bfloat16, float16 or float32, got"),
        (lambda: cutex.pack_w4(X, kind="int3"), "kind='int3' is not one of int4, uint4"),
        (lambda: cutex.pack_w4(X[0]), r"w must be a matrix \(N, K\), got shape \(128,\)"),
        (lambda: cutex.pack_w4(X, group_size=48), "group_size=48: takes 32, 64, a multiple of 128"),
        (lambda: cutex.pack_w4(X[:, :96], group_size=64), "K=96 is no multiple of group_size=64"),
        (lambda: cutex.pack_w4(X, dtype=torch.float32), "dtype must be bfloat16 or float16, got"),
        (lambda: cutex.pack_w4((CODES,)), "w has 1 parts: takes"),
        (lambda: cutex.pack_w4((CODES, ONES[:7])), r"scales must be \(N, K / group_size\) ="),
        (lambda: cutex.pack_w4((CODES + 16, ONES)), "codes must be from 0 to 15"),
        (lambda: cutex.pack_w4((CODES.float(), ONES)), "codes must be of an integer dtype"),
        (lambda: cutex.pack_w4((CODES, ONES, ONES / 2)), "zeros must be whole numbers"),
    ],
)  # fmt: skip
def test_bad_arguments_are_answered_in_a_sentence(call: Callable[[], object], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        call()
