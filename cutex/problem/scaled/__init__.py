"""GEMM of operands with scale factors: sizes, data, reference, tolerance, work.

C = A @ B^T of the values of quantized A (M, K) and B (N, K), in bf16. A problem's dtype is a recipe
(formats.py), the formats of A and B. Two operators share this: `gemm_scaled`, whose scale factors
tensor cores read (Blackwell), and `gemm_fp8`, whose fp32 factors the kernel multiplies with
(Hopper).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.arch import mma_kind
from cutex.dtypes import DTYPES as ELEMENTS
from cutex.peers import scaled_gemm
from cutex.problem.gemm import _mnk, _parsed
from cutex.problem.product import ProductProblem
from cutex.problem.protocol import Check, Launch, PeerKernel, Sizes
from cutex.problem.scaled.formats import BLOCK_SCALED, FP32_SCALED, RECIPES, Format, Recipe
from cutex.problem.truncation import FP8_BITS, largest_loss
from cutex.problem.work import Work

if TYPE_CHECKING:
    import torch

INITS = ("int", "normal", "uniform", "zeros", "spread")
TMA_BYTES = 16
OUT = ELEMENTS["bf16"]
PROMOTED_K = 128  # Hopper's sums are added up in fp32 after each so many of K
# bits that tensor cores keep below the largest of the products and the sum that they add up at a
# time: Hopper's fp8 (cutex/sim/numerics/fp8_sum.py), and Blackwell's scaled kinds, all of fp32
KEPT = {"gemm_fp8": FP8_BITS, "gemm_scaled": 22}
_TORCH = PeerKernel("torch (cuBLASLt)", scaled_gemm.cublaslt)


@dataclass(frozen=True)
class ScaledProblem(ProductProblem):
    """C[M,N] = A[M,K] @ B[N,K]^T of scaled operands, C in bf16.

    A and B are K-major, two elements of fp4 to a byte; C is row-major. K is a multiple of what TMA
    can stride, 16 bytes, and need not be one of a block. Raises ValueError for other sizes, an
    unknown recipe or family of data.
    """

    title = "scaled GEMM"
    inits = INITS
    size_options = ("--mnk",)
    wave_tile = (256, 128)
    recipes: ClassVar[Mapping[str, Recipe]]
    option: ClassVar[str]  # of commands that take the sizes of several operators

    m: int
    n: int
    k: int
    dtype: str = ""  # a recipe; the default is the operator's first
    init: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.dtype:
            object.__setattr__(self, "dtype", self.dtypes[0])
        self.check_sizes()
        if self.dtype not in self.recipes:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(self.recipes)}")
        unit_k = max(f.dtype.elements(TMA_BYTES) for f in self.recipe)
        unit_n = OUT.elements(TMA_BYTES)
        for name, size, unit, of in (
            ("K", self.k, unit_k, "A and B"),
            ("N", self.n, unit_n, "C"),
        ):
            if size % unit:
                raise ValueError(
                    f"{name}={size}: must be a multiple of {unit}, "
                    f"because TMA needs the rows of {of} to be a multiple of {TMA_BYTES} bytes"
                )
        if self.init not in INITS:
            raise ValueError(f"init {self.init!r} is not one of {', '.join(INITS)}")

    @property
    def recipe(self) -> Recipe:
        """The formats of A and B."""
        return RECIPES[self.dtype]

    @property
    def bytes(self) -> int:
        """The least traffic: A and B with their scale factors read once, C written once."""
        a, b = self.recipe
        return a.bytes(self.m, self.k) + b.bytes(self.n, self.k) + OUT.bytes(self.m * self.n)

    @property
    def needs(self) -> Work:
        """MMAs of one kind, of fp8 if an operand is; with fp32 factors of blocks, an FMA for each
        element of C and block of K besides."""
        a, b = self.recipe
        element = a.element if a.element != "e2m1" else b.element
        fp32 = 0.0
        if not a.swizzled and a.block[1]:
            fp32 = 2.0 * self.m * self.n * -(-self.k // a.block[1])
        return Work({mma_kind(element, a.swizzled): self.flops}, fp32, bytes={"hbm": self.bytes})

    def step_k(self, config: Any) -> int:
        step: int = config.k_of(max(f.dtype.bits for f in self.recipe))
        return step

    # ---- data and judgement

    def operands(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[Any, Any]:
        """A and B (quantization.Quantized), with plain scale factors, sampled from the seed.

        int: integers in [-2, 2], and factors of 1/2, 1 and 2 sampled one by one, so that fp32 holds
        every sum exactly. normal (deviation 1), uniform ([-1, 1)) and zeros: values in bf16,
        quantized. spread: normal, with every eighth of K in turn scaled by 2^-6 to 2^6, and rows
        likewise, so that neighbouring factors differ.
        """
        import torch

        generator = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy)
        return tuple(
            self._drawn(format, rows, generator, device)
            for format, rows in zip(self.recipe, (self.m, self.n), strict=True)
        )

    def _drawn(
        self, format: Format, rows: int, generator: torch.Generator, device: str | torch.device
    ) -> Any:
        import torch

        from cutex.problem.scaled.quantization import (
            Quantized,
            pack,
            quantize,
            to_e2m1,
            to_fp8,
        )

        x = torch.zeros((rows, self.k), device=device)
        match self.init:
            case "int":
                x.random_(-2, 3, generator=generator)
                data = pack(to_e2m1(x)) if format.element == "e2m1" else to_fp8(x, format)
                exponent = torch.randint(-1, 2, format.factors(rows, self.k), generator=generator,
                                         device=device)  # fmt: skip
                scale = torch.exp2(exponent.float()).to(ELEMENTS[format.scale].torch)
                own = torch.full((), 0.5, device=device) if format.tensor_scale else None
                return Quantized(format, data, scale, own)
            case "normal" | "spread":
                x.normal_(generator=generator)
            case "uniform":
                x.uniform_(-1, 1, generator=generator)
        if self.init == "spread":
            for side, size in enumerate(x.shape):
                power = torch.randint(-6, 7, (-(-size // 8),), generator=generator, device=device)
                power = power.repeat_interleave(8)[:size].float()
                x *= torch.exp2(power).unsqueeze(1 - side)
        return quantize(x.bfloat16(), format)

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor, ...]:
        """A and B, their scale factors in the layouts that kernels read (layouts.py), and, with a
        tensor's own factor, those of A and B, of shape (1,)."""
        from cutex.problem.scaled.layouts import stored

        both = self.operands(device, copy)
        scales = [stored(q.scale, q.format) for q in both]
        own = [q.tensor_scale.reshape(1) for q in both if q.tensor_scale is not None]
        return (*(q.data for q in both), *scales, *own)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor]:
        import torch

        return (torch.full((self.m, self.n), torch.nan, dtype=OUT.torch, device=device),)

    def reduced(self) -> ScaledProblem:
        def less(size: int, most: int) -> int:
            return size if size <= most else most + size % most

        m, n, k = less(self.m, 512), less(self.n, 512), less(self.k, 512)
        return replace(self, m=m, n=n, k=k, init="int")

    def values(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The values of A (M, K) and B (N, K) in float64, of the tensors that `inputs` gives."""
        import torch

        from cutex.problem.scaled.layouts import plain
        from cutex.problem.scaled.quantization import Quantized, dequantize

        found, own = [], iter(tensors[4:])
        for i, (format, rows) in enumerate(zip(self.recipe, (self.m, self.n), strict=True)):
            scale = plain(tensors[2 + i], format, rows, self.k)
            of_tensor = next(own) if format.tensor_scale else None
            q = Quantized(format, tensors[i], scale, of_tensor)
            found.append(dequantize(q, torch.float64))
        return found[0], found[1]

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare C (M, N), the last of `tensors`, with the product of the quantized operands in
        float64.

        int and zeros: every element equal to the exact product, rounded once. Others: within
        `tolerance`, element by element. `tile` lets a failure name its tile.
        """
        import torch

        *inputs, c = tensors
        a, b = self.values(inputs)
        reference = a @ b.mT  # (M, N)
        exact = self.init in ("int", "zeros")
        if exact:
            reference, limit = reference.to(c.dtype).double(), torch.zeros_like(reference)
        else:
            limit = self.tolerance(a, b, reference)
        error = (c.double() - reference).abs()  # (M, N)
        bad = ~(error <= limit)  # a NaN too
        largest, allowed = float(error.max()), float(limit.max())
        if not bad.any():
            return Check(True, largest, allowed, "exact" if exact else f"within {allowed:.3g}")
        i, j = (int(x) for x in bad.nonzero()[0])
        where = f"C[{i}, {j}]"
        if tile is not None:
            where += f" (tile {i // tile[0]}, {j // tile[1]})"
        if c[i, j].isnan():
            what = "is NaN: never written, or computed from poison"
        else:
            due = f"{float(reference[i, j]):g} was due, within {float(limit[i, j]):.3g}"
            what = f"is {float(c[i, j]):g}, {due}"
        message = f"{where} {what}; {int(bad.sum())} of {bad.numel()} elements are wrong"
        return Check(False, largest, allowed, message)

    def tolerance(self, a: torch.Tensor, b: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """The largest error of each element of C (M, N).

        Half a unit of the output's last place, and what tensor cores lose in adding up
        (truncation.py), `KEPT` bits below the largest of what they add.
        """
        import torch

        deviation = (a.square() @ b.square().mT).sqrt()
        # NOTE: with promotion a sum begins anew at each block; without, it has grown to all of K
        block_k = PROMOTED_K if self.promoted else None
        lost = largest_loss(reference, deviation, self.k, KEPT[self.op], block_k)
        # of bf16, half a unit is 2^-9 of the power of two above
        half = torch.ldexp(torch.ones_like(lost), (reference.abs() + lost).frexp().exponent - 9)
        return half + lost

    @property
    def promoted(self) -> bool:
        """Whether sums are added up in fp32 after each block of K."""
        a, _ = self.recipe
        return not a.swizzled and a.block[1] > 0

    # ---- names and options

    @classmethod
    def size_name(cls, sizes: Sizes) -> str:
        return "x".join(str(sizes[letter]) for letter in "mnk")

    @property
    def series(self) -> dict[str, int]:
        return {f"M, with N = {self.n} and K = {self.k}": self.m}

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        """Add the operator's own option and, unless the parser has them, those of sizes."""
        alone = "--mnk" not in group._option_string_actions
        what = f"the sizes are of the {cls.title}"
        group.add_argument(cls.option, action="store_true", default=alone or None, help=what)
        if alone:
            group.add_argument(
                "--mnk", action="append", metavar="M,N,K", help="sizes, may be given several times"
            )

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        mine = getattr(args, cls.option.removeprefix("--"))
        return [_parsed(text) for text in args.mnk or ()] if mine else []


@dataclass(frozen=True)
class BlockScaledProblem(ScaledProblem):
    """A scaled GEMM whose scale factors tensor cores read: MXFP8, MXFP4, NVFP4 and mixtures."""

    op = "gemm_scaled"
    option = "--scaled"
    title = "block-scaled GEMM"
    about = "the block-scaled GEMM ladder, C = A @ B^T of MXFP8, MXFP4 or NVFP4"
    recipes = BLOCK_SCALED
    dtypes = tuple(BLOCK_SCALED)
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        "cuda": _mnk((8192, 8192, 4096)),
        "sim": _mnk((512, 512, 1024)),
        "sweep": _mnk(*((size, size, size) for size in (2048, 4096, 8192, 16384))),
        "confirm": tuple(
            {**sizes, "dtype": dtype}
            for dtype in ("mxfp8", "nvfp4")
            for sizes in _mnk((8192, 8192, 4096), (4096, 4096, 4096))
        ),
    }
    peers: ClassVar[Mapping[str, PeerKernel]] = {"torch": _TORCH}

    def launcher(self, kernel: Launch, arguments: Sequence[str]) -> Launch:
        import torch

        from cutex.problem.scaled.layouts import words

        def elements(x: torch.Tensor) -> torch.Tensor:
            return x.view(torch.uint8) if x.dtype == torch.float4_e2m1fn_x2 else x

        def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> object:
            scale_a, scale_b, *own, out = rest
            given = {"a": elements(a), "b": elements(b).mT, "out": out}
            given |= {"factors_a": words(scale_a), "factors_b": words(scale_b)}
            given |= dict(zip(("tensor_scale_a", "tensor_scale_b"), own, strict=False))
            return kernel(*(given[name] for name in arguments))

        return launch


@dataclass(frozen=True)
class Fp8Problem(ScaledProblem):
    """A GEMM of e4m3 whose fp32 scale factors the kernel multiplies with, DeepSeek's recipe."""

    op = "gemm_fp8"
    option = "--fp8"
    title = "fp8 GEMM"
    about = "the GEMM ladder of fp8 with fp32 scale factors of blocks, C = A @ B^T"
    recipes: ClassVar[Mapping[str, Recipe]] = {
        name: FP32_SCALED[name] for name in ("fp8_block", "fp8_1x128")
    }
    dtypes = tuple(recipes)
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        "cuda": _mnk((8192, 7168, 4096)),
        "sim": _mnk((256, 256, 1024)),
        "sweep": _mnk(
            (4096, 24576, 1536), (4096, 7168, 2048), (4096, 7168, 16384), (4096, 4096, 7168),
            (8192, 7168, 4096), (1024, 4096, 7168), (128, 4096, 7168), (64, 7168, 2048),
        ),
        "confirm": _mnk((4096, 7168, 16384), (64, 7168, 2048)),
    }  # fmt: skip
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "deepgemm": PeerKernel("DeepGEMM", scaled_gemm.deep_gemm, 20.0),
        "torch": _TORCH,
    }
