"""The config of the kernel of unaligned operands. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutex.kernels.gemm.sm90.config import Sm90Config

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.layouts import Signature

TILE_K = (
    64  # elements: four wgmmas, whose operands A the threads rotate among themselves (sm90/mma.py)
)
FOLDS = (8, 16)  # rows of K that are one row of the tensor map


@dataclass(frozen=True)
class UnalignedConfig(Sm90Config):
    """An Sm90Config whose first operand has any pitch, and is the MMA's operand A from
    registers."""

    fold: int = 16  # out of FOLDS: what divides K

    @property
    def box_columns(self) -> int:
        """The elements of a row of A in smem: those of a tile, wherever it starts between multiples
        of `fold`."""
        return self.tile_m + self.fold

    @property
    def a_stage_bytes(self) -> int:
        return self.box_columns * self.k_bytes

    @property
    def b_bytes(self) -> int:
        """Bytes of B in the whole ring."""
        return self.num_stages * self.tile_n * self.k_bytes

    @property
    def a_bytes(self) -> int:
        """Bytes of the ring that may hold other CTAs' sums: B's, which only wgmmas read."""
        return self.b_bytes

    @property
    def stage_bytes(self) -> int:
        return self.a_stage_bytes + self.tile_n * self.k_bytes

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        if self.fold not in FOLDS or self.k_of(16) != TILE_K:
            return f"fold={self.fold}, k_bytes={self.k_bytes}: 8 or 16, and {2 * TILE_K}"
        if self.tile_m != 64 * self.warpgroups:
            return f"tile_m={self.tile_m}: 64 for each of the warpgroups of an unaligned operand"
        if self.swap_ab or self.pingpong or self.spread or self.cluster_n > 1 or self.box_rows:
            return "swap_ab, pingpong, spread, cluster_n, box_rows: not with an unaligned operand"
        return super().why_not_arch(arch, epi_parts)

    def _why_not_split(self, epi_parts: int) -> str | None:
        if self.split_k > 1 and self.sums_bytes(epi_parts) > self.b_bytes:
            return f"split_k={self.split_k}: the {self.b_bytes} bytes of B must hold the sums"
        return super()._why_not_split(epi_parts)

    def why_not_signature(self, signature: Signature) -> str | None:
        if signature.a.fold != self.fold or signature.out.batched:
            return f"fold={self.fold}: of a matrix whose rows of K are folded so"
        return self._why_not_stored(signature)
