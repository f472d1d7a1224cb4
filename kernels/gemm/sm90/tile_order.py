"""The order in which the clusters of Hopper's general GEMM kernel take tiles.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import ELEMENT, ceil_div
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.problem.gemm import GemmProblem

if TYPE_CHECKING:
    from cutex.arch import Arch

SMS = arch_named("sm_90a").num_sms  # of an H200 or H100 SXM
BAND = 4  # tiles across a band of those that are placed by GPC
LEAST_SIDE = 512  # of C: below it memory limits
# which are, since to claim a place takes up to a microsecond (docs/facts/gemm.md#by-gpc-alone):
# from this K on, in units of 2 bytes, and this K of all tiles of a CTA; where so large a share of
# SMs has a tile; and where so many bytes are loaded for each product of two elements
PLACED_K, PLACED_STEPS, BUSY, INTENSE = 2800, 3400, 0.8, 0.0244


def in_order(config: Sm90Config) -> Sm90Config:
    """`config`; if its CTAs walk over whole tiles and share B, with an order of tiles in which
    consecutive clusters share A: L2 serves requests that arrive together once
    (docs/facts/gemm.md#neighbours-share). Clusters that share A have that order by default."""
    c = config
    walks = not c.one_tile and c.split_k == 1 and not c.stream_k
    shares_b = c.cluster_m > 1 and c.cluster_n == 1
    return replace(c, raster_along="n") if walks and shares_b else c


def by_gpc(config: Sm90Config, problem: GemmProblem, arch: Arch) -> Sm90Config:
    """`config`; if its CTAs, without clusters, walk over whole tiles of a long K and load more than
    L2 gives each of them, with tiles placed by GPC: SMs of one then work on blocks of tiles, in
    bands along the longer side of C, and L2 answers them together."""
    c = config
    walks = not c.one_tile and c.split_k == 1 and not c.stream_k and c.cluster_m * c.cluster_n == 1
    if c.by_gpc or not walks or arch.num_sms != SMS or problem.k < PLACED_K:
        return c
    m, n = c.computed(problem)
    down, across = ceil_div(m, c.tile_m), ceil_div(n, c.tile_n)
    rounds = ceil_div(down * across, arch.num_sms)
    intense = ELEMENT * (c.tile_m + c.tile_n) >= INTENSE * c.tile_m * c.tile_n
    if down * across < BUSY * SMS or rounds * problem.k < PLACED_STEPS or not intense:
        return c
    if min(down, across) < BAND or min(m, n) < LEAST_SIDE:  # most bytes are for one tile each
        return c
    along = "m" if down >= across else "n"
    return replace(c, by_gpc=True, raster_group=BAND, raster_along=along)


def by_number(config: Sm90Config) -> Sm90Config:
    """`config` with its tiles in the order that its clusters' numbers have."""
    usual = Sm90Config()
    group, along = usual.raster_group, usual.raster_along
    return in_order(replace(config, by_gpc=False, raster_group=group, raster_along=along))
