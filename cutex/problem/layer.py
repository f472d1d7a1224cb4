"""A linear layer of a model as `cutex.matmul` computes it: forward, and for either gradient.

| pass | a (M, K) | b (K, N) | contiguous in a, b |
|---|---|---|---|
| forward | x (tokens, in) | weight (out, in), transposed | K, K |
| dgrad | gradient (tokens, out) | weight (out, in) | K, N |
| wgrad | gradient (tokens, out), transposed | x (tokens, in) | M, N |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutex.dtypes import DTYPES
from cutex.peers import cublas, quack
from cutex.problem.protocol import Check, Computation, Launch
from cutex.problem.truncation import largest_loss

if TYPE_CHECKING:
    import torch

PASSES = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class LayerProblem(Computation):
    """out = a @ b in one pass of a layer with weight (out_features, in_features), for `tokens`
    tokens.

    Gaussian data. fp8 (e4m3) takes the forward pass only, whose result is bf16.
    """

    tokens: int
    out_features: int
    in_features: int
    direction: str = "forward"  # out of PASSES
    dtype: str = "bf16"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.direction not in PASSES:
            raise ValueError(f"direction {self.direction!r} is not one of {', '.join(PASSES)}")
        if min(self.mnk) < 1:
            raise ValueError(f"M, N, K = {self.mnk}: every size must be at least 1")

    @property
    def mnk(self) -> tuple[int, int, int]:
        tokens, n, k = self.tokens, self.out_features, self.in_features
        return {
            "forward": (tokens, n, k),
            "dgrad": (tokens, k, n),
            "wgrad": (n, k, tokens),
        }[self.direction]

    @property
    def k_contiguous(self) -> tuple[bool, bool]:
        """Whether K is contiguous in a and in b."""
        return self.direction != "wgrad", self.direction == "forward"

    @property
    def flops(self) -> int:
        m, n, k = self.mnk
        return 2 * m * n * k

    @property
    def bytes(self) -> int:
        m, n, k = self.mnk
        element = DTYPES[self.dtype].bits // 8
        return (m + n) * k * element + 2 * m * n

    def inputs(
        self, device: str | torch.device = "cpu", copy: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs a (M, K) and b (K, N), Gaussian, sampled on `device` from the seed; on "meta"
        without data."""
        import torch

        generator = None
        if str(device) != "meta":
            generator = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy)
        m, n, k = self.mnk
        dtype = DTYPES[self.dtype].torch
        draws = torch.float16 if dtype.itemsize == 1 else dtype

        def draw(rows: int, columns: int, contiguous: bool) -> torch.Tensor:
            shape = (rows, columns) if contiguous else (columns, rows)
            x = torch.empty(shape, dtype=draws, device=device).normal_(generator=generator)
            return x.to(dtype) if contiguous else x.to(dtype).mT

        a_by_k, b_by_k = self.k_contiguous
        return draw(m, k, a_by_k), draw(k, n, not b_by_k)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor]:
        """The output (M, N), row-major, every element NaN until a kernel writes it."""
        import torch

        m, n, _ = self.mnk
        dtype = torch.bfloat16 if self.dtype == "e4m3" else DTYPES[self.dtype].torch
        return (torch.full((m, n), torch.nan, dtype=dtype, device=device),)

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare out with the product in fp32 of the same operands. The bound of an element's
        error: rounding out once, and adding up K products in fp32 or, for fp8, in 14 bits."""
        import torch

        a, b, out = tensors
        _, _, k = self.mnk
        reference = a.float() @ b.float()  # (M, N)
        error = (out.float() - reference).abs()  # (M, N)
        if error.isnan().any():
            return Check(False, torch.nan, 0.0, "NaN: never written, or computed from poison")
        deviation = k**0.5  # of a sum; the square root of its squared products, too
        bound = torch.finfo(out.dtype).eps * reference.abs()  # (M, N)
        bound += (2.0**-20 + 2.0**-10) * deviation
        if self.dtype == "e4m3":
            bound += largest_loss(reference, deviation, k)
        # NOTE: torch multiplies fp32 on Hopper by tf32 or fp32, 2^-11 of an operand at worst
        bad = error > bound
        largest, worst = float(error.max()), float(bound.min())
        if bad.any():
            i, j = (int(x) for x in bad.nonzero()[0])
            message = f"out[{i}, {j}] is {float(out[i, j]):g} instead of {float(reference[i, j]):g}"
            return Check(False, largest, worst, f"{message}; {int(bad.sum())} elements are wrong")
        return Check(True, largest, worst, "within the bound")


# ---- others

# launches of (a, b, out); may raise ImportError, or ValueError for problems they do not support
PEERS: Mapping[str, Callable[[LayerProblem], Launch]] = {
    "cublas": lambda problem: cublas.layer(problem.dtype),
    "quack": lambda problem: quack.layer(problem.dtype),
}
