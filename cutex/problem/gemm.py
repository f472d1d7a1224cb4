"""GEMM as the ladders compute it: sizes, data, reference, tolerance, peers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from cutex.dtypes import DTYPES as ELEMENTS
from cutex.dtypes import DType
from cutex.peers import cublas, in_triton, quack
from cutex.problem.product import ProductProblem
from cutex.problem.protocol import Check, PeerKernel, Sizes

if TYPE_CHECKING:
    import torch

DTYPES = ("bf16", "fp16")
INITS = ("int", "normal", "uniform", "zeros")
TMA_BYTES = 16  # a TMA stride is a multiple of so many bytes


def _mnk(*sizes: tuple[int, int, int]) -> tuple[Sizes, ...]:
    return tuple({"m": m, "n": n, "k": k} for m, n, k in sizes)


@dataclass(frozen=True)
class GemmProblem(ProductProblem):
    """C[M,N] = A[M,K] @ B[N,K]^T, accumulated in fp32, C in the input dtype.

    A and B are K-major, C is row-major. Raises ValueError for a size below one, a K or N that TMA
    cannot stride, an unknown dtype or init.
    """

    op = "gemm"
    title = "GEMM"
    about = "the GEMM ladder, C = A @ B^T"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    inits = INITS
    size_options = ("--mnk",)
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        "cuda": _mnk((8192, 8192, 4096)),
        "sim": _mnk((512, 512, 1024)),  # each slot of a ring of operands is used twice or more
        "sweep": _mnk(
            *((size, size, size) for size in (1024, 2048, 4096, 8192, 16384)),
            *((m, 8192, 8192) for m in (16, 64, 256, 1024)),
        ),
        "confirm": _mnk((8192, 8192, 4096), (4096, 4096, 4096)),
    }
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "cublas": PeerKernel("cuBLAS", lambda _: cublas.gemm()),
        "quack": PeerKernel(
            "quack, default config", lambda _: quack.gemm(tuned=False), 15.0, quack.gemm_with
        ),
        # tries all its configs first
        "quack-tuned": PeerKernel("quack, tuned", lambda _: quack.gemm(tuned=True), 150.0),
        "triton-tiles": PeerKernel("Triton, fixed tiles", in_triton.peer("gemm", "tiles"), 5.0),
        "triton-tuned": PeerKernel("Triton, tuned", in_triton.peer("gemm", "tuned"), 30.0),
        "triton-order": PeerKernel("Triton, L2 order", in_triton.peer("gemm", "order"), 30.0),
        "triton-tma": PeerKernel("Triton, TMA, persistent", in_triton.peer("gemm", "tma"), 20.0),
    }
    variants: ClassVar[Mapping[str, str]] = {
        "--scaled": "gemm_scaled", "--fp8": "gemm_fp8", "--grouped": "gemm_grouped",
        "--fp32": "gemm_fp32",
    }  # fmt: skip
    wave_tile = (256, 128)

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    init: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_sizes()
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        unit = self._element.elements(TMA_BYTES)
        for name, size, rows in (("K", self.k, "A and B"), ("N", self.n, "C")):
            if size % unit:
                raise ValueError(
                    f"{name}={size}: must be a multiple of {unit}, "
                    f"because TMA needs the rows of {rows} to be a multiple of {TMA_BYTES} bytes"
                )
        if self.init not in INITS:
            raise ValueError(f"init {self.init!r} is not one of {', '.join(INITS)}")

    @property
    def bytes(self) -> int:
        """The least traffic with global memory, in bytes: A and B read once, C written once."""
        return self._element.bytes(self.m * self.k + self.n * self.k + self.m * self.n)

    @property
    def _element(self) -> DType:
        return ELEMENTS[self.dtype]

    def torch_dtype(self) -> torch.dtype:
        return self._element.torch

    def inputs(
        self, device: str | torch.device = "cpu", copy: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs A (M, K) and B (N, K), row-major, sampled on `device` from the seed.

        int: integers in [-2, 2], whose sums fp32 holds exactly; normal: mean 0, deviation 1;
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
        """The output C (M, N), row-major, every element NaN until a kernel writes it."""
        import torch

        return torch.full((self.m, self.n), torch.nan, dtype=self.torch_dtype(), device=device)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor]:
        return (self.output(device),)

    def reduced(self) -> GemmProblem:
        def less(size: int, most: int) -> int:
            return size if size <= most else most + size % most

        m, n, k = less(self.m, 512), less(self.n, 512), less(self.k, 256)
        return replace(self, m=m, n=n, k=k, init="int")

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare C (M, N) with A @ B^T on the tensors' own device; `tensors` are A, B and C.

        int and zeros: every element equal to the exact product, rounded once to the dtype.
        normal and uniform: the largest and the root-mean-square error against float64 within
        twice those of torch.mm. `tile` (BM, BN) lets a failure name its tile.
        """
        import torch

        a, b, c = tensors

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

    # ---- names and options

    @classmethod
    def size_name(cls, sizes: Sizes) -> str:
        return "x".join(str(sizes[letter]) for letter in "mnk")

    @property
    def series(self) -> dict[str, int]:
        squares = {"M = N = K": self.m} if self.m == self.n == self.k else {}
        return {**squares, f"M, with N = {self.n} and K = {self.k}": self.m}

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        usual, simulated = (
            ",".join(map(str, sizes.values()))
            for device in ("cuda", "sim")
            for sizes in cls.cases[device]
        )
        group.add_argument(
            "--mnk",
            action="append",
            metavar="M,N,K",
            help=f"sizes, may be given several times; default: {usual}, simulated {simulated}",
        )

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        if any(getattr(args, option.removeprefix("--"), None) for option in cls.variants):
            return []  # those of another GEMM
        return [_parsed(text) for text in args.mnk or ()]


def _parsed(text: str) -> Sizes:
    try:
        m, n, k = (int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(f"--mnk {text}: three whole numbers M,N,K are needed") from None
    return {"m": m, "n": n, "k": k}
