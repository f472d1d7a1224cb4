"""The candidate configs of the block-scaled kernel, and their time by the general kernel's model.

A step of K takes the same cycles whatever its elements (docs/time.md), plus those of copying its
scale factors; what it loads counts the factors, too. Imports neither torch nor the DSL.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from cutex.arch import arch as arch_named
from cutex.arch import kernels_of
from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.sm100 import cost_model as general
from cutex.problem.gemm import GemmProblem

if TYPE_CHECKING:
    from cutex.arch import Arch

TILES = (  # tile_m, tile_n, num_acc, split_k
    *((256, n, 2, 1) for n in (64, 96, 128, 160, 192, 224, 256)),
    *((256, n, 1, split) for n in (64, 128, 192, 256) for split in (2, 4)),
    *((128, n, 1, 1) for n in (32, 64, 128)),
)


@lru_cache
def candidates(arch_name: str, a: str, b: str, vector: int) -> tuple[ScaledTiles, ...]:
    """All candidate configs for operands of these dtypes."""
    arch = arch_named(kernels_of(arch_name))
    found: list[ScaledTiles] = []
    for tile_m, tile_n, num_acc, split_k in TILES:
        for swap_ab in (False, True):
            for group in general.GROUPS:
                epi_n = min(general.EPI_N, tile_n // 2)
                config = ScaledTiles(
                    tile_m=tile_m,
                    tile_n=tile_n,
                    epi_n=epi_n,
                    epi_stages=general.epi_stages(tile_n // epi_n),
                    pair=tile_m == 256,
                    num_acc=num_acc,
                    split_k=split_k,
                    swap_ab=swap_ab,
                    raster_group=group,
                    a=a,
                    b=b,
                    vector=vector,
                )
                config = general.deepest(config, arch)
                if config.num_stages > 1 and config.why_not(None, arch) is None:
                    found.append(config)
    return tuple(found)


def predict(c: ScaledTiles, mnk: tuple[int, int, int], arch: Arch, batch: int = 1) -> float:
    """The microseconds that the model predicts for `batch` such products in one launch."""
    m, n, k = mnk
    steps = ceil_div(k, c.k_elements)
    # NOTE: the general model counts K in 2 bytes; a step has as many bytes of a row
    same = GemmProblem(m, ceil_div(n, 8) * 8, steps * c.k_of(16))
    return general.predict(c, same, arch_named(kernels_of(arch.name)), batch)
