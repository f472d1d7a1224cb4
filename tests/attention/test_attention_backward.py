"""Gradients by the Hopper backward's kernels, simulated, against autograd in float64."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from attention_gradients import cancels, definition, far_off, terms, upstream, wide
from flash_attn_calls import call

import cutex
from cutex.device.attention.block_info import Band, BlockInfo
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.kernels.attention.backward.choose import fitted
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.signature import KernelArgs
from cutex.kernels.attention.backward.tiles import (
    HeadParts,
    LastParts,
    Rotation,
    Sizes,
    Tile,
    key_block,
    most_tiles,
    tile_order,
    tiles_ahead,
)
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.kernels.attention.tail import Ramp, RampTail, Tail, spare_sums
from cutex.ops.attention import key_tiles, own_backward
from cutex.ops.attention.call import AttentionCall
from cutex.problem.attention.case import AttentionCase
from cutex.problem.attention.randomized import draw

UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def errors(
    case: AttentionCase,
    of_lse: bool = False,
    order: str = "fifo",
    seed: int = 0,
    device: str = "cpu",
    arch: str = "sm_90a",
    **options,
) -> list[str]:
    """What is wrong with the gradients of the case, on a GPU or simulated."""
    inputs = case.inputs(device)
    leaves = [
        None if x is None else x.detach().requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v, inputs.sink)
    ]
    mine = inputs._replace(q=leaves[0], k=leaves[1], v=leaves[2], sink=leaves[3])
    grads = [None if x is None else x.to(device) for x in upstream(case, seed + 1, of_lse)]
    where = cutex.ops.simulated(arch, order=order, seed=seed)
    with where if device == "cpu" else nullcontext():
        out, lse = call(case, mine, **options)
        torch.autograd.backward([out, lse][: 1 + of_lse], [x for x in grads if x is not None])
    exact = wide(type(inputs)(*(x if x is None else x.cpu() for x in inputs)))
    results = definition(case, exact)[: 1 + of_lse]
    torch.autograd.backward(
        results, [x.cpu().double().nan_to_num() for x in grads if x is not None]
    )
    found = []
    sums = terms(case, exact, grads[0].cpu().double().nan_to_num())
    for name, x in zip(("q", "k", "v", "sink"), leaves, strict=True):
        if x is not None:
            unit = 2 * UNIT[case.dtype] + 2.0**-9 * bool(case.softcap)
            want, of = getattr(exact, name).grad, sums[name]
            if case.init == "normal" and name != "sink" and not cancels(want, of):
                of = None  # what is exact of Gaussian data is judged without a floor
            message = far_off(x.grad.cpu(), want, unit, of)
            found += [f"d{name}: {message}"] if message else []
    return found


CASES = {
    "full": {},
    "causal": {"causal": True, "seqlen_q": 200, "seqlen_k": 330},
    "more queries than keys": {"causal": True, "seqlen_q": 300, "seqlen_k": 100},
    "window": {"window": (40, 20), "seqlen_q": 150, "seqlen_k": 150},
    "left window": {"window": (17, None), "seqlen_q": 65, "seqlen_k": 257, "dtype": "fp16"},
    "before the diagonal": {"window": (120, -30), "seqlen_q": 150, "seqlen_k": 210},
    "after the diagonal": {"window": (-30, None), "seqlen_q": 150, "seqlen_k": 90},
    "grouped heads": {"heads_q": 3, "heads_kv": 1, "seqlen_q": 70, "causal": True},
    "a batch of views": {"batch": 2, "views": ("interleaved", "shifted", "heads first")},
    "softcap": {"softcap": 3.0, "seqlen_q": 70, "seqlen_k": 140, "causal": True},
    "sink": {"sink": True, "heads_q": 2, "heads_kv": 2, "window": (4, None)},
    "packed": {"lengths_q": (12, 0, 130), "lengths_k": (7, 30, 200), "causal": True, "tail": 3},
    "packed, unused rows": {
        "lengths_q": (70, 9), "lengths_k": (80, 30), "used_q": (66, 9), "used_k": (80, 20),
    },
    "used": {"batch": 2, "seqlen_q": 90, "used_q": (65, 90), "used_k": (100, 0)},
}  # fmt: skip


def case_of(name: str, **more) -> AttentionCase:
    fields = {"heads_q": 1, "heads_kv": 1, **CASES[name], **more}
    batch = len(fields.get("lengths_q", fields.get("used_k", (0,))))
    return AttentionCase(**{"batch": batch, **fields})


@pytest.mark.sweep(48)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name):
    dims = HEAD_DIMS[list(CASES).index(name) % len(HEAD_DIMS)]
    case = case_of(name, head_dim=dims[0], head_dim_v=dims[1])
    assert errors(case, of_lse=name != "full") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["full", "causal", "window", "left window", "after the diagonal", "packed"]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic_gradients_are_right(name, dim):
    """CTAs wait for each other; none waits for one that never comes."""
    case = case_of(
        name, head_dim=dim, head_dim_v=dim, **{} if name == "packed" else {"seqlen_k": 300}
    )
    assert errors(case, order="random", seed=4, deterministic=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic_adds_come_in_one_order(dim):
    """Under any order of CTAs the bits are the same."""
    sizes = {"seqlen_q": 70, "seqlen_k": 300, "head_dim": dim, "head_dim_v": dim}
    case = AttentionCase(heads_q=1, heads_kv=1, **sizes)
    found = []
    for seed in range(2):
        q, k, v = (x.detach().requires_grad_() for x in case.inputs()[:3])
        with cutex.ops.simulated("sm_90a", order="random", seed=seed):
            out = cutex.flash_attn_func(q, k, v, deterministic=True)
            out.backward(torch.ones_like(out))
        found.append(q.grad)
    assert all(torch.equal(found[0], x) for x in found[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "dims"), list(zip(("random", "starved", "eager"), HEAD_DIMS[::2], strict=True))
)
def test_gradients_under_other_orders(order, dims):
    case = case_of("causal", head_dim=dims[0], head_dim_v=dims[1])
    assert errors(case, order=order, seed=3) == []


BETWEEN = [(64, 128), *(pytest.param(x, marks=pytest.mark.slow) for x in ((40, 40), (136, 72)))]


@pytest.mark.slow
@pytest.mark.parametrize("dims", BETWEEN, ids=str)
def test_gradients_of_head_dims_between_those_of_kernels(dims):
    """Columns that the tensors do not have are read as 0, and not written."""
    case = case_of("packed", head_dim=dims[0], head_dim_v=dims[1], softcap=2.0)
    assert errors(case, of_lse=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("kernel", range(38))
def test_randomized_cases(kernel):
    for number in range(4):
        case = draw(4 * kernel + number, largest=7.5, most_work=2**22, kernel=kernel)
        order = ("fifo", "random", "starved", "eager")[number]
        assert errors(case, number % 2 == 1, order, seed=number) == [], case


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", range(100))
def test_four_hundred_randomized_cases(kernel):
    for number in range(4):
        case = draw(4 * kernel + number, largest=9, kernel=kernel)
        options = {"deterministic": number == 3}
        assert errors(case, number % 2 == 1, device="cuda", **options) == [], case


BANDS = [
    Band(), Band(None, 0), Band(None, 30), Band(-70, None), Band(-150, 0), Band(-3, 90),
    Band(None, -100), Band(70, 130), Band(64, None),
]  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("band", BANDS)
def test_key_blocks_that_add_to_a_tile_of_dq_are_those_that_take_its_queries(band):
    """Else a deterministic CTA would wait for a turn that nobody passes on."""
    info = BlockInfo(64, 128, band)
    for seqlen_q, seqlen_k in ((1, 1), (64, 700), (700, 64), (333, 333), (300, 515), (129, 1000)):
        m_blocks, n_blocks = info.num_m_blocks(seqlen_q), info.num_n_blocks(seqlen_k)
        taken = [info.m_blocks(n, seqlen_q, seqlen_k) for n in range(n_blocks)]
        for m in range(m_blocks):
            adding = info.n_blocks(m, seqlen_q, seqlen_k)
            mine = [n for n in range(n_blocks) if taken[n].first <= m < taken[n].end]
            assert mine == list(range(adding.first, adding.end)), (seqlen_q, seqlen_k, m)


@pytest.mark.parametrize("causal", [False, True])
def test_sums_are_zeroed_by_tiles_that_are_handed_out_before_those_that_add(causal):
    """Else a CTA could wait for one that never comes."""
    config = fitted(BackwardConfig(causal=causal))
    assert config.late_zeros
    for num_n_blocks, units in ((1, 400), (8, 60), (8, 34), (32, 64), (100, 7), (128, 6)):
        sizes = Sizes(units, 1, 0, 0, num_n_blocks, 1)
        order, ahead = tile_order(config, sizes), tiles_ahead(config, sizes)
        first: dict[int, int] = {}  # the first tile of a unit
        for index in reversed(range(order.total)):
            first[order.tile(index).head] = index
        assert all((unit + 1) * num_n_blocks - ahead <= first[unit] for unit in first)


def ramp_tail(rows_q, rows_k, tile_m, units, group=3):
    """The tail of a causal call, all of whose tiles are cut."""
    count, blocks = -(-rows_k // 128), -(-rows_q // tile_m)
    ramp = Ramp(count, blocks, group, rows_k - rows_q, tile_m, 128)
    return RampTail(count * units, ramp.before(count), ctas=132, least=2, cost=1, ramp=ramp)


TAILS = {
    f"{tiles} of {steps}": Tail(tiles, steps, ctas=132, least=2, cost=1)
    for tiles in (1, 5, 131, 132, 200, 4096)
    for steps in (1, 7, 32)
} | {
    f"{rows_q} on {rows_k} by {tile_m}": ramp_tail(rows_q, rows_k, tile_m, units)
    for rows_q, rows_k, units in ((1, 1, 1), (130, 4000, 2), (4000, 4000, 5), (900, 250, 7))
    for tile_m in (64, 128)
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", TAILS)
def test_shares_of_the_last_tiles_hold_each_step_once(name):
    tail = TAILS[name]
    taken: dict[int, list[tuple[int, int]]] = {}
    kept = []  # shares whose sums another adds
    for number in range(tail.total):
        for which in range(tail.pieces(number)):
            piece = tail.piece(number, which)
            taken.setdefault(piece.index, []).append((piece.first, piece.end))
            kept += [number - tail.whole] * (piece.end < tail.steps_of(piece.index))
    assert len(set(kept)) == len(kept)
    assert max(kept, default=-1) < spare_sums(tail)
    assert sorted(taken) == list(range(tail.tiles))
    for index, pieces in taken.items():
        ends = [0, *(end for _, end in sorted(pieces))]
        assert sorted(pieces) == list(pairwise(ends))
        assert ends[-1] == tail.steps_of(index)


# batch, queries, keys, heads, heads of K and V, head dim, causal: the kernel's head dim, and
# whether its tiles are cut
CUT = {
    (1, 8192, 8192, 8, 1, 128, True): (128, True),
    (4, 4096, 4096, 16, 16, 128, True): (128, False),
    (1, 4096, 4096, 32, 4, 64, True): (64, True),
    (1, 4096, 4096, 8, 8, 64, True): (64, False),
    (1, 3000, 3000, 12, 3, 96, False): (128, True),
    (1, 4096, 4096, 16, 4, 96, True): (128, True),
    (4, 4096, 4096, 16, 16, 96, True): (96, False),
    (1, 200, 330, 1, 1, 96, True): (96, False),
}


@pytest.mark.parametrize("sizes", CUT)
def test_few_tiles_are_cut(sizes):
    batch, rows_q, rows_k, heads, heads_kv, dim, causal = sizes
    memory = torch.empty(1, dtype=torch.bfloat16)
    q = memory.expand(batch, rows_q, heads, dim)
    k = memory.expand(batch, rows_k, heads_kv, dim)
    with cutex.ops.simulated("sm_90a"):
        c = own_backward.config_for(AttentionCall(q, k, k, causal=causal), dlse=False)
    assert (c.head_dim, c.spread) == CUT[sizes]


# head dims, heads, heads of K and V, what else: the parts that tiles of keys are divided into, and
# in how many ranges of queries
DIVIDED = {
    ((128, 128), 8, 1, "packed"): 8,
    ((128, 128), 7, 1, "packed"): 7,
    ((128, 128), 1, 1, "packed"): (6, 6),
    ((128, 128), 1, 1, "one order"): 1,
    ((64, 64), 2, 2, "packed"): (3, 3),
    ((192, 192), 3, 1, ""): 3,
    ((256, 256), 1, 1, ""): (3, 3),
    ((128, 128), 8, 2, "window"): 2,
    ((64, 64), 8, 1, "window"): 4,
    ((128, 128), 8, 8, "packed"): 1,
    ((128, 128), 8, 1, "one order"): 8,
    ((256, 256), 8, 1, ""): 4,
    ((192, 128), 8, 8, ""): 1,
    ((96, 96), 8, 1, "window"): 4,
    ((128, 128), 8, 1, "soft cap"): 8,
    ((192, 192), 16, 2, "batch of 4"): 4,
    ((256, 256), 16, 2, "batch of 4"): 1,
}


@pytest.mark.parametrize("of", DIVIDED, ids=str)
def test_work_is_divided_where_tiles_are_few(of):
    dims, heads, heads_kv, what = of
    memory, rows = torch.empty(1, dtype=torch.bfloat16), 4096
    start = (rows,) if what == "packed" else (4 if what == "batch of 4" else 1, rows)
    q, k, v = (
        memory.expand(*start, n, d)
        for n, d in ((heads, dims[0]), (heads_kv, dims[0]), (heads_kv, dims[1]))
    )
    more = {"window_size": (512, 0)} if what == "window" else {"causal": True}
    more |= {"softcap": 3.0} if what == "soft cap" else {}
    if what == "packed":
        cu = torch.tensor([0, rows], dtype=torch.int32)
        more |= {f"cu_seqlens_{x}": cu for x in "qk"} | {f"max_seqlen_{x}": rows for x in "qk"}
    with cutex.ops.simulated("sm_90a"):
        call = AttentionCall(q, k, v, deterministic=what == "one order", **more)
        c = own_backward.config_for(call, dlse=False)
    parts = key_tiles.parts_of(call, c) if c.head_parts else key_tiles.Parts()
    found = (parts.total, parts.ranges) if parts.ranges > 1 else parts.total
    assert (c.head_dim, found, c.why_not()) == (dims[0], DIVIDED[of], None)


# batch, queries, keys, heads, heads of K and V, head dim: the parts that tiles of the last round
# are divided into
LAST = {
    (1, 2697, 2806, 4, 4, 192): 3,
    (1, 1984, 1984, 8, 8, 192): 1,
    (4, 4096, 4096, 8, 8, 192): 1,
    (1, 3000, 3000, 6, 6, 96): 6,
    (2, 1100, 1500, 6, 3, 256): 6,
    (1, 807, 807, 10, 10, 192): 3,  # 130 tiles of 64 keys, but 70 pairs of CTAs
}


@pytest.mark.parametrize("sizes", LAST)
def test_tiles_of_the_last_round_are_divided(sizes):
    batch, rows_q, rows_k, heads, heads_kv, dim = sizes
    memory = torch.empty(1, dtype=torch.bfloat16)
    q = memory.expand(batch, rows_q, heads, dim)
    k = memory.expand(batch, rows_k, heads_kv, dim)
    with cutex.ops.simulated("sm_90a"):
        call = AttentionCall(q, k, k)
        c = own_backward.config_for(call, dlse=False)
        assert c.why_not() is None and own_backward.num_tiles(call, c) > 0
    found = key_tiles.last_parts_of(call, c) if c.last_parts else key_tiles.LastParts(0, 0)
    assert found.parts == LAST[sizes]


@pytest.mark.parametrize(("total", "whole", "parts"), [(7, 4, 3), (9, 4, 2), (5, 4, 16)])
def test_parts_of_the_last_tiles_come_once_and_the_last_ones_last(total, whole, parts):
    args = KernelArgs(query_parts=parts, whole=whole)
    found = [LastParts.of(args, total, i) for i in range(whole + (total - whole) * parts)]
    each = [(x.number, x.which) for x in found]
    assert sorted(each) == sorted(
        (n, i) for n in range(total) for i in range(1 if n < whole else parts)
    )
    assert all(x.count == (1 if x.number < whole else parts) for x in found)
    for n in range(whole, total):
        assert [i for number, i in each if number == n] == list(range(parts))


@pytest.mark.parametrize("lengths", [None, (7, 0, 64, 65, 200, 1, 1, 128)])
@pytest.mark.parametrize("ctas", [1, 2])
def test_sums_of_parts_of_heads_are_kept_apart(ctas, lengths):
    """A pair of CTAs has a tile each, the second one maybe without keys."""
    config = BackwardConfig(head_dim=256, head_dim_v=256, tile_n=64, pairs=ctas == 2)
    config = replace(config, head_parts=True, varlen_k=lengths is not None)
    rows = lengths or (130, 130)
    sizes = Sizes(3 * 4, 1, 0, sum(lengths or (130,)), -(-max(rows) // 64), len(rows))
    parts, taken = HeadParts.of(config, KernelArgs(head_parts=4), sizes), []
    for batch, (first, length) in enumerate(zip(accumulate((0, *rows)), rows, strict=False)):
        for n_block in range(-(-length // (64 * ctas)) * ctas):
            for head in range(12):
                seq = SeqlenInfo(first, length)
                tile = Tile(n_block, head, batch, seq, seq, head_parts=4)
                if parts.part(tile) < 3:
                    taken.append(parts.share(config, tile, parts.part(tile)))
    per_head = -(-130 // (64 * ctas)) * 2 if lengths is None else sum(rows) // (64 * ctas) + 8
    assert len(set(taken)) == len(taken) and max(taken) < 3 * 3 * per_head * ctas


@pytest.mark.sweep(3)
@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("lengths", [(1, 1), (130, 4000), (700, 700), (900, 250), (64, 65)])
def test_steps_of_causal_tiles_are_the_blocks_that_see_them(lengths, tile_m):
    rows_q, rows_k = lengths
    info, tail = BlockInfo(tile_m, 128, Band(None, 0)), ramp_tail(*lengths, tile_m, units=2)
    seen = [info.m_blocks(n, rows_q, rows_k) for n in range(tail.ramp.count)] * 2
    starts = [0, *accumulate((b.end - b.first) * 3 for b in seen)]
    assert [tail.start(i) for i in range(len(seen))] == starts[:-1]
    assert [tail.ramp.first(n) for n in range(tail.ramp.count)] == [
        b.first for b in seen[: tail.ramp.count]
    ]
    assert [tail.holding(x) for x in starts[:-1]] == list(range(len(seen)))
    assert [tail.holding(x - 1) for x in starts[1:]] == list(range(len(seen)))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("lengths", [(1,), (0, 0, 5), (6000, 33, 64, 1, 0, 128, 129), (64,) * 40])
def test_packed_sequences_have_no_more_tiles_than_are_launched(lengths, dims):
    """Tiles past those that the order of the longest sequence has would be left out, too."""
    packed = {"varlen_q": True, "varlen_k": True}
    config = fitted(BackwardConfig(head_dim=dims[0], head_dim_v=dims[1], causal=True, **packed))
    each, tile = config.key_ctas * config.tile_n, -(-max(lengths) // config.tile_n)
    most = most_tiles(config, None, Sizes(3, 1, 0, sum(lengths), tile, len(lengths)))
    assert config.ranked and 3 * sum(-(-n // each) for n in lengths) <= most
    assert most <= 3 * len(lengths) * -(-tile // config.key_ctas)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 2, 5), (64, 8, 1), (128, 16, 2), (7, 400, 3)])
def test_each_key_block_is_taken_once(sizes, causal, deterministic):
    num_n_blocks, heads_kv, batch = sizes
    config = BackwardConfig(causal=causal, deterministic=deterministic)
    order = tile_order(config, Sizes(heads_kv, 1, 0, 0, num_n_blocks, batch))
    tiles = [order.tile(index) for index in range(order.total)]
    assert len({(t.m, t.head, t.batch) for t in tiles}) == num_n_blocks * heads_kv * batch
    pairs = tile_order(replace(config, pairs=True), Sizes(heads_kv, 1, 0, 0, num_n_blocks, batch))
    tiles_of_pairs = {(t.m, t.head, t.batch) for t in map(pairs.tile, range(pairs.total))}
    assert len(tiles_of_pairs) == pairs.total == (num_n_blocks + 1) // 2 * heads_kv * batch
    if config.interleaved:  # m counts from the last key block
        assert tiles[0].m == num_n_blocks - 1


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 2, 5), (64, 8, 2), (128, 32, 1), (7, 400, 3)])
def test_of_the_last_heads_the_longest_tiles_come_first(sizes):
    """In one order, causal: in ascending order where the first keys add first, else descending."""
    num_n_blocks, heads_kv, batch = sizes
    config = fitted(BackwardConfig(causal=True, deterministic=True))
    assert config.flips and not fitted(replace(config, varlen_q=True, varlen_k=True)).flips
    order = tile_order(config, Sizes(heads_kv, 1, 0, 0, num_n_blocks, batch))
    taken: dict[tuple[int, int, bool], list[int]] = {}
    for tile in map(order.tile, range(order.total)):
        n_block, flipped = key_block(config, order, tile)
        taken.setdefault((tile.batch, tile.head, flipped), []).append(n_block)
    up = list(range(num_n_blocks))
    assert all(blocks == (up if key[2] else up[::-1]) for key, blocks in taken.items())
    assert next(reversed(taken))[2] and len(taken) == heads_kv * batch


@pytest.mark.parametrize(
    ("num_sms", "heads_kv", "batch", "rows_q", "keys"),
    [(132, 16, 2, 8192, 64), (132, 1, 1, 700, 9), (5, 3, 1, 65, 7), (114, 40, 3, 5, 12)],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_key_blocks_that_begin_at_queries_of_their_own_add_when_their_turn_comes(
    dim, num_sms, heads_kv, batch, rows_q, keys
):
    config = BackwardConfig(head_dim=dim, head_dim_v=dim, deterministic=True, num_ctas=num_sms)
    config = replace(fitted(config), rotated=True)
    assert config.why_not() is None and not config.descending
    assert "rotated=True" in replace(config, causal=True).why_not()
    sizes = Sizes(heads_kv, 1, rows_q, 0, keys, batch)
    rotation, order = Rotation.of(config, sizes), tile_order(config, sizes)
    if rotation.group > 1:  # else some would wait for ever
        assert rotation.group * order.groups()[0] <= num_sms
    begun = {}  # when each key block comes to each block of queries, in steps
    for n in range(keys):
        blocks = [rotation.block(n, step) for step in range(rotation.blocks)]
        assert sorted(blocks) == list(range(rotation.blocks))
        assert blocks[0] == rotation.start(n)
        begun |= {(n, m): (n // rotation.group, step) for step, m in enumerate(blocks)}
    for m in range(rotation.blocks):
        in_time = sorted(range(keys), key=lambda n: begun[n, m])
        assert [rotation.turn(n, m) for n in in_time] == list(range(keys))


@pytest.mark.parametrize("num_sms", [78, 114])
def test_no_more_ctas_wait_for_each_other_than_a_gpu_runs(monkeypatch, num_sms):
    monkeypatch.setattr(own_backward, "resources", lambda device, name: (num_sms, 0))
    q, k, v = (torch.empty(1, 128, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    with cutex.ops.simulated("sm_90a"):
        assert own_backward.config_for(AttentionCall(q, k, v), False).num_ctas == num_sms


def test_warpgroups_of_keys_compute_dq_without_a_soft_cap():
    config = BackwardConfig(causal=True)
    packed = {"causal": False, "varlen_q": True, "varlen_k": True}
    for more in ({}, packed, {"deterministic": True}, {"deterministic": True, "causal": False}):
        found = fitted(replace(config, **more))
        assert found.own_dq and found.why_not() is None
        assert not fitted(replace(config, **more, softcap=True)).own_dq
        assert "without a soft cap" in replace(found, softcap=True, overlap=False).why_not()
        assert "those of two blocks" in replace(found, dq_slots=1).why_not()
        half = "half of a block's dQ for each warpgroup"
        assert half in replace(found, dq_columns=128, dq_slots=2).why_not()
        assert half in replace(found, tile_m=128, score_m=128).why_not()
    narrow = fitted(replace(config, head_dim=64, head_dim_v=64))
    assert narrow.tile_m == 128 and narrow.own_dq and narrow.why_not() is None
    assert narrow.dq_last and "of own_dq" in replace(BackwardConfig(), dq_last=True).why_not()
    for dims in ((192, 128), (256, 256)):  # dK and dV of 64 keys by two warpgroups, dQ by pairs
        found = fitted(BackwardConfig(head_dim=dims[0], head_dim_v=dims[1]))
        assert found.wide and found.pairs and found.why_not() is None
        values, keys, queries = found.registers
        few = replace(found, registers=(values, dims[0] // 2 + 24, queries)).why_not()
        assert f"{dims[0] // 2} registers of accumulators a thread, of" in few
        assert "at least 168, then" in replace(found, registers=(values, 176, 24)).why_not()
        assert "multiples of 8" in replace(found, registers=(values, keys + 4, 24)).why_not()
