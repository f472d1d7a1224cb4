from __future__ import annotations

from dataclasses import replace

import pytest

from cutex.arch import arch
from cutex.kernels.gemm.choose import choose, cover, ranked, shortlist
from cutex.kernels.gemm.sm90.config import Sm90Config, placed_unevenly
from cutex.kernels.gemm.sm90.load import Pace
from cutex.problem.gemm import GemmProblem
from cutex.schedulers.dispatch import SelfDispatch, Ticket
from cutex.schedulers.order import SplitOrder, TileCounts
from cutex.schedulers.raster import ALONG, Raster, RasterOrder, clusters
from cutex.schedulers.spread import first_row

CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


def tiles_in_order(raster: Raster, tiles_m: int, tiles_n: int, cluster: tuple[int, int]):
    """All tiles that some CTA of some cluster works on, apart from the edges."""
    down, across = clusters(tiles_m, cluster[0]), clusters(tiles_n, cluster[1])
    for index in range(down * across):
        m, n = raster.cluster(index, down, across)
        for i in range(cluster[0]):
            for j in range(cluster[1]):
                tile = m * cluster[0] + i, n * cluster[1] + j
                if tile[0] < tiles_m and tile[1] < tiles_n:
                    yield tile


@pytest.mark.parametrize("largest", [20, pytest.param(40, marks=pytest.mark.slow)])
def test_every_cluster_of_every_grid_comes_once(largest: int) -> None:
    raster = Raster(3)
    for down in range(1, largest + 1):
        for across in range(1, largest + 1):
            seen = {raster.cluster(i, down, across) for i in range(down * across)}
            assert len(seen) == down * across, (down, across)
            assert seen <= {(m, n) for m in range(down) for n in range(across)}


@pytest.mark.sweep(4)
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


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c[0]}x{c[1]}")
def test_a_batch_is_ordered_entry_by_entry_and_every_tile_comes_once(
    cluster: tuple[int, int],
) -> None:
    raster = Raster(3)
    order = RasterOrder(raster, 5, 4, *cluster, batch=3)
    tiles = [order.tile(i) for i in range(3 * 20)]
    assert len(set(tiles)) == 60
    assert [t.batch for t in tiles] == [0] * 20 + [1] * 20 + [2] * 20
    for i, tile in enumerate(tiles):
        m, n = raster.cluster(i % 20, 5, 4)
        assert (tile.m, tile.n) == (m * cluster[0], n * cluster[1])
        assert (tile.head, tile.split) == (0, 0)


def test_along_n_is_along_m_with_the_sides_exchanged() -> None:
    for i in range(35):
        m, n = Raster(group=3, along="m").cluster(i, 5, 7)
        assert Raster(group=3, along="n").cluster(i, 7, 5) == (n, m)


def test_a_round_is_refused_where_its_clusters_or_the_gpu_do_not_cover_c() -> None:
    h200 = arch("sm_90a")
    config = Sm90Config(tile_m=128, tile_n=64, warpgroups=2, cluster_n=2, swap_ab=True, columns=1)

    def why(m: int, n: int, **changes: object) -> str:
        return replace(config, **changes).why_not(GemmProblem(m, n, 512), h200) or ""

    assert not why(128, 66 * 128) and not why(1, 8)
    assert "64x2 clusters cover C" in why(136, 8192)
    assert "more tiles than 132 CTAs" in why(128, 66 * 128 + 8)
    assert not why(136, 4096, columns=2) and "32x1 clusters" in why(128, 4096, columns=2)
    assert not why(300, 44 * 128, columns=0, rows=3, swap_ab=False, cluster_n=1, tile_n=128)
    assert not why(8192, 128, swap_ab=False), "of what is computed, not of C"
    assert not why(64, 66 * 128, split_k=2, cluster_n=1, num_stages=4)
    assert "more tiles" in why(64, 66 * 128 + 8, split_k=2, cluster_n=1, num_stages=4)
    assert "at most one of the two" in why(128, 8192, rows=1)
    assert "pingpong" in why(128, 8192, pingpong=True)
    assert "sm_100a has another" in (config.why_not(None, arch("sm_100a")) or "")


def test_a_shortlist_has_no_config_twice_and_begins_with_the_choice() -> None:
    for m, n in ((1, 8192), (16, 8192), (128, 8192), (100, 504), (4096, 4096)):
        problem = GemmProblem(m, n, 4096)
        short = shortlist(problem, arch("sm_90a"), 1000)
        assert len(set(short)) == len(short)
        every = ranked(problem, arch("sm_90a"))
        assert short == [c for c in every if not c.workspace], "the ladder passes no workspace"
        assert short[0] == choose(problem, arch("sm_90a"))
    assert choose(GemmProblem(160, 8192, 8192), arch("sm_90a")).columns
    assert choose(GemmProblem(32, 8192, 8192), arch("sm_90a")).spread


def test_few_kernels_cover_many_problems_at_little_loss() -> None:
    times = [{"a": 1.0, "b": 1.1}, {"b": 2.0, "c": 1.9}, {"c": 3.0}]
    assert cover(times, 2) == ["c", "a"]
    assert set(cover(times, 9)) == {"a", "c"}
    with pytest.raises(ValueError, match="1 kernels are too few"):
        cover(times, 1)


def test_spread_tiles_cover_all_rows_wherever_the_config_says_they_do() -> None:
    gpu = replace(arch("sm_90a"), num_sms=6)
    config = Sm90Config(tile_m=64, tile_n=16, warpgroups=1, swap_ab=True, spread=True)
    spread = 0
    for rows in range(8, 600, 8):
        if config.why_not(GemmProblem(16, rows, 64), gpu) is None:
            first = [first_row(i, rows, 6) for i in range(6)]
            assert {r for f in first for r in range(f, f + 64)} >= set(range(rows)), rows
            assert all(f % 8 == 0 for f in first)
            spread += 1
    assert spread == 7, "from seven eighths of 6 tiles on"


def test_a_pace_is_what_memory_gives_and_only_for_what_l2_does_not_hold() -> None:
    pace = Pace(bytes_per_ns=4000, least_bytes=90_000_000)
    rows, k_tile = 8192, 128
    step_bytes = rows * k_tile * 2
    assert pace.step_ns(step_bytes, 64) == 524, "2 MB at 4 TB/s"
    assert pace.step_ns(step_bytes, 90_000_000 // step_bytes) == 0
    assert pace.step_ns(step_bytes, 90_000_000 // step_bytes + 1) == 524
    hopper = Pace.of(arch("sm_90a"), 0.9)
    assert hopper.bytes_per_ns == 0.9 * 4800
    assert hopper.lead_ns(step_ns=200, ring=8) == 1400
    assert hopper.least_bytes > arch("sm_90a").l2_bytes


def test_a_wave_of_a_square_raster_reads_less_than_rows_in_turn() -> None:
    """132 CTAs of an 8192x8192 C in 128x256 tiles: the rows of A and B that a wave reads."""

    def rows(raster: Raster) -> int:
        wave = [raster.cluster(i, 64, 32) for i in range(132)]
        return 128 * len({m for m, _ in wave}) + 256 * len({n for _, n in wave})

    assert rows(Raster(group=16)) < rows(Raster(group=8)) < rows(Raster(group=1)) / 1.5


# SMs with a CTA, K, and whether a kernel is faster if the next one starts at its end: all but the
# last three timed on an H200
STARTED_AT_THE_END = [
    (72, 3584, True), (80, 2048, True), (80, 5120, True), (84, 4096, True), (84, 10752, True),
    (96, 6144, True), (96, 8192, True), (90, 2880, False), (96, 4096, False), (108, 13824, False),
    (112, 7168, False), (120, 5120, False), (32, 4096, False), (16, 28672, False),
]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("ctas", "k", "unevenly"), STARTED_AT_THE_END)
def test_the_next_kernel_starts_early_but_where_it_would_be_placed_unevenly(ctas, k, unevenly):
    assert placed_unevenly(132 - ctas, 132, k) == unevenly


@pytest.mark.parametrize("early", [False, True])
def test_a_warp_that_asks_for_itself_gets_each_of_its_tiles_once(early):
    """In Python ints, like an order: CTA 1 of 3 takes every third tile of 8."""

    class ThirdOnes:
        barriers = ()
        asked = 0

        def first(self):
            return Ticket(1, 0)

        def ask(self, ticket):
            self.asked += 1
            return ticket.index + 3

        def next(self, ticket, asked, total):
            assert total == 8
            return Ticket(asked, ticket.phase)

    source = ThirdOnes()
    dispatch = SelfDispatch(
        SplitOrder(RasterOrder.of(Raster(), TileCounts(2, 2), (1, 1)), 2), source
    )
    ticket, taken = dispatch.first(), []
    while ticket.valid:
        taken.append(dispatch.tile(ticket))
        ticket = dispatch.next(ticket, dispatch.ask(ticket)) if early else dispatch.next(ticket)
    assert taken == [dispatch.order.tile(i) for i in (1, 4, 7)] and source.asked == 3
    assert ticket.moved_to(2).valid and not ticket.moved_to(8).valid
