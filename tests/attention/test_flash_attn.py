"""cutex.flash_attn_func and flash_attn_varlen_func: the kernel's arguments, and torch's view of
them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from attention_stand_in import StandIn
from flash_attn_calls import PACKED, SMALL, call

import cutex
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.ops.attention import eager, plan, planned
from cutex.ops.attention.call import AttentionCall
from cutex.problem.attention.case import AttentionCase
from cutex.problem.attention.randomized import draw
from cutex.problem.attention.shapes import VIEWS


@pytest.fixture
def stand_in(monkeypatch):
    yield StandIn(monkeypatch)
    planned.forget()


# ---- the kernel's arguments


@pytest.mark.parametrize("seed", range(60))
def test_randomized_problems_reach_the_kernel_as_they_are(stand_in, seed):
    problem = draw(seed, largest=6, most_work=2**21)
    inputs = problem.inputs()
    for _ in range(2):  # with a plan to be made, and with it made
        found = problem.check(inputs, *call(problem, inputs), poisoned=False)
        assert found.ok, f"{problem}: {found.message}"
    assert len(stand_in.launches) in (0, 2)


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_copied_only_where_tma_cannot_step_through_them(stand_in, view):
    problem = replace(SMALL, views=(view, "contiguous", view))
    inputs = problem.inputs()
    assert problem.check(inputs, *call(problem, inputs)).ok
    ((config, given),) = stand_in.launches
    copied = given["q"].data_ptr() != inputs.q.data_ptr()
    assert copied == (view in ("shifted", "transposed"))
    assert given["k"] is inputs.k
    assert config.lse and given["o"].is_contiguous()


def test_used_rows_of_a_batch_are_passed_as_one_list_of_rows(stand_in):
    for view, copied in (("contiguous", False), ("padded", True), ("interleaved", False)):
        problem = replace(SMALL, used_k=(40, 7), views=("contiguous", view, "contiguous"))
        inputs = problem.inputs()
        assert problem.check(inputs, *call(problem, inputs)).ok
        _, given = stand_in.launches[-1]
        assert (given["k"].data_ptr() != inputs.k.data_ptr()) == copied
        assert given["k"].stride(0) == 40 * given["k"].stride(1)


def test_one_row_or_one_head_may_have_any_strides(stand_in):
    q, k, v = AttentionCase(seqlen_q=1, heads_q=1, heads_kv=1).inputs()[:3]
    odd = torch.as_strided(q, q.shape, (3, 5, 7, 1), q.storage_offset())
    cutex.flash_attn_func(odd, k, v)
    ((_, given),) = stand_in.launches
    assert given["q"].data_ptr() == q.data_ptr() and all(
        s % 8 == 0 for s in given["q"].stride()[:3]
    )


@pytest.mark.parametrize(
    ("window", "causal", "config"),
    [
        ((None, None), False, (False, (False, False))),
        ((None, 0), False, (True, (False, False))),
        ((38, 22), False, (False, (True, True))),
        ((39, 23), False, (False, (False, False))),  # these bounds change nothing
        ((5, None), True, (True, (True, False))),
        ((5, 9), True, (True, (True, False))),  # as FlashAttention has it: causal wins
        ((2**40, 2**40), False, (False, (False, False))),
    ],
)
def test_the_band_is_passed_only_where_it_is_felt(stand_in, window, causal, config):
    problem = replace(SMALL, window=window, causal=causal)
    inputs = problem.inputs()
    assert problem.check(inputs, *call(problem, inputs)).ok
    found, _ = stand_in.launches[-1]
    assert (found.causal, found.window) == config


def test_one_query_sees_all_keys_without_a_mask(stand_in):
    problem = replace(SMALL, seqlen_q=1, causal=True)
    inputs = problem.inputs()
    assert problem.check(inputs, *call(problem, inputs)).ok
    assert not stand_in.launches[-1][0].causal


def test_nothing_is_launched_where_there_is_nothing_to_see(stand_in, monkeypatch):
    empty = {"seqlen_q": 0}, {"seqlen_k": 0}, {"seqlen_k": 0, "sink": True}
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda *args, **options: new_empty(*args, **options).fill_(torch.nan),
    )
    packed = {"lengths_q": (5, 0, 9), "lengths_k": (0, 0, 0), "batch": 3}
    others = (
        {"lengths_q": (0, 0), "lengths_k": (3, 4), "tail": 2},
        packed,
        {**packed, "sink": True},
        {**packed, "used_q": (4, 0, 9), "used_k": (0, 0, 0)},
        {"seqlen_k": 0, "used_q": (3, 24)},
    )
    for changes in (*empty, *others):
        problem = replace(SMALL, **changes)
        inputs = problem.inputs()
        found = problem.check(inputs, *call(problem, inputs))
        assert found.ok, found.message
    q = torch.empty(0, 24, 4, 64, dtype=torch.bfloat16)
    assert cutex.flash_attn_func(q, q, q).shape == q.shape
    assert not stand_in.launches


def test_without_lse_none_is_computed(stand_in):
    inputs = SMALL.inputs()
    out = cutex.flash_attn_func(*inputs[:3])
    config, given = stand_in.launches[-1]
    assert isinstance(out, torch.Tensor) and not config.lse and "lse" not in given


def test_a_sink_of_any_float_dtype_is_passed_in_fp32(stand_in):
    problem = replace(SMALL, sink=True)
    inputs = problem.inputs()
    sink = inputs.sink.to(torch.bfloat16)
    out = cutex.flash_attn_func(*inputs[:3], learnable_sink=sink)
    assert stand_in.launches[-1][1]["sink"].dtype == torch.float32
    assert problem.check(inputs._replace(sink=sink.float()), out, None).ok


def test_rows_beyond_max_seqlen_q_are_not_promised(stand_in):
    problem = replace(SMALL, lengths_q=(5, 9), lengths_k=(7, 3))
    inputs = problem.inputs()
    call(problem, inputs)
    assert stand_in.launches[-1][1]["max_seqlen_q"] == 9
    cutex.flash_attn_varlen_func(*inputs[:5])
    assert stand_in.launches[-1][1]["max_seqlen_q"] == 14  # by default, all rows


# ---- plans


def test_a_plan_is_made_once_and_kept_apart_by_all_that_it_depends_on(stand_in, monkeypatch):
    made = []
    monkeypatch.setattr(planned, "Plan", lambda *args: made.append(args) or plan.Plan(*args))
    inputs = SMALL.inputs()
    sink = torch.zeros(4)
    variants = [
        {},
        {"causal": True},
        {"softmax_scale": 0.5},
        {"softcap": 2.0},
        {"window_size": (3, None)},
        {"learnable_sink": sink},
        {"return_lse": True},
        {"score_mod": lambda s, b, h, q, k: s},
        {"mask_mod": lambda b, h, q, k: q >= k},
    ]
    for _ in range(3):
        for variant in variants:
            cutex.flash_attn_func(*inputs[:3], **variant)
        cutex.flash_attn_func(*replace(SMALL, views=("padded",) * 3).inputs()[:3])
        cutex.flash_attn_func(*replace(SMALL, dtype="fp16").inputs()[:3])
    assert len(made) == len(variants) + 2


def test_one_tensor_twice_finds_its_plan_too(stand_in, monkeypatch):
    q, k, v = replace(SMALL, seqlen_q=40, heads_q=2).inputs()[:3]
    patterns = (q, k, k), (q, q, q), (q, k, v), (k, k, v)
    for given in patterns:
        cutex.flash_attn_func(*given)
    monkeypatch.setattr(eager, "_unknown", lambda *_: pytest.fail("there is a plan"))
    for given in patterns:
        out = cutex.flash_attn_func(*given)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(x.double().transpose(1, 2) for x in given)
        ).transpose(1, 2)
        assert (out.double() - wanted).abs().max() < 2**-6


def test_shapes_of_as_many_elements_have_plans_of_their_own(stand_in):
    """A plan is found by the numbers of elements, and then by its shapes."""
    problem = replace(SMALL, batch=2, seqlen_q=12, seqlen_k=12)
    others = (
        problem,
        replace(problem, batch=3, seqlen_q=8, seqlen_k=8),
        replace(problem, batch=1, seqlen_q=24, seqlen_k=24),
    )
    assert len({p.inputs().q.numel() for p in others}) == 1
    for _ in range(3):
        for other in others:
            inputs = other.inputs()
            assert other.check(inputs, *cutex.flash_attn_func(*inputs[:3], return_lse=True)).ok


def test_a_misaligned_tensor_of_known_shape_is_copied(stand_in):
    inputs = SMALL.inputs()
    cutex.flash_attn_func(*inputs[:3])
    q = inputs.q
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    out, lse = cutex.flash_attn_func(shifted, *inputs[1:3], return_lse=True)
    cutex.flash_attn_func(shifted, *inputs[1:3])
    assert SMALL.check(inputs, out, lse).ok
    assert stand_in.launches[-1][1]["q"].data_ptr() % 16 == 0


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_a_number_of_numpy_is_a_number(stand_in, name):
    q, k, v = SMALL.inputs()[:3]
    for leaf in (q, q.clone().requires_grad_()):
        with torch.no_grad() if name == "softcap" else torch.enable_grad():
            want, got = (cutex.flash_attn_func(leaf, k, v, **{name: kind(0.25)})
                         for kind in (float, np.float32))  # fmt: skip
        assert torch.equal(got, want)


def test_whole_numbers_of_numpy_are_whole_numbers(stand_in):
    q, k, v = SMALL.inputs()[:3]
    packed = PACKED.inputs()[:5]
    for leaf in (q, q.clone().requires_grad_()):
        want, got = (cutex.flash_attn_func(leaf, k, v, window_size=(kind(3), kind(2)))
                     for kind in (int, np.uint8))  # fmt: skip
        assert torch.equal(got, want)
        planned.forget()
        cutex.flash_attn_varlen_func(
            *packed, np.int64(9), np.int32(7), window_size=(np.uint8(3), 0)
        )
        given = stand_in.launches[-1][1]
        assert [type(given[name]) for name in ("lo", "max_seqlen_q")] == [int, int]
        assert (given["lo"], given["max_seqlen_q"]) == (-3, 9)
        packed = [packed[0].clone().requires_grad_(), *packed[1:]]


def test_after_a_misaligned_tensor_aligned_ones_are_not_copied(stand_in):
    q, k, v = SMALL.inputs()[:3]
    shifted = torch.cat((q.new_zeros(1), q.flatten()))[1:].view(q.shape)
    for x in (shifted, q, q):
        cutex.flash_attn_func(x, k, v)
    given = [given["q"].data_ptr() for _, given in stand_in.launches]
    assert given[0] != shifted.data_ptr() and given[1:] == [q.data_ptr()] * 2


def test_a_k_of_another_dtype_than_a_known_one_is_refused(stand_in):
    inputs = SMALL.inputs()
    cutex.flash_attn_func(*inputs[:3])
    with pytest.raises(TypeError, match=r"k has dtype .*float16, but q has"):
        cutex.flash_attn_func(inputs.q, inputs.k.half(), inputs.v)


@dataclass
class Times:
    """A function that has no hash."""

    factor: float

    def __call__(self, score, batch, head, query, key):
        return score * self.factor


def test_a_function_needs_no_hash(stand_in):
    q, k, v = SMALL.inputs()[:3]
    for factor in (1.0, 2.0):
        mod = Times(factor)
        assert cutex.flash_attn_func(q, k, v, score_mod=mod).shape == q.shape
        assert stand_in.launches[-1][0].score_mod.function is mod


def test_a_function_that_changes_is_compiled_again(stand_in):
    factor = [2.0]

    def score_mod(score, b, h, q, k, by=1.0):
        return score * by

    inputs = SMALL.inputs()

    def key():
        cutex.flash_attn_func(*inputs[:3], score_mod=score_mod)
        return stand_in.launches[-1][0].score_mod

    first, again = key(), key()
    assert first == again
    score_mod.__defaults__ = (3.0,)
    assert key() != first
    score_mod.__code__ = (lambda score, b, h, q, k, by=1.0: score + by).__code__
    assert key() not in (first, again)
    assert factor == [2.0]


# ---- under torch's transforms


def test_the_operator_is_what_torch_expects(stand_in):
    q, k, v = SMALL.inputs()[:3]
    torch.library.opcheck(
        torch.ops.cutex.flash_attn,
        (q, k, v),
        {"causal": True},
        test_utils=("test_schema", "test_faketensor"),
    )
    p = PACKED.inputs()
    torch.library.opcheck(
        torch.ops.cutex.flash_attn,
        (*p[:5], 9, 7),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_by_torch_it_is_one_node(stand_in, dynamic):
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    function = torch.compile(
        lambda *x: cutex.flash_attn_func(*x, causal=True, return_lse=True),
        backend=backend, dynamic=dynamic, fullgraph=True,
    )  # fmt: skip
    problem = replace(SMALL, causal=True)
    for seqlen in (40, 56):
        p = replace(problem, seqlen_q=seqlen, seqlen_k=seqlen)
        inputs = p.inputs()
        assert p.check(inputs, *function(*inputs[:3])).ok
    nodes = [n.target for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert torch.ops.cutex.flash_attn in nodes or torch.ops.cutex.flash_attn.default in nodes
    assert len(graphs) == (1 if dynamic else 2)
    torch._dynamo.reset()


def test_packed_sequences_of_any_number_compile_once(stand_in):
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    function = torch.compile(
        lambda *x: cutex.flash_attn_varlen_func(*x), backend=backend, dynamic=True, fullgraph=True
    )
    for lengths in ((5, 9), (3, 4, 7), (2, 3, 4, 5)):
        problem = replace(PACKED, batch=len(lengths), lengths_q=lengths, lengths_k=lengths)
        inputs = problem.inputs()
        assert problem.check(inputs, function(*inputs[:5], max(lengths)), None).ok
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_a_users_function_breaks_the_graph_and_is_not_traced_by_dynamo(stand_in):
    q, k, v = SMALL.inputs()[:3]
    traced = []

    def backend(module, _):
        traced.append(module.code)
        return module.forward

    def mod(score, b, h, i, j):
        return score

    function = torch.compile(
        lambda q: cutex.flash_attn_func(2 * q, k, v, score_mod=mod) + 1, backend=backend
    )
    for _ in range(2):
        assert function(q).shape == q.shape
        assert stand_in.launches[-1][0].score_mod.function is mod
    assert len(traced) <= 2, traced  # at most what is before the call, and after
    torch._dynamo.reset()


def test_what_torch_watches_goes_through_the_dispatcher(stand_in):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = SMALL.inputs()[:3]
    cutex.flash_attn_func(q, k, v)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert cutex.flash_attn_func(q, k, v).shape == q.shape
    graph = make_fx(lambda *x: cutex.flash_attn_func(*x))(q, k, v)
    assert "cutex.flash_attn" in graph.code
    before = len(stand_in.launches)
    with FlopCounterMode(display=False) as flops:
        cutex.flash_attn_func(q, k, v)
    assert flops.get_total_flops() == 4 * 2 * 4 * 24 * 40 * 64
    with FlopCounterMode(display=False) as flops:
        p = PACKED.inputs()
        cutex.flash_attn_varlen_func(*p[:5], 9, 7)
    assert flops.get_total_flops() == 4 * 2 * (5 * 7 + 9 * 3) * 64
    assert len(stand_in.launches) == before + 2
    negative = torch._neg_view(q)
    out = cutex.flash_attn_func(negative, k, v)
    assert torch.equal(out, cutex.flash_attn_func(-q, k, v))
    mapped = torch.func.vmap(cutex.flash_attn_func)(*(torch.stack((x, -x)) for x in (q, k, v)))
    for i, sign in enumerate((1, -1)):
        assert torch.equal(mapped[i], cutex.flash_attn_func(sign * q, sign * k, sign * v))
    ends = torch.tensor([[0, 5, 14], [0, 7, 14]], dtype=torch.int32)
    mapped = torch.func.vmap(lambda x: cutex.flash_attn_varlen_func(*p[:3], x, p[4], 9))(ends)
    for got, x in zip(mapped, ends, strict=True):
        assert torch.equal(got, cutex.flash_attn_varlen_func(*p[:3], x, p[4], 9))
    none = (torch.empty(0, *x.shape, dtype=x.dtype) for x in (q, k, v))
    assert torch.func.vmap(cutex.flash_attn_func)(*none).shape == (0, *q.shape)
    with pytest.raises(ValueError, match="score_mod cannot be given under"), FakeTensorMode():
        cutex.flash_attn_func(q, k, v, score_mod=lambda s, *_: s)


# ---- the kernel for long sequences


def config_of(lengths: list[int], **given) -> Sm90ForwardConfig:
    """The config of packed sequences of these lengths at head dim 256."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q = torch.empty(sum(lengths), 1, 256, dtype=torch.bfloat16)
    return plan.config_for(AttentionCall(q, q, q, ends, ends, **given), False, (None, None))


def test_many_short_sequences_are_not_taken_for_one_long_one(stand_in):
    many, few = [512] * 10, [4096, 4096]
    assert not config_of(many).q_in_registers and config_of(few).q_in_registers
    assert not config_of(many, max_seqlen_q=512, max_seqlen_k=512).q_in_registers
    assert config_of([4600, *[100] * 5], max_seqlen_q=4600, max_seqlen_k=4600).q_in_registers
