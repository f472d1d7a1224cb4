"""The bound of what Hopper's tensor cores lose of fp8 sums, beside what they do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cutex.problem.layer import LayerProblem
from cutex.sim.numerics.fp8_sum import add_products


def summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (M, K) times b (N, K), transposed, as a Hopper tensor core sums it, in bf16 (M, N)."""
    total = np.zeros((a.shape[0], b.shape[0]), np.float32)
    x, y = a.float().numpy(), b.float().numpy()
    for step in range(0, a.shape[1], 32):
        total = add_products(total, x[:, step : step + 32], y[:, step : step + 32])
    return torch.from_numpy(total).bfloat16()


def test_fp8_sums_far_out_are_within_their_bound_and_a_missing_tile_is_not() -> None:
    """Operands of mean 0.35 have sums five deviations out, whose loss is far above that of others,
    and towards zero; without a mean, a left-out tile of K is beyond the bound of some element."""
    k = 2048
    problem = LayerProblem(32, 24, k, "forward", "e4m3")
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=g) + 0.35 for rows in (32, 24))
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    out = summed(a8, b8)
    exact = a8.double() @ b8.double().mT
    assert (exact / k**0.5).mean() > 4.5
    # beyond what sums near zero lose: 6 deviations of random cuts, and rounding out
    plain = 2.0**-13 * 6 * (11 * k / 32) ** 0.5 * k**0.5 + 2.0**-7 * exact.abs()
    assert ((exact - out.double()) > 0.5 * plain).any()
    check = problem.check(a8, b8.mT, out)
    assert check.ok, check.message

    a, b = replace(problem, seed=1).inputs()
    assert problem.check(a, b, summed(a, b.mT)).ok
    less = a.clone()
    less.view(torch.uint8)[:, 1024 : 1024 + 64] = 0
    assert not problem.check(a, b, summed(less, b.mT)).ok
