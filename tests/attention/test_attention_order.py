"""AttentionOrder: every tile once, in every order."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from cutex.arch import arch
from cutex.device.attention.block_info import Blocks
from cutex.kernels.attention.forward.choose import choose, fitted
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.forward import Forward
from cutex.kernels.attention.forward.sm90.parts import MOST, PartsOrder, tail_of
from cutex.kernels.attention.order import AttentionOrder, Wave, wave_of
from cutex.kernels.attention.spec import AttentionSpec, Shape
from cutex.problem.attention import AttentionProblem

SM90 = arch("sm_90a")
LONG = Shape(batch=1, heads_q=16, heads_kv=4, longest_q=16384, longest_k=16384, mean_q=16384)
SIZES = [*itertools.product((1, 2, 7), (1, 3, 8), (1, 2, 5), (1, 2, 4))]


def places(order: AttentionOrder) -> list[tuple[int, int, int]]:
    """(m, head, batch) of every tile, in its turn; the other modes of a work tile are 0."""
    tiles = [order.tile(index) for index in range(order.total)]
    assert not any(tile.n or tile.split for tile in tiles)
    return [(tile.m, tile.head, tile.batch) for tile in tiles]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("l2_rows", [0, 1000, 5000, 1 << 30])
def test_an_order_is_a_bijection(longest_first, l2_rows):
    for num_m_blocks, heads, batch, heads_per_kv in SIZES:
        order = AttentionOrder(
            num_m_blocks, heads, batch, longest_first, 1000, heads_per_kv, l2_rows
        )
        tiles = places(order)
        every = itertools.product(range(num_m_blocks), range(heads), range(batch))
        assert sorted(tiles) == sorted(every)


def test_the_longest_tiles_of_a_group_come_first_and_its_heads_share_l2():
    order = AttentionOrder(
        num_m_blocks=4, heads=6, batch=2, longest_first=True, rows_k=1000, heads_per_kv=2,
        l2_rows=2500,
    )  # fmt: skip
    tiles = places(order)
    group = 2 * 2  # two heads of K and V fit, two heads of Q read each
    for first in range(0, order.total, 4 * group):
        mine = tiles[first : first + 4 * group]
        assert [m for m, _, _ in mine] == sorted((m for m, _, _ in mine), reverse=True)
        assert len({(h // 2, b) for _, h, b in mine}) == 2


def test_without_a_band_the_tiles_of_a_head_follow_one_another():
    order = AttentionOrder(3, 2, 2, False, 1000, 1, 1 << 20)
    tiles = places(order)
    assert tiles[:4] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize("wave", [1, 2, 3, 100])
def test_an_order_in_waves_is_a_bijection(wave):
    for num_m_blocks, heads, batch, heads_per_kv in SIZES:
        for l2_rows in (0, 5000):
            order = AttentionOrder(
                num_m_blocks, heads, batch, True, 1000, heads_per_kv, l2_rows, Wave(wave, 2 * wave)
            )
            every = itertools.product(range(num_m_blocks), range(heads), range(batch))
            assert sorted(places(order)) == sorted(every)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("num_m_blocks", "heads"), [(8, 256), (32, 64), (86, 32), (128, 16), (128, 7), (256, 5)]
)
def test_ctas_end_together_though_few_heads_are_in_work(num_m_blocks, heads):
    """Causal tiles, each taken by the CTA that is free first: the last CTA ends within 2 % of the
    mean, and the heads in work at one time are those of a few waves."""
    ctas = 132
    wave = wave_of(Sm90ForwardConfig(num_ctas=ctas), num_m_blocks)
    assert wave is not None
    order = AttentionOrder(num_m_blocks, heads, 1, True, 1000, 1, 1 << 30, wave)
    free = [0] * ctas
    first: dict[int, int] = {}
    end: dict[int, int] = {}
    for m, head, _ in places(order):
        begin = heapq.heappop(free)
        heapq.heappush(free, begin + m + 1)
        first.setdefault(head, begin)
        end[head] = max(end.get(head, 0), begin + m + 1)
    mean = sum(range(1, num_m_blocks + 1)) * heads / ctas
    assert max(free) <= 1.02 * mean
    assert max(sum(first[h] <= begin < end[h] for h in end) for begin in first.values()) <= (
        2 * wave.units + wave.last
    )


def test_tiles_that_begin_or_end_together_read_the_same_keys():
    """Causal tiles of heads in waves on as many CTAs as a head has tiles: keys are read by half of
    the CTAs at one time if every other wave is taken forwards, by few if none is."""
    ctas = 16
    order = AttentionOrder(ctas, 6, 1, True, 1000, 1, 1 << 30, Wave(1, 2))

    def sharing(is_forwards: Callable[[int], int]) -> float:
        free = [(0, cta) for cta in range(ctas)]
        reads: Counter[tuple[int, int, int]] = Counter()
        for index, (m, head, _) in enumerate(places(order)):
            begin, cta = heapq.heappop(free)
            heapq.heappush(free, (begin + m + 1, cta))
            path = Blocks(0, m + 1, 0, m).path(is_forwards(index))
            reads.update((begin + i, head, path.block(i)) for i in range(m + 1))
        return sum(reads.values()) / len(reads)

    assert (
        sharing(lambda index: AttentionOrder.is_forwards(index, ctas))
        > 3 * sharing(lambda _: 0) / 2
    )


# ---- two CTAs that load for each other


def chosen(shape: Shape, **what) -> Sm90ForwardConfig:
    return fitted(AttentionSpec(**what), shape, SM90)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_two_ctas_share_k_and_v_of_long_sequences(head_dim):
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    config, alone = chosen(LONG, **dims, causal=True), chosen(LONG, **dims, window=(True, False))
    assert config.share and config.why_not(arch=SM90) is None
    assert not alone.share and alone.tile_m == config.tile_m // 2 == config.rows
    assert chosen(LONG, **dims).share == (head_dim != 256)


@pytest.mark.parametrize(
    "shape",
    [
        LONG._replace(longest_q=1024, longest_k=1024, mean_q=1024, batch=16),
        LONG._replace(mean_q=500, batch=100),  # packed, most of them short
        LONG._replace(longest_q=1, mean_q=1, batch=200),
        LONG._replace(heads_q=1, heads_kv=1),  # no more tiles than CTAs
    ],
    ids=["short", "packed", "one query", "few tiles"],
)
def test_each_cta_loads_its_own_elsewhere(shape):
    assert not chosen(shape, causal=True).share
    assert not chosen(LONG, causal=True, score_mod=lambda score, *_: score).share


def test_two_ctas_share_what_l2_does_not_hold_for_few_rows():
    few = Shape(2, 64, 16, 256, 32768, 256)
    assert chosen(few).share
    assert not chosen(few, causal=True).share
    for change in ({"longest_k": 16384}, {"longest_q": 384, "mean_q": 384}, {"mean_q": 200}):
        assert not chosen(few._replace(**change)).share, change
    uneven = Shape(2, 32, 16, 732, 11953, 732)  # six tiles, of which the last is partly empty
    wide = {"head_dim": 256, "head_dim_v": 256}
    assert chosen(uneven, **wide).share
    assert not chosen(uneven._replace(longest_q=640, mean_q=640), **wide).share
    assert not chosen(uneven._replace(longest_q=2048, mean_q=2048), **wide).share


def test_the_tiles_of_two_ctas_have_the_flops_of_their_own_rows():
    problem = AttentionProblem(1, 16384, 16384, 16, 16, 128, 128, causal=True)
    both = choose(problem, SM90)
    alone = replace(both, share=False, tile_m=both.tile_m // 2)
    assert both.share and problem.work(both)[0] == problem.work(alone)[0]
    assert 2 * len(both.key_blocks(problem)) == len(alone.key_blocks(problem))


@pytest.mark.parametrize(("tiles", "steps"), [(1, 40), (5, 32), (140, 40), (1024, 64), (2048, 43)])
@pytest.mark.parametrize("ctas", [1, 2])
def test_parts_of_a_tile_are_all_told_to_the_one_that_completes_it(tiles, steps, ctas):
    config = Sm90ForwardConfig(spread=True, share=ctas == 2, tile_m=128 * ctas)
    parts = PartsOrder(AttentionOrder(*(1,) * 3, False, *(1,) * 3), tail_of(config, tiles, steps))
    assert parts.tail.is_cut
    keeps: dict[int, set[int]] = {}
    told: dict[int, set[int]] = {}
    for number in range(parts.total):
        found = [parts.part(number, which) for which in range(parts.tail.pieces(number))]
        assert [x.is_last for x in found] == [False] * (len(found) - 1) + [True]
        for x in found:
            is_whole = (x.first, x.end) == (0, steps)
            assert (x.word == 0) == is_whole
            if x.end < steps:
                keeps.setdefault(x.index, set()).add(-1 - x.word)
            elif not is_whole:
                share, before = divmod(x.word, MOST)
                told[x.index] = {share - 1 - i for i in range(before)}
    assert told == keeps


def test_tiles_are_cut_where_keys_can_be_taken_apart():
    def chosen(**spec):
        spec = {"head_dim": 128, "head_dim_v": 128, **spec}
        return fitted(AttentionSpec(**spec), replace_shape(batch=4, longest_q=4096), SM90)

    def replace_shape(**sizes):
        return LONG._replace(longest_k=4096, mean_q=4096, **sizes)

    assert chosen().is_cut and not chosen().uncut().is_cut
    for other in ("causal", "sink", "alibi", "varlen_q", "varlen_k", "used_k"):
        assert not chosen(**{other: True}).is_cut
    with pytest.raises(ValueError, match="tiles that see all keys"):
        Forward(replace(chosen(), causal=True))
