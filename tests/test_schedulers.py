from __future__ import annotations

from dataclasses import replace

import pytest

from cutex.arch import arch
from cutex.kernels.gemm.config import GemmConfig
from cutex.problem import GemmProblem
from cutex.schedulers.raster import ALONG, Raster, clusters
from cutex.schedulers.spread import first_row

CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


def tiles_in_order(raster: Raster, tiles_m: int, tiles_n: int, cluster: tuple[int, int]):
    """Every tile that some CTA of some cluster works on, edges aside."""
    down, across = clusters(tiles_m, cluster[0]), clusters(tiles_n, cluster[1])
    for index in range(down * across):
        m, n = raster.cluster(index, down, across)
        for i in range(cluster[0]):
            for j in range(cluster[1]):
                tile = m * cluster[0] + i, n * cluster[1] + j
                if tile[0] < tiles_m and tile[1] < tiles_n:
                    yield tile


@pytest.mark.parametrize("group", [3])
def test_every_cluster_of_every_grid_to_40x40_comes_once(group: int) -> None:
    raster = Raster(group)
    for down in range(1, 41):
        for across in range(1, 41):
            seen = {raster.cluster(i, down, across) for i in range(down * across)}
            assert len(seen) == down * across, (down, across)
            assert seen <= {(m, n) for m in range(down) for n in range(across)}


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c[0]}x{c[1]}")
@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("serpentine", [True, False])
def test_every_tile_is_visited_once_whatever_the_cluster(
    serpentine: bool, along: str, cluster: tuple[int, int]
) -> None:
    raster = Raster(5, along, serpentine)
    for tiles_m in (1, 2, 7, 40):
        for tiles_n in (1, 3, 8, 33):
            seen = list(tiles_in_order(raster, tiles_m, tiles_n, cluster))
            assert len(seen) == len(set(seen)) == tiles_m * tiles_n, (tiles_m, tiles_n)


def test_a_band_goes_across_first_then_one_step_along() -> None:
    order = [Raster(group=2, along="m").cluster(i, 4, 3) for i in range(12)]
    assert order[:6] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert order[6:8] == [(2, 2), (3, 2)], "the second band runs backwards"


def test_along_n_is_along_m_with_the_sides_exchanged() -> None:
    for i in range(35):
        m, n = Raster(group=3, along="m").cluster(i, 5, 7)
        assert Raster(group=3, along="n").cluster(i, 7, 5) == (n, m)


def test_spread_tiles_cover_all_rows_wherever_the_config_says_they_do() -> None:
    gpu = replace(arch("sm_90a"), num_sms=6)
    config = GemmConfig(tile_m=64, tile_n=16, warpgroups=1, swap_ab=True, spread=True)
    spread = 0
    for rows in range(8, 600, 8):
        if config.why_not(GemmProblem(16, rows, 64), gpu) is None:
            first = [first_row(i, rows, 6) for i in range(6)]
            assert {r for f in first for r in range(f, f + 64)} >= set(range(rows)), rows
            assert all(f % 8 == 0 for f in first)
            spread += 1
    assert spread == 7, "from seven eighths of 6 tiles on"


def test_a_wave_of_a_square_raster_reads_less_than_rows_in_turn() -> None:
    """132 CTAs of an 8192x8192 C in 128x256 tiles: rows of A and B that a wave needs."""

    def rows(raster: Raster) -> int:
        wave = [raster.cluster(i, 64, 32) for i in range(132)]
        return 128 * len({m for m, _ in wave}) + 256 * len({n for _, n in wave})

    assert rows(Raster(group=16)) < rows(Raster(group=8)) < rows(Raster(group=1)) / 1.5
