"""Attention as it runs: on a GPU where there is one, else in the simulator, against float64.

Kernels and the shapes that they run are drawn separately, so that few kernels get many shapes.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from cutlass import Float32, cute
from flash_attn_calls import call

import cutex
from cutex.arch import local_arch
from cutex.kernels.attention.forward.choose import fitted
from cutex.kernels.attention.forward.sm90 import choose as sm90
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.ops import plain
from cutex.ops.attention import plan, planned
from cutex.problem.attention.case import AttentionCase, Inputs
from cutex.problem.attention.randomized import draw

ARCH = "sm_90a"


@dataclass(frozen=True)
class Place:
    """The device of the tests, and the size of their problems."""

    device: str
    largest: float  # power of two of sequences
    most_work: int
    orders: tuple[dict, ...]  # of events, in the simulator
    arch: str = ARCH

    @contextlib.contextmanager
    def prepared(self, **order) -> Iterator[None]:
        """A context in which tensors of `device` run, and torch's new allocations are NaN."""
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            with contextlib.ExitStack() as stack:
                if self.device != "cpu":
                    stack.enter_context(allocations_by_torch())
                else:
                    stack.enter_context(cutex.ops.simulated(self.arch, **order))
                    # so few SMs that a CTA computes several tiles
                    stack.enter_context(mock.patch.object(plan, "resources", lambda *_: SMALL))
                yield
        finally:
            torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def allocations_by_torch() -> Iterator[None]:
    """A context in which plans allocate by a function that fills what it returns with NaN where
    torch does, as the one that they use otherwise does not."""

    def empty(shape, strides, dtype):
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")

    planned.forget()
    with mock.patch.object(plain._guards, "_empty_strided_cuda", empty):
        yield
    planned.forget()


SMALL = 2, 2**20  # SMs, bytes of L2
SIMULATOR = Place("cpu", 8, 2**22, ({}, {"order": "random", "seed": 1}, {"order": "starved"}))
GPU = Place("cuda", 12, 2**32, ({},))


@pytest.fixture(scope="module")
def place() -> Place:
    here = local_arch()
    return GPU if here is not None and here.name == ARCH else SIMULATOR


def hold(place: Place, case: AttentionCase, **order) -> None:
    inputs = case.inputs(place.device)
    with place.prepared(**order):
        out, lse = call(case, inputs)
    found = case.check(inputs, out, lse)
    assert found.ok, f"{case}: {found.message}"


# ---- randomized cases

# kernels that CI compiles, and how many of their three cases it runs; their seeds were chosen to
# differ in everything that is compiled
KERNELS = (26, 0, 3, 13, 34)
BOTH_ENDS = 26  # whose blocks of keys, of which it has more, come in long sequences' order
CASES = 2


@pytest.fixture
def both_ends(monkeypatch):
    """Sequences of any length begin with the blocks of both ends of their keys."""
    monkeypatch.setattr(sm90, "BOTH_ENDS", 0)
    planned.forget()
    yield
    planned.forget()


@pytest.mark.sweep(20)
@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.parametrize("kernel", KERNELS)
def test_randomized_cases(place, kernel, number, request):
    case = draw(3 * kernel + number, place.largest, place.most_work, kernel)
    if kernel == BOTH_ENDS:
        request.getfixturevalue("both_ends")
        case = replace(case, seqlen_k=case.seqlen_k + 600)
    hold(place, case, **place.orders[number % len(place.orders)])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", range(60))
def test_more_randomized_cases(place, kernel):
    for number in range(4):
        case = draw(1000 + 4 * kernel + number, place.largest, place.most_work, 100 + kernel)
        hold(place, case, **place.orders[number % len(place.orders)])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", range(110))
def test_four_hundred_randomized_cases(place, kernel):
    for number in range(4):
        hold(place, draw(9000 + 4 * kernel + number, place.largest, place.most_work, kernel))


# ---- cases that random draws may miss

PLAIN = AttentionCase(heads_q=2, heads_kv=1, head_dim=64, head_dim_v=64, causal=True)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(  # two kernels: heads of short sequences are packed into rows
    ("queries", "keys"),
    [
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((1, 1), (191, 193))),
        *((129, 127), (300, 40), (64, 385)),
    ],
    ids=str,
)
def test_causal_edges_of_tiles_and_rows_without_keys(place, queries, keys):
    hold(place, replace(PLAIN, seqlen_q=queries, seqlen_k=keys))


@pytest.mark.slow
@pytest.mark.parametrize("window", [(-70, 130), (None, -100), (200, -3), (-64, None)], ids=str)
def test_bands_off_the_diagonal(place, window):
    hold(place, replace(PLAIN, causal=False, window=window, seqlen_q=300, seqlen_k=330))


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "in_registers"), [(128, 128), (256, 64), (256, 128)])
def test_columns_of_q_in_registers_and_the_others_in_smem(place, head_dim, in_registers):
    case = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim, seqlen_q=70, seqlen_k=130)
    inputs, results = case.inputs(place.device), []
    for columns in (in_registers, 0):
        asked = mock.Mock(side_effect=lambda *of, c=columns: replace(fitted(*of), q_in_registers=c))
        planned.forget()
        with mock.patch.object(plan, "fitted", asked), place.prepared():
            results.append(call(case, inputs))
        assert asked.call_count
    planned.forget()
    assert case.check(inputs, *results[0]).ok
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


LONG = [
    # a CTA takes several tiles, so heads and directions change between them
    {"seqlen_q": 210, "seqlen_k": 210, "heads_q": 3, "heads_kv": 3},
    # 300 rows without keys, of which a tile may be without any
    {"seqlen_q": 500, "seqlen_k": 200, "heads_q": 2, "heads_kv": 1},
    {"seqlen_q": 5, "seqlen_k": 700, "heads_q": 16, "heads_kv": 2},  # heads packed into rows
    {"batch": 3, "lengths_q": (300, 0, 190), "lengths_k": (410, 64, 190), "heads_q": 2},
    # tiles that are computed again
    {"seqlen_q": 300, "seqlen_k": 330, "heads_q": 2, "init": "rising"},
    {"seqlen_q": 391, "seqlen_k": 600, "heads_q": 2, "init": "huge"},
]
QUICK = ((64, 0), (256, 4))  # head dims and shapes: one that alternates, one that does not


@pytest.fixture
def long_from_one_key(monkeypatch):
    """Sequences of any length have the kernels that are chosen for long ones, where two CTAs load
    K and V for each other. A list of the configs chosen so."""
    shares, longest, chosen = sm90.shares, 2**20, []

    def of_long(spec, shape, arch):
        chosen.append(fitted(spec, shape._replace(longest_k=longest), arch))
        return chosen[-1]

    def shares_long(config, shape, arch):
        many = shape._replace(batch=arch.num_sms, longest_k=longest, mean_q=longest)
        return shares(config, many, arch)

    monkeypatch.setattr(plan, "fitted", of_long)
    monkeypatch.setattr(sm90, "shares", shares_long)
    monkeypatch.setattr(sm90, "split", lambda config, shape, num_sms: config)
    planned.forget()
    yield chosen
    planned.forget()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        pytest.param(d, i, marks=() if (d[0], i) in QUICK else pytest.mark.slow)
        for d, i in itertools.product(HEAD_DIMS, range(len(LONG)))
    ],
    ids=str,
)
def test_kernels_for_long_sequences(place, long_from_one_key, dims, shape):
    """At head dim 256 they take the keys of every other wave of tiles forwards."""
    case = replace(PLAIN, head_dim=dims[0], head_dim_v=dims[1], **LONG[shape])
    hold(place, case, **place.orders[(shape + dims[1] // 64) % len(place.orders)])
    (config,) = long_from_one_key
    assert config.share and config.alternates == (dims[0] == 256)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(200))
def test_randomized_cases_of_kernels_for_long_sequences(place, long_from_one_key, number):
    case = draw(20000 + number, place.largest, place.most_work, 300 + number // 4)
    d, dv = HEAD_DIMS[number % len(HEAD_DIMS)]
    causal = number % 8 != 0
    window = (None, None) if causal or number % 16 else case.window
    hold(place, replace(case, head_dim=d, head_dim_v=dv, causal=causal, window=window))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [(200, 391), pytest.param((200, 230, 5, 391), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_a_sequence_has_the_same_bits_alone_and_among_others(place, head_dim, lengths):
    case = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim, batch=len(lengths))
    case = replace(case, lengths_q=lengths, lengths_k=lengths)
    inputs = case.inputs(place.device)
    with place.prepared():
        together, _ = call(case, inputs)
        for begin, end in itertools.pairwise((0, *itertools.accumulate(lengths))):
            mine = [x[begin:end] for x in inputs[:3]]
            ends = torch.tensor([0, end - begin], dtype=torch.int32, device=place.device)
            longest = max(lengths), max(lengths)
            alone = cutex.flash_attn_varlen_func(
                *mine, ends, ends, *longest, case.scale, causal=True
            )
            assert torch.equal(alone, together[begin:end])


@pytest.mark.parametrize("columns", [32, -64, 192])
def test_columns_of_q_that_cannot_be_in_registers_are_refused(columns):
    assert "columns of Q by 64" in Sm90ForwardConfig(q_in_registers=columns).why_not()


def test_scores_that_move_with_every_key_and_one_that_dwarfs_all(place):
    for init in ("rising", "falling", "huge", "offset"):
        hold(place, replace(PLAIN, seqlen_q=70, seqlen_k=300, init=init))


@pytest.mark.slow
def test_a_sink_of_minus_infinity_is_none(place):
    case = replace(PLAIN, seqlen_q=130, seqlen_k=7, sink=True)  # most rows see no key
    inputs = case.inputs(place.device)
    inputs.sink[1] = -torch.inf
    with place.prepared():
        found = case.check(inputs, *call(case, inputs))
    assert found.ok, found.message


@pytest.mark.slow
def test_orders_do_not_change_a_bit(place):
    case = replace(PLAIN, seqlen_q=300, seqlen_k=140)
    inputs = case.inputs(place.device)
    found = []
    for order in place.orders if place is SIMULATOR else ({},) * 20:
        with place.prepared(**order):
            found.append(call(case, inputs))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def tilted(score, batch, head, q, k):
    """A user's own score function: keys far behind the query count less, by head."""
    return score - 0.0625 * cute.arch.fmax(Float32(q - k), 0.0) * (head + 1)


def even_keys(batch, head, q, k):
    return (k & 1) == 0


def test_users_functions(place):
    case = replace(PLAIN, causal=False, seqlen_q=70, seqlen_k=150, heads_kv=2)
    inputs = case.inputs(place.device)
    with place.prepared():
        out, lse = call(case, inputs, score_mod=tilted, mask_mod=even_keys)
    q, k, v = (x[0].double().transpose(0, 1) for x in inputs[:3])
    far = (torch.arange(70)[:, None] - torch.arange(150)).clamp(min=0).to(q.device)
    tilt = 0.0625 * far * torch.arange(1, 3, device=q.device)[:, None, None]
    scores = q @ k.mT / 8 - tilt
    scores[..., 1::2] = -torch.inf
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    want = scores.softmax(-1) @ v
    torch.testing.assert_close(out[0].double().transpose(0, 1), want, rtol=0.02, atol=0.01)


# ---- on a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_tensors_beyond_32_bit_offsets(place, causal):
    """2^31 elements and more in each of q, k, v and O; the last sequences are compared."""
    batch, rows, heads = 8200, 128, 16
    case = AttentionCase(
        batch=batch, heads_q=heads, heads_kv=heads, seqlen_q=rows, seqlen_k=rows, causal=causal
    )
    q = torch.randn(batch * rows, heads, 128, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * rows
    assert q.numel() > 2**31
    dense = q.view(batch, rows, heads, 128)
    out, lse = cutex.flash_attn_func(dense, dense, dense, causal=causal, return_lse=True)
    packed, _ = cutex.flash_attn_varlen_func(
        q, q, q, ends, ends, rows, rows, causal=causal, return_lse=True
    )
    assert torch.equal(packed.view_as(out), out)
    one = replace(case, batch=1)
    for i in (0, batch // 2, batch - 1):
        x = dense[i : i + 1]
        found = one.check(Inputs(x, x, x), out[i : i + 1], lse[i : i + 1])
        assert found.ok, f"sequence {i}: {found.message}"


@pytest.mark.gpu
def test_far_apart_entries_of_a_batch(place):
    memory = torch.empty(2**31 + 2**20, device="cuda", dtype=torch.bfloat16)
    shape, stride = (2, 300, 4, 64), (2**31, 256, 64, 1)
    case = replace(PLAIN, batch=2, seqlen_q=300, seqlen_k=300, heads_q=4, heads_kv=4)
    q, k, _ = case.inputs("cuda")[:3]
    far = torch.as_strided(memory, shape, stride).copy_(k)
    out, lse = cutex.flash_attn_func(q, far, far, causal=True, return_lse=True)
    found = case.check(Inputs(q, k, k), out, lse, poisoned=False)
    assert found.ok, found.message


@pytest.mark.gpu
def test_a_cuda_graph_replays_it(place):
    case = replace(PLAIN, seqlen_q=900, seqlen_k=900, batch=3)
    inputs = case.inputs("cuda")
    out, lse = call(case, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(case, inputs)
    for _ in range(3):
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured[0], out) and torch.equal(captured[1], lse)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_by_torchs_flash_backward(place, causal):
    case = replace(PLAIN, causal=causal, seqlen_q=500, seqlen_k=700, heads_q=4, heads_kv=2)
    leaves = [x.requires_grad_() for x in case.inputs("cuda")[:3]]
    out = cutex.flash_attn_func(*leaves, causal=causal)
    grad = torch.randn_like(out)
    out.backward(grad)
    wide = [x.detach().double().transpose(1, 2).requires_grad_() for x in leaves]
    offset = torch.arange(700, device="cuda") - torch.arange(500, device="cuda")[:, None] - 200
    mask = offset <= 0 if causal else None
    want = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True)
    want.backward(grad.double().transpose(1, 2))
    for x, y in zip(leaves, wide, strict=True):
        error = (x.grad.double() - y.grad.transpose(1, 2)).norm() / y.grad.norm()
        assert error < 0.01, float(error)


@pytest.mark.gpu
def test_a_call_costs_the_host_less_than_torchs(place):
    """Problems too small to hide the host's time; interleaved, since other processes slow both
    down."""
    q, k, v = AttentionCase(batch=1, seqlen_q=64, seqlen_k=64).inputs("cuda")[:3]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    calls = {
        "cutex": lambda: cutex.flash_attn_func(q, k, v),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first),
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(30):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(100):
                    call()
                took[name].append((time.perf_counter() - start) / 100 * 1e6)
                torch.cuda.synchronize()
    assert min(took["cutex"]) <= 0.7 * min(took["torch"]), took
