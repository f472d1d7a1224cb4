"""The choice of a config for a product with a packed weight on Blackwell: the narrowest tile that
has all rows of x, up to 128, with as many slots as fit. Imports neither torch nor the DSL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.choose import rows_class
from cutex.kernels.gemm.w4.sm100.config import W4Sm100Config
from cutex.problem.w4.layout import BLOCK_K, W4Format

WIDTHS = (32, 64, 128)
SLOTS = ((6, 8), (5, 8), (4, 6), (3, 4), (2, 4), (2, 2))  # of A and x, of packed blocks


def configs_for(
    mnk: tuple[int, int, int], of: W4Format, board: str = "", dtype: str = "bf16"
) -> Iterator[W4Sm100Config]:
    """The configs for calls of these sizes, best first, the same on every board, and of x's
    dtypes."""
    arch = arch_named("sm_100a")
    rows = rows_class(mnk[0])
    wide = next((n for n in WIDTHS if n >= rows), WIDTHS[-1])
    base = W4Sm100Config(swap_ab=True, k_bytes=2 * BLOCK_K, format=of, tile_n=wide, epi_n=16)
    for num_stages, num_weights in SLOTS:
        found = replace(base, num_stages=num_stages, num_weights=num_weights, epi_stages=2)
        if found.why_not(None, arch) is None:
            yield found
