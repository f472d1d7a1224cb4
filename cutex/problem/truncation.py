"""What tensor cores lose of an fp8 product's sums, as a bound for the error of a result.

A step of 32 of K aligns its products and the sum so far to the largest of them, cuts off all 34
`kept` bits below it, towards zero, and then the sum
(docs/facts/matmul.md#hopper-tensor-core-fp8). With D^2 the sum of the squared products, the sum so
far is about S t / K, the share of the final sum S, and D or less beside it; so

- at random, each cut loses a third of a squared unit in the mean. The root of their sum is, with
  the mean square of the sums so far, D^2 + S^2 / 3 at most, 2^-kept (34/3 steps (D^2 + S^2/3))^1/2;
- towards zero, since more of the products have the sign of S than the other, by S / D of the root
  of K: half a unit of each, and the mean unit is (|S| + D) / 2 at most. Of elements that lie five
  deviations out this is as large as the above (docs/facts/matmul.md#fp8-sums-far-out).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVIATIONS = 6  # that no loss at random exceeds
FP8_BITS = 13  # below the largest that Hopper's fp8 keeps
STEP_K = 32  # elements that are added up at a time


def largest_loss(
    sums: torch.Tensor,
    deviation: torch.Tensor | float,
    k: int,
    kept: int = FP8_BITS,
    block_k: int | None = None,
) -> torch.Tensor:
    """The largest loss of each of `sums` (M, N), of `k` products whose squares add up to the square
    of `deviation` (M, N).

    block_k: sums begin anew after so many products, and add up in fp32.
    """
    each = max(1, k if block_k is None else min(k, block_k))
    steps, blocks = -(-each // STEP_K), max(1, -(-k // each))
    size = sums.abs()
    random = (34 / 3 * steps * (deviation**2 + size.square() / (3 * blocks))) ** 0.5
    one_sided = (size / deviation).nan_to_num(0.0)  # without a product there is no sum
    one_sided = one_sided * k**0.5 / 4 * (size / blocks + deviation / blocks**0.5)
    return 2.0**-kept * (DEVIATIONS * random + one_sided)
