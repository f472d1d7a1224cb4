"""The GEMM ladders: the stages of each arch, in order. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutex.arch import PORTABLE
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.sm80.config import Sm80Config
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.problem import stage as stage_of_any
from cutex.problem.gemm import GemmProblem
from cutex.problem.stage import on_each


class Stage(stage_of_any.Stage[GemmProblem, GemmConfig]):
    """A stage of a GEMM ladder."""

    op = "gemm"

    def config_from_row(self, row: dict[str, Any]) -> GemmConfig:
        """The config in a row of a ledger or a cache, written by any version of cutex."""
        return type(self.default).from_row(row)


_IN_ORDER = Sm80Config(num_stages=1)
_THREE = Sm80Config(num_stages=3)
_HOPPER_NARROW = Sm90Config(tile_n=128)
_HOPPER_WIDE = Sm90Config(tile_n=256)
_HOPPER_RING = Sm90Config(tile_n=256, num_stages=4)  # 4 slots of 48 KB fill the smem of an SM
_COOP = replace(_HOPPER_RING, warpgroups=2)
_STMATRIX = replace(_COOP, epi_n=64, epi_stages=2)
_CLUSTER = replace(_STMATRIX, cluster_n=2)
_PINGPONG = Sm90Config(
    tile_n=192, num_stages=5, epi_n=64, epi_stages=1, warpgroups=2, pingpong=True, cluster_m=2
)
_NARROW = Sm100Config(tile_n=128)
_WIDE = Sm100Config(tile_n=256)
_RING = Sm100Config(tile_n=256, num_stages=4)
_SUB_TILES = replace(_RING, epi_n=32, epi_stages=4)
_PAIR = replace(_SUB_TILES, tile_m=256, num_stages=6, pair=True)
_LOOP = replace(_PAIR, num_acc=2)
_BIG = replace(_LOOP, tile_m=512, num_stages=4)  # two accumulators that share B

_STAGES = (
    *on_each(
        PORTABLE,
        Stage(
            0, "", "in order", "cp.async, one unswizzled buffer, mma.sync, each waits", _IN_ORDER
        ),
        Stage(1, "", "swizzle", "ldmatrix reads 8 rows from 8 places of the banks", _IN_ORDER),
        Stage(2, "", "three slots", "copies run ahead, by groups of cp.async", _THREE),
        Stage(3, "", "chosen", "tile and ring per problem", _THREE, True),
    ),
    Stage(0, "sm_90a", "in order", "TMA, one unswizzled buffer, wgmma, each waits", _HOPPER_NARROW),
    Stage(1, "sm_90a", "swizzle", "128-byte swizzle and a 128x256 tile", _HOPPER_WIDE),
    Stage(2, "sm_90a", "ring", "loads run ahead through a ring of smem slots", _HOPPER_RING),
    Stage(3, "sm_90a", "warp roles", "one warp loads, two warpgroups only run wgmma", _HOPPER_RING),
    Stage(
        4, "sm_90a", "register split", "registers move from the load warps to the MMA warps", _COOP
    ),
    Stage(5, "sm_90a", "TMA store", "C leaves through stmatrix, smem and TMA", _STMATRIX),
    Stage(6, "sm_90a", "multicast", "two CTAs load their common tiles of B once", _CLUSTER),
    Stage(7, "sm_90a", "persistent", "one CTA per SM walks the tiles in L2 raster order", _CLUSTER),
    Stage(8, "sm_90a", "ping-pong", "one warpgroup stores while the other computes", _PINGPONG),
    Stage(9, "sm_90a", "chosen", "tile, order, split K, operands per problem", _PINGPONG, True),
    Stage(0, "sm_100a", "in order", "TMA, one unswizzled buffer, tcgen05, each waits", _NARROW),
    Stage(1, "sm_100a", "swizzle", "128-byte swizzle and a 128x256 tile", _WIDE),
    Stage(2, "sm_100a", "ring", "loads run ahead through a ring of smem slots", _RING),
    Stage(3, "sm_100a", "warp roles", "one warp loads, one runs the MMA, four the epilogue", _RING),
    Stage(4, "sm_100a", "TMA store", "the result leaves in sub-tiles, through smem", _SUB_TILES),
    Stage(5, "sm_100a", "pair MMA", "two CTAs run one MMA and share what they load", _PAIR),
    Stage(6, "sm_100a", "persistent", "the epilogue runs under the next tile's mainloop", _LOOP),
    Stage(7, "sm_100a", "raster order", "tiles in bands, so that more of them share L2", _LOOP),
    Stage(8, "sm_100a", "CLC", "the hardware hands out the tiles while the kernel runs", _LOOP),
    Stage(9, "sm_100a", "chosen", "tile, order, split K, operands per problem", _BIG, True),
)

LADDERS = stage_of_any.Ladders("GEMM", _STAGES)
stages, stage = LADDERS.stages, LADDERS.stage
