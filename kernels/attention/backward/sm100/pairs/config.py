"""The config of the Blackwell backward by pairs of CTAs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from cutex.kernels.attention.backward.config import ELEMENT
from cutex.kernels.attention.backward.sm100.config import ROWS, Sm100BackwardConfig

CTAS = 2
HALF = 64  # queries, or columns, of a CTA's part of an operand


@dataclass(frozen=True)
class PairConfig(Sm100BackwardConfig):
    """The tiling of a pair: `num_stages` slots of LSE and delta, one of everything else."""

    kernel_module: ClassVar[str] = "pairs.backward"

    @property
    def key_ctas(self) -> int:
        return CTAS

    @property
    def smem_bytes(self) -> int:
        once = ROWS * (self.head_dim + self.head_dim_v + self.dk_width)  # K, V, K^T
        halves = HALF * (self.head_dim + self.head_dim_v) * 2  # Q, dO, Q^T, dO^T
        numbers = once + halves + HALF * 3 * ROWS
        return ELEMENT * numbers + self.step_bytes // CTAS + ROWS * 16 * ELEMENT

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        if (self.head_dim, self.head_dim_v) != (128, 128):
            return f"head dim {self.head_dim}/{self.head_dim_v}: pairs of CTAs have 128"
        if not self.folded or self.deterministic or self.persistent or self.tile_m != ROWS:
            return "pairs of CTAs: bf16, no soft cap, not deterministic, 128 queries of a block"
        return super().why_not(problem, arch)


def pairs_of(config: Sm100BackwardConfig) -> PairConfig | None:
    """The config of pairs of CTAs for what `config` computes; None: there is none."""
    values = {x.name: getattr(config, x.name) for x in fields(config)}
    pair = PairConfig(**values | {"late_dk": False, "early_s": False, "persistent": False})
    return None if pair.why_not() else pair
