"""The fp8 kernel on the ladder's operands: mA (M, K), mB (N, K), their factors, mC (M, N)."""

from __future__ import annotations

from cutlass import cute

from cutex.compile import Operand
from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.kernels.gemm.scaled.fp8.sm90.kernel import Fp8Gemm, Fp8Signature


class Ladder(Fp8Gemm):
    """C[M,N] = A[M,K] @ B[N,K]^T, all row-major."""

    def __init__(self, tiles: Fp8Config) -> None:
        super().__init__(Fp8Signature.of(tiles))

    @property
    def name(self) -> str:
        return "sm90_gemm_fp8_ladder"

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        super().operands(dtype)
        a, b = (
            Operand(name, sizes, "e4m3") for name, sizes in (("mA", ("m", "k")), ("mB", ("n", "k")))
        )
        return a, b, *self.config.factors, Operand("mC", ("m", "n"), "bf16")

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mScaleA: cute.Tensor,
        mScaleB: cute.Tensor,
        mC: cute.Tensor,
        stream,
    ) -> None:
        self.launch(mA, mB, (mScaleA, mScaleB), mC, (), stream)
