"""Block-scaled kernels on drawn operands, exactly: small integers and factors, poisoned padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

import cutex
from cutex.compile import Compiled, compile
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.scaled.sm100.general import Scaled
from cutex.kernels.gemm.scaled.sm100.signature import SWIZZLED, ScaledConfig
from cutex.problem.scaled.layouts import words

FLOATS: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FACTORS = {"e8m0": [0.5, 1, 2], "e4m3": [0.5, 0.75, 1, 1.5]}
NANS = {"e8m0": 0xFF, "e4m3": 0x7F}

PAIR = ScaledTiles(
    tile_m=256, tile_n=128, num_stages=4, epi_n=32, epi_stages=4, pair=True, num_acc=2
)
TILES = {
    "one CTA": ScaledTiles(tile_m=128, tile_n=96, num_stages=4, epi_n=32, epi_stages=4),
    "two accumulators": PAIR,
    "64 columns": replace(PAIR, tile_n=64),
    "192 columns": replace(PAIR, tile_n=192, num_stages=3, epi_stages=2),
    "224 columns": replace(PAIR, tile_n=224, num_stages=3),
    "shared columns": replace(PAIR, tile_n=256, num_stages=3, epi_stages=2),
    "split": replace(PAIR, num_acc=1, split_k=2),
    "swapped": replace(PAIR, tile_n=32, swap_ab=True, epi_n=16),
}
KINDS = {
    "mxfp8": ("e4m3", "e5m2", 32),
    "mxfp4": ("e2m1", "e2m1", 32),
    "nvfp4": ("e2m1", "e2m1", 16),
    "fp8 by fp4": ("e5m2", "e2m1", 32),
    "fp4 by fp8": ("e2m1", "e4m3", 32),
}


@dataclass
class Case:
    """out = A @ B^T of one kind, drawn from `seed`; `majors` say whether K is contiguous."""

    kind: str
    tiles: ScaledTiles
    mnk: tuple[int, int, int]
    batch: int = 0
    majors: tuple[bool, bool] = (True, True)
    out: str = "fp32"
    by_element: bool = False  # out is stored element by element
    seed: int = 0

    @property
    def config(self) -> ScaledConfig:
        a, b, vector = KINDS[self.kind]
        k_of_a, k_of_b = self.majors
        batched = self.batch > 0
        return ScaledConfig(
            a=OperandLayout(a, "row" if k_of_a else "column", batched, scales=SWIZZLED),
            b=OperandLayout(b, "column" if k_of_b else "row", batched, scales=SWIZZLED),
            out=OperandLayout(self.out, batched=batched, tma=not self.by_element),
            tiles=self.tiles.of(a, b, vector),
        )

    def compiled(self, cache: bool = True) -> Compiled:
        return compile(Scaled(self.config), self.config.a.dtype, "sm_100a", cache=cache)

    def operand(self, rows: int, dtype: str, rng: np.random.Generator) -> tuple[Any, ...]:
        """Values in float64, elements, and factors whose padding is NaN."""
        kind, k = self.config.kind, self.mnk[2]
        entries, count = max(self.batch, 1), -(-k // kind.vector)
        numbers = rng.integers(-2, 3, (entries, rows, k)).astype(FLOATS[dtype])
        raw = numbers.view(np.uint8)
        if dtype == "e2m1":
            raw = raw[..., ::2] & 15 | raw[..., 1::2] << 4
        factors = rng.choice(FACTORS[kind.factors], (entries, rows, count))
        each = np.repeat(factors, kind.vector, 2)[:, :, :k]
        tiles = np.full((entries, -(-rows // 128), -(-count // 4), 32, 4, 4), NANS[kind.factors])
        tiles = tiles.astype(np.uint8)
        r, g = np.arange(rows)[:, None], np.arange(count)[None, :]
        of = factors.astype(FLOATS[kind.factors]).view(np.uint8)
        tiles[:, r // 128, g // 4, r % 32, r // 32 % 4, g % 4] = of
        elements = torch.from_numpy(raw.copy()).view(TORCH.get(dtype, torch.uint8))
        return numbers.astype(float) * each, elements, words(torch.from_numpy(tiles))

    def run(self, kernel: Compiled | None = None, **how: Any) -> str | None:
        """Simulate; return a sentence about the first wrong element, or None."""
        m, n, _ = self.mnk
        rng, config = np.random.default_rng(self.seed), self.config
        x, a, factors_a = self.operand(m, config.a.dtype, rng)
        y, b, factors_b = self.operand(n, config.b.dtype, rng)
        want = torch.from_numpy(x @ y.transpose(0, 2, 1)).to(DTYPES[self.out].torch)
        out = torch.full_like(want, torch.nan)
        if not self.batch:
            a, b, out = a[0], b[0], out[0]
        a = aligned(a) if self.majors[0] else turned(a)
        b = aligned(b).mT if self.majors[1] else turned(b).mT
        cutex.simulate(kernel or self.compiled(), a, b, out, factors_a, factors_b, **how)
        wrong = out.view_as(want) != want
        if not wrong.any():
            return None
        at = tuple(int(i) for i in wrong.nonzero()[0])
        return f"{at}: {float(out.view_as(want)[at])} instead of {float(want[at])}"


def aligned(x: Tensor) -> Tensor:
    """x in memory from a multiple of 128 bytes on."""
    memory = torch.empty(x.numel() * x.element_size() + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 128
    found = memory[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
    return found.copy_(x)


def turned(x: Tensor) -> Tensor:
    """x with the other of its last two modes contiguous."""
    return x.view(torch.uint8).mT.contiguous().mT.view(x.dtype)
