"""GEMM in full fp32, as the ladder on CUDA cores computes it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.peers import cublas
from cutex.problem.gemm import GemmProblem, _mnk, _parsed
from cutex.problem.protocol import Check, PeerKernel, Sizes
from cutex.problem.work import Work

if TYPE_CHECKING:
    import torch

OPTION = "--fp32"


@dataclass(frozen=True)
class Fp32GemmProblem(GemmProblem):
    """C[M,N] = A[M,K] @ B[N,K]^T in fp32: multiplied and added by FMA, never as tf32.

    A and B are K-major, C is row-major; any sizes. Raises ValueError for a size below one, an
    unknown dtype or init.
    """

    op = "gemm_fp32"
    title = "fp32 GEMM"
    about = "the GEMM ladder in fp32 on CUDA cores, C = A @ B^T"
    dtypes = ("fp32",)
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        "cuda": _mnk((4096, 4096, 4096)),
        "sim": _mnk((130, 100, 70)),
        "sweep": _mnk(*((size, size, size) for size in (512, 1024, 2048, 4096, 8192))),
        "confirm": _mnk((4096, 4096, 4096), (1024, 1024, 1024)),
    }
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "cublas": PeerKernel("cuBLAS", lambda _: cublas.gemm_fp32()),
    }
    variants: ClassVar[Mapping[str, str]] = {}
    wave_tile = (128, 128)

    dtype: str = "fp32"

    def __post_init__(self) -> None:
        self.check_sizes()
        self.check_names()

    @property
    def needs(self) -> Work:
        return Work(fp32=self.flops, bytes={"hbm": self.bytes})

    def work(self, config: Any) -> tuple[float, float]:
        """No MMAs."""
        return 0.0, 0.0

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare C (M, N) with A @ B^T: integers exactly, others with float64, element by element.

        Each of K sums is rounded by at most 2^-24 of it, evenly spread, so that the errors add up
        to one of deviation 2^-24 / sqrt(3) times the root of the sum of all squared sums. The sums
        of products of random signs are a random walk, whose own deviation in the end is d, the root
        of the sum of the squared products; that root is then at most 0.64 |z| sqrt(K) d, for z from
        a normal distribution (Karhunen-Loeve), and the error that times another one. Of a billion
        pairs the largest product is 22: 2^-24 8 sqrt(K) d.
        """
        if self.init in ("int", "zeros"):
            return super().check(*tensors, tile=tile)
        a, b, c = (x.double() for x in tensors)
        reference = a @ b.T  # (M, N)
        deviation = (a.square() @ b.square().T).sqrt()
        limit = 2.0**-24 * (8 * self.k**0.5 * deviation + reference.abs())
        error = (c - reference).abs()
        bad = ~(error <= limit)  # a NaN too
        largest, allowed = float(error.max()), float(limit.max())
        if not bad.any():
            return Check(True, largest, allowed, f"within {allowed:.3g}")
        i, j = (int(x) for x in bad.nonzero()[0])
        where = f"C[{i}, {j}]"
        if tile is not None:
            where += f" (tile {i // tile[0]}, {j // tile[1]})"
        due = f"{float(reference[i, j]):g}, further off than {float(limit[i, j]):.3g}"
        message = f"{where} is {float(c[i, j]):g} where float64 gives {due}"
        message += f"; {int(bad.sum())} of {bad.numel()} elements are wrong"
        return Check(False, largest, allowed, message)

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        alone = "--mnk" not in group._option_string_actions
        what = f"the sizes are of the {cls.title}"
        group.add_argument(OPTION, action="store_true", default=alone or None, help=what)
        if alone:
            super().add_options(group)

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        return [_parsed(text) for text in args.mnk or ()] if args.fp32 else []
