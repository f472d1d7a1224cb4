"""Scaled products of torch, as references of scripts: on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch

from cutex.sim.host.torch_scaled import (
    scaled_grouped_mm,
    scaled_grouped_mm_v2,
    scaled_mm,
    scaled_mm_v2,
)

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def blocked(factors: torch.Tensor) -> torch.Tensor:
    """Scale factors in the order of cuBLAS's block-scaled products, by its documented formula."""
    rows, columns = factors.shape
    down, across = -(-rows // 128), -(-columns // 4)
    out = torch.zeros(down * across * 512, dtype=torch.float32)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * across + c // 4
            out[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = factors[r, c]
    return out


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, k).to(E4M3), torch.randn(n, k).to(E4M3).t()


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(want).all() and want.abs().max() > 0
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


SCALES = {  # shapes of the factors of a (M, K) and b (K, N), and their elements per factor
    "one": ((), ()),
    "rows": ((200, 1), (1, 96)),
    "1x128": ((200, 3), (3, 96)),
    "128x128": ((200, 3), (3, 1)),
}


@pytest.mark.parametrize("kind", SCALES)
def test_float32_factors(kind):
    a, b = operands(200, 96, 384)
    sa, sb = (torch.rand(shape) + 0.5 for shape in SCALES[kind])
    wide_a, wide_b = a.double(), b.double()
    for i in range(200):
        for k in range(0, 384, 128):
            row = sa if kind == "one" else sa[i, k // 128 if sa.shape[1] > 1 else 0]
            wide_a[i, k : k + 128] *= row.double()
    for j in range(96):
        for k in range(0, 384, 128):
            at = (k // 128 if sb.dim() and sb.shape[0] > 1 else 0, j if kind != "128x128" else 0)
            column = sb if kind == "one" else sb[at]
            wide_b[k : k + 128, j] *= column.double()
    near(scaled_mm(a, b, sa, sb, out_dtype=torch.float32), wide_a @ wide_b)
    bias = torch.randn(96)
    got = scaled_mm(a, b, sa, sb, bias=bias, out_dtype=torch.float32)
    near(got, wide_a @ wide_b + bias.double())


@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 128), (200, 72, 416)])
def test_mxfp8(m, n, k):
    a, b = operands(m, n, k)
    fa, fb = (torch.randint(-3, 4, (r, k // 32)).double().exp2() for r in (m, n))
    sa, sb = (blocked(f.float()).to(E8M0) for f in (fa, fb))
    want = (a.double() * fa.repeat_interleave(32, 1)) @ (
        b.t().double() * fb.repeat_interleave(32, 1)
    ).t()
    near(scaled_mm(a, b, sa, sb, out_dtype=torch.float32), want)


def test_nvfp4():
    m, n, k = 130, 64, 96
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = [torch.randint(0, 16, (rows, k), dtype=torch.uint8) for rows in (m, n)]
    a, b = ((c[:, ::2] | c[:, 1::2] << 4).view(torch.float4_e2m1fn_x2) for c in codes)
    fa, fb = ((torch.rand(r, k // 16) + 0.5).to(E4M3) for r in (m, n))
    sa, sb = (blocked(f.float()).to(E4M3) for f in (fa, fb))
    wide = [
        values[c.long()].double() * f.double().repeat_interleave(16, 1)
        for c, f in zip(codes, (fa, fb), strict=True)
    ]
    near(scaled_mm(a, b.t(), sa, sb, out_dtype=torch.float32), wide[0] @ wide[1].t())


def test_grouped_by_rows_columns_k_and_batch():
    sizes, k, n = [32, 0, 48], 64, 80
    offs = torch.tensor(sizes).cumsum(0).int()
    f32 = torch.float32
    a, b = torch.randn(80, k).to(E4M3), torch.randn(3, n, k).to(E4M3).transpose(1, 2)
    sa, sb = torch.rand(80) + 0.5, torch.rand(3, n) + 0.5
    group = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    rows = (a.double() * sa.double()[:, None])[:, None, :] @ (b.double() * sb.double()[:, None, :])[
        group
    ]
    near(scaled_grouped_mm(a, b, sa, sb, offs, out_dtype=f32), rows[:, 0])
    # columns
    c, d = torch.randn(3, 40, k).to(E4M3), torch.randn(80, k).to(E4M3).t()
    sc, sd = torch.rand(3, 40) + 0.5, torch.rand(80) + 0.5
    each = (c.double() * sc.double()[:, :, None])[group] @ (d.double() * sd.double()).t()[
        :, :, None
    ]
    near(scaled_grouped_mm(c, d, sc, sd, offs, out_dtype=f32), each[:, :, 0].t())
    # K
    e, f = torch.randn(40, 80).to(E4M3), torch.randn(n, 80).to(E4M3).t()
    se, sf = torch.rand(3 * 40) + 0.5, torch.rand(3 * n) + 0.5
    got = scaled_grouped_mm(e, f, se, sf, offs, out_dtype=f32)
    for g, (lo, hi) in enumerate([(0, 32), (32, 32), (32, 80)]):
        want = e.double()[:, lo:hi] @ f.double()[lo:hi]
        want *= se.view(3, 40).double()[g][:, None] * sf.view(3, n).double()[g]
        if hi > lo:
            near(got[g], want)
        else:
            assert not got[g].any()
    # batch
    got = scaled_grouped_mm(c, b[:, :, :], sc, sb, out_dtype=f32)
    near(got, (c.double() * sc.double()[:, :, None]) @ (b.double() * sb.double()[:, None, :]))


def test_functional_products_of_mxfp8_by_groups_of_rows_and_of_k():
    sizes, k, n = [32, 0, 96], 160, 80
    offs = torch.tensor(sizes).cumsum(0).int()

    def made(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values, their factors in the order of tensor cores, and the values times these."""
        values = torch.randn(rows, k).to(E4M3)
        factors = torch.randint(-3, 4, (rows, k // 32)).float().exp2()
        wide = values.double() * factors.double().repeat_interleave(32, 1)
        return values, blocked(factors).to(E8M0), wide

    each = [made(rows, k) for rows in sizes]
    experts = [made(n, k) for _ in sizes]
    a, sa = (torch.cat([x[i] for x in each]) for i in (0, 1))
    b, sb = (torch.stack([x[i] for x in experts]) for i in (0, 1))
    want = torch.cat([x[2] @ w[2].t() for x, w in zip(each, experts, strict=True)])
    got = scaled_grouped_mm_v2(a, b.transpose(1, 2), [sa], [3], [1], [sb], [3], [1], offs,
                               out_dtype=torch.float32)  # fmt: skip
    near(got, want)
    # groups of K, whose factors follow one another
    of_a, of_b = ([made(rows, size) for size in sizes] for rows in (200, n))
    (a, sa), (b, sb) = (
        (torch.cat([x[0] for x in of], 1), torch.cat([x[1] for x in of])) for of in (of_a, of_b)
    )
    got = scaled_grouped_mm_v2(a, b.t(), [sa], [3], [1], [sb], [3], [1], offs,
                               out_dtype=torch.float32)  # fmt: skip
    for g, size in enumerate(sizes):
        if size:
            near(got[g], of_a[g][2] @ of_b[g][2].t())
        else:
            assert not got[g].any()
    # one product
    got = scaled_mm_v2(each[2][0], experts[0][0].t(), [each[2][1]], [3], [1], [experts[0][1]], [3],
                       [1], out_dtype=torch.float32)  # fmt: skip
    near(got, each[2][2] @ experts[0][2].t())


SCRIPT = """
import torch
a = torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn)
b = torch.randn(32, 64, device="cuda").to(torch.float8_e4m3fn).t()
one = torch.tensor(2.0, device="cuda")
out = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
assert out.device.type == "cuda" and out.dtype == torch.bfloat16
want = (a.float() @ b.float() * 4).bfloat16()
assert torch.allclose(out.float(), want.float(), rtol=1e-2)
offs = torch.tensor([16, 64], device="cuda", dtype=torch.int32)
b3 = torch.stack([b.t(), b.t()]).transpose(1, 2)
ones = torch.ones(64, device="cuda"), torch.ones(2, 32, device="cuda")
out = torch._scaled_grouped_mm(a, b3, *ones, offs=offs, out_dtype=torch.bfloat16)
assert out.device.type == "cuda" and torch.equal(out, (a.float() @ b.float()).bfloat16())
if hasattr(torch.nn.functional, "scaled_mm"):
    from torch.nn.functional import ScalingType, scaled_mm
    by = ScalingType.RowWise
    scales = torch.full((64, 1), 2.0, device="cuda"), torch.full((1, 32), 2.0, device="cuda")
    out = scaled_mm(a, b, scales[0], by, scales[1], by, output_dtype=torch.bfloat16)
    assert out.device.type == "cuda" and torch.equal(out, want)
print("right")
"""


def test_what_the_cpu_does_not_compute_is_said():
    x, one = torch.zeros(4, 32, dtype=E4M3), torch.ones(1)
    w, offs = torch.zeros(1, 32, 16, dtype=E4M3), torch.tensor([4], dtype=torch.int32)
    scales = [one], [0], [0]
    with pytest.raises(NotImplementedError, match="a bias is not supported"):
        scaled_grouped_mm_v2(x, w, *scales, *scales, offs, bias=torch.zeros(1, 16))
    with pytest.raises(NotImplementedError, match="of 3 by 3 dimensions"):
        scaled_grouped_mm_v2(x[None], w, *scales, *scales)


def test_a_script_calls_them_on_its_gpu(run_script):
    ran = run_script(SCRIPT, "--arch", "sm_100a")
    assert ran.returncode == 0 and "right" in ran.stdout, ran.stderr
