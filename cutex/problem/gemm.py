"""What is computed: shapes, data, reference, tolerance; alike for tests, timing and simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = ("bf16", "fp16")
INITS = ("int", "normal", "uniform", "zeros")

TMA_STRIDE = 8  # elements: a TMA stride is a multiple of 16 bytes, and both dtypes have 2


@dataclass(frozen=True)
class Check:
    """What a comparison with the reference found."""

    ok: bool
    max_error: float  # largest |c - reference|; nan where c holds a NaN
    tolerance: float  # what max_error was held against
    message: str  # one sentence; names the first bad coordinate if not ok


@dataclass(frozen=True)
class GemmProblem:
    """C[M,N] = A[M,K] @ B[N,K]^T, accumulated in fp32, C in the input dtype.

    A and B are K-major, C is row-major. Raises ValueError for a size below one, a K or N that TMA
    cannot stride, an unknown dtype or init.
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    init: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, size in (("M", self.m), ("N", self.n), ("K", self.k)):
            if size < 1:
                raise ValueError(f"{name}={size}: every size must be at least 1")
        for name, size, rows in (("K", self.k, "A and B"), ("N", self.n, "C")):
            if size % TMA_STRIDE:
                raise ValueError(
                    f"{name}={size}: must be a multiple of {TMA_STRIDE}, "
                    f"because TMA needs the rows of {rows} to be a multiple of 16 bytes"
                )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.init not in INITS:
            raise ValueError(f"init {self.init!r} is not one of {', '.join(INITS)}")

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Least traffic with global memory: A and B read once, C written once."""
        return 2 * (self.m * self.k + self.n * self.k + self.m * self.n)

    def torch_dtype(self) -> torch.dtype:
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]

    def inputs(
        self, device: str | torch.device = "cpu", copy: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A (M, K) and B (N, K), row-major, drawn on `device` from the seed.

        int: whole numbers in [-2, 2], whose sums fp32 holds exactly; normal: mean 0, deviation 1;
        uniform: [-1, 1). `copy` numbers independent draws.
        """
        import torch

        generator = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy)

        def draw(rows: int) -> torch.Tensor:
            shape = (rows, self.k)
            x = torch.zeros(shape, dtype=self.torch_dtype(), device=device)
            match self.init:
                case "int":
                    x.random_(-2, 3, generator=generator)
                case "normal":
                    x.normal_(generator=generator)
                case "uniform":
                    x.uniform_(-1, 1, generator=generator)
            return x  # (M, K) or (N, K)

        return draw(self.m), draw(self.n)

    def output(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """C (M, N), row-major, every element NaN until a kernel writes it."""
        import torch

        return torch.full((self.m, self.n), torch.nan, dtype=self.torch_dtype(), device=device)

    def check(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        tile: tuple[int, int] | None = None,
    ) -> Check:
        """Hold C (M, N) against A @ B^T on the tensors' own device.

        int and zeros: every element equal to the exact product, rounded once to the dtype.
        normal and uniform: the largest and the root-mean-square error against float64 within
        twice those of torch.mm. `tile` (BM, BN) lets a failure name its tile.
        """
        import torch

        def fail(bad: torch.Tensor, what: str, error: float, tolerance: float) -> Check:
            i, j = (int(x) for x in bad.nonzero()[0])
            where = f"C[{i}, {j}]"
            if tile is not None:
                where += f" (tile {i // tile[0]}, {j // tile[1]})"
            count = int(bad.sum())
            message = f"{where} {what}; {count} of {bad.numel()} elements are wrong"
            return Check(False, error, tolerance, message)

        def value(x: torch.Tensor, bad: torch.Tensor) -> float:
            return float(x[bad][0])

        nan = c.isnan()
        if nan.any():
            return fail(nan, "is NaN: never written, or computed from poison", torch.nan, 0.0)
        exact = self.init in ("int", "zeros")
        wide = torch.float32 if exact else torch.float64
        # NOTE: products of ints are at most 4, so sums stay below 2^24, exact in fp32, to K = 4M.
        reference = a.to(wide) @ b.to(wide).T  # (M, N)
        if exact:
            reference = reference.to(c.dtype)
            error = (c.to(wide) - reference.to(wide)).abs()  # (M, N)
            bad = error != 0
            if bad.any():
                what = f"is {value(c, bad):g}, exactly {value(reference, bad):g} was due"
                return fail(bad, what, float(error.max()), 0.0)
            return Check(True, 0.0, 0.0, "exact")
        error = (c.to(wide) - reference).abs()  # (M, N)
        torch_error = (torch.mm(a, b.T).to(wide) - reference).abs()  # (M, N)
        max_error, tolerance = float(error.max()), 2 * float(torch_error.max())
        bad = error > tolerance
        if bad.any():
            what = (
                f"is {value(c, bad):g} where float64 gives {value(reference, bad):g}, "
                f"further off than {tolerance:.3g}, twice torch's own largest error"
            )
            return fail(bad, what, max_error, tolerance)
        rms, torch_rms = (float(e.square().mean().sqrt()) for e in (error, torch_error))
        if rms > 2 * torch_rms:
            message = f"root-mean-square error {rms:.3g} is over twice torch's own, {torch_rms:.3g}"
            return Check(False, max_error, tolerance, message)
        return Check(True, max_error, tolerance, f"within {tolerance:.3g}")
