"""cutex.flash_attn_func and flash_attn_varlen_func: what torch and a user see of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from attention_stand_in import StandIn, flash_on_cpu
from torch.nn import functional as F

import cutex
from cutex.ops.attention import eager, plan
from cutex.problem.attention.case import VIEWS, AttentionCase
from cutex.problem.attention.randomized import draw

SMALL = AttentionCase(
    batch=2, seqlen_q=24, seqlen_k=40, heads_q=4, heads_kv=2, head_dim=64, head_dim_v=64
)


@pytest.fixture
def stand_in(monkeypatch):
    yield StandIn(monkeypatch)
    eager.forget()


def options(problem, **more):
    return {
        "softmax_scale": problem.scale,
        "causal": problem.causal,
        "window_size": problem.window,
        "softcap": problem.softcap,
        **more,
    }


def call(problem, inputs, **more):
    """O and LSE of a problem, by whichever function takes it."""
    more = options(problem, learnable_sink=inputs.sink, return_lse=True, **more)
    if not problem.varlen:
        return cutex.flash_attn_func(*inputs[:3], **more)
    longest = (max(x) if x else None for x in (problem.lengths_q, problem.lengths_k))
    return cutex.flash_attn_varlen_func(
        *inputs[:5], *longest, seqused_q=inputs.seqused_q, seqused_k=inputs.seqused_k, **more
    )


# ---- what reaches the kernel


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
        ((39, 23), False, (False, (False, False))),  # nobody feels these bounds
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
    for changes in (*empty, {"lengths_q": (0, 0), "lengths_k": (3, 4), "tail": 2}):
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
    monkeypatch.setattr(eager, "Plan", lambda *args: made.append(args) or plan.Plan(*args))
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


def test_a_misaligned_tensor_of_known_shape_is_copied(stand_in):
    inputs = SMALL.inputs()
    cutex.flash_attn_func(*inputs[:3])
    q = inputs.q
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    out, lse = cutex.flash_attn_func(shifted, *inputs[1:3], return_lse=True)
    cutex.flash_attn_func(shifted, *inputs[1:3])
    assert SMALL.check(inputs, out, lse).ok
    assert stand_in.launches[-1][1]["q"].data_ptr() % 16 == 0


def test_a_k_of_another_dtype_than_a_known_one_is_refused(stand_in):
    inputs = SMALL.inputs()
    cutex.flash_attn_func(*inputs[:3])
    with pytest.raises(TypeError, match=r"k has dtype .*float16, but q has"):
        cutex.flash_attn_func(inputs.q, inputs.k.half(), inputs.v)


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


# ---- bad input


def bad(**changes):
    """flash_attn_func's arguments, with some replaced."""
    q, k, v = SMALL.inputs()[:3]
    return {"q": q, "k": k, "v": v, **changes}


def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


BAD = [
    (TypeError, "q must be a torch.Tensor, got list", {"q": [1]}),
    (TypeError, "q has dtype torch.float32, which is not", {"q": tensor(2, 24, 4, 64).float()}),
    (TypeError, "v has dtype torch.float16, but q has", {"v": tensor(2, 40, 2, 64).half()}),
    (ValueError, "q has 3 dimensions, without cu_seqlens_q it has 4", {"q": tensor(24, 4, 64)}),
    (ValueError, "k has head dim 128, but q has 64", {"k": tensor(2, 40, 2, 128)}),
    (
        ValueError,
        "q and v have head dims 64 and 32, there are kernels for 64, 96, 128, 192, 192/128, 256",
        {"v": tensor(2, 40, 2, 32)},
    ),
    (
        ValueError,
        r"v has shape \(2, 39, 2, 64\), but k has \(2, 40, 2, 64\)",
        {"v": tensor(2, 39, 2, 64)},
    ),
    (ValueError, "q has 3 heads, which is no multiple of the 2 of k", {"q": tensor(2, 24, 3, 64)}),
    (
        ValueError,
        "k has batch size 3, but q has 2",
        {"k": tensor(3, 40, 2, 64), "v": tensor(3, 40, 2, 64)},
    ),
    (ValueError, "k is on meta, but q is on cpu", {"k": tensor(2, 40, 2, 64).to("meta")}),
    (
        ValueError,
        "q must be a strided tensor, got torch.sparse_coo",
        {"q": tensor(2, 24, 4, 64).to_sparse()},
    ),
    (
        ValueError,
        r"window_size=\(-1, 0\): write None, not -1, for an open side",
        {"window_size": (-1, 0)},
    ),
    (ValueError, r"window_size=\(-5, 0\): a side is at least 0", {"window_size": (-5, 0)}),
    (
        TypeError,
        r"window_size=\(1.5, 0\): a side is a whole number or None",
        {"window_size": (1.5, 0)},
    ),
    (TypeError, r"window_size must be a pair \(left, right\), got 5", {"window_size": 5}),
    (ValueError, "softcap=-1.0: must be positive, or 0 for none", {"softcap": -1.0}),
    (TypeError, "softcap must be a number, got str", {"softcap": "5"}),
    (ValueError, "softcap=nan: must be finite", {"softcap": float("nan")}),
    (ValueError, "softmax_scale=0: must be positive", {"softmax_scale": 0}),
    (TypeError, "softmax_scale must be a number, got Tensor", {"softmax_scale": torch.ones(())}),
    (
        TypeError,
        "learnable_sink has dtype torch.int32",
        {"learnable_sink": torch.zeros(4, dtype=torch.int32)},
    ),
    (
        ValueError,
        r"learnable_sink has shape \(2,\), it must be one number for each of the 4",
        {"learnable_sink": torch.zeros(2)},
    ),
    (TypeError, "learnable_sink must be a torch.Tensor, got float", {"learnable_sink": 0.5}),
    (TypeError, "score_mod must be a function or None, got int", {"score_mod": 3}),
]


@pytest.mark.parametrize(("error", "sentence", "changes"), BAD, ids=[x[1][:40] for x in BAD])
def test_bad_input_is_one_sentence(stand_in, error, sentence, changes):
    arguments = bad(**changes)
    for _ in range(2):
        with pytest.raises(error, match=sentence) as raised:
            cutex.flash_attn_func(**arguments)
        assert "\n" not in str(raised.value)
    assert not stand_in.launches


PACKED = AttentionCase(
    batch=2, lengths_q=(5, 9), lengths_k=(7, 3), heads_q=2, heads_kv=1, head_dim=64, head_dim_v=64
)


def lengths(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


BAD_VARLEN = [
    (
        TypeError,
        "cu_seqlens_q has dtype torch.int64, which is not int32",
        {"cu_seqlens_q": lengths(0, 5, 14, dtype=torch.int64)},
    ),
    (
        ValueError,
        r"cu_seqlens_k has shape \(2,\), it must be \(3,\)",
        {"cu_seqlens_k": lengths(0, 7)},
    ),
    (
        ValueError,
        "cu_seqlens_q must rise from 0 to at most the 14 rows, got",
        {"cu_seqlens_q": lengths(0, 5, 15)},
    ),
    (ValueError, "cu_seqlens_q must rise from 0", {"cu_seqlens_q": lengths(1, 5, 14)}),
    (ValueError, "cu_seqlens_q must rise from 0", {"cu_seqlens_q": lengths(0, 9, 5)}),
    (ValueError, "max_seqlen_q=8: there is a sequence of 9 rows", {"max_seqlen_q": 8}),
    (ValueError, "max_seqlen_q=-1: must be at least 0", {"max_seqlen_q": -1}),
    (TypeError, "max_seqlen_k must be an int or None, got float", {"max_seqlen_k": 7.0}),
    (
        ValueError,
        r"seqused_k must be from 0 to a sequence's rows, \[7, 3\], got \[7, 4\]",
        {"seqused_k": lengths(7, 4)},
    ),
    (ValueError, r"seqused_q has shape \(3,\), it must be \(2,\)", {"seqused_q": lengths(1, 1, 1)}),
    (ValueError, "q has 3 dimensions, without cu_seqlens_q it has 4", {"cu_seqlens_q": None}),
    (
        ValueError,
        r"cu_seqlens_q has shape \(0,\), it must be",
        {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)},
    ),
]


@pytest.mark.parametrize(
    ("error", "sentence", "changes"), BAD_VARLEN, ids=[x[1][:40] for x in BAD_VARLEN]
)
def test_bad_lengths_are_one_sentence(stand_in, error, sentence, changes):
    q, k, v, cu_q, cu_k = PACKED.inputs()[:5]
    arguments = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 9, "max_seqlen_k": 7}
    with pytest.raises(error, match=sentence):
        cutex.flash_attn_varlen_func(q, k, v, **{**arguments, **changes})
    assert not stand_in.launches


def test_lengths_that_turn_bad_are_found_with_a_plan_too(stand_in):
    q, k, v, cu_q, cu_k = PACKED.inputs()[:5]
    cutex.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 7)
    cu_q[1] = 20
    with pytest.raises(ValueError, match="cu_seqlens_q must rise"):
        cutex.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 7)


def test_outside_a_gpu_and_the_simulator_it_says_what_to_do(monkeypatch):
    q, k, v = SMALL.inputs()[:3]
    with pytest.raises(ValueError, match="runs on a Hopper or Blackwell GPU; move its tensors"):
        cutex.flash_attn_func(q, k, v)


def test_on_an_arch_without_a_kernel_it_says_which_have_one(monkeypatch):
    monkeypatch.setattr(plan, "arch_name", lambda device: "sm_80")
    q, k, v = SMALL.inputs()[:3]
    with pytest.raises(ValueError, match=r"of arch sm_80: .* has kernels for sm_90a, sm_100a"):
        cutex.flash_attn_func(q, k, v)


# ---- what torch does with it


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
    with pytest.raises(ValueError, match="score_mod cannot be given under"), FakeTensorMode():
        cutex.flash_attn_func(q, k, v, score_mod=lambda s, *_: s)


# ---- gradients


GRADIENTS = {
    "dense": {},
    "causal": {"causal": True},
    "more queries than keys": {"causal": True, "seqlen_q": 50},
    "window": {"window": (6, 3)},
    "192/128": {"head_dim": 192, "head_dim_v": 128},
    "sink": {"sink": True, "window": (4, None)},
    "packed": {"lengths_q": (12, 9), "lengths_k": (7, 30), "causal": True},
    "packed with a sink": {"lengths_q": (12, 0), "lengths_k": (7, 30), "sink": True},
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_definition(stand_in, name, compiled):
    problem = replace(SMALL, dtype="fp16", **GRADIENTS[name])
    inputs = problem.inputs()
    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], inputs.sink) if x is not None]
    sink = leaves[3] if problem.sink else None
    mine = inputs._replace(q=leaves[0], k=leaves[1], v=leaves[2], sink=sink)
    function = torch.compile(call, backend="aot_eager") if compiled else call
    with flash_on_cpu():
        out, _ = function(problem, mine)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
        out.backward(grad)
    torch._dynamo.reset()
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = definition(problem, *wide)
    want.backward(grad.double())
    for x, y in zip(leaves, wide, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0.02, atol=0.01)


def definition(problem, q, k, v, sink=None):
    """O in float64, by autograd's own operations."""
    outs = []
    group = problem.heads_q // problem.heads_kv
    for s in problem.sequences:
        a, b, c = (problem.rows(x, s, side) for x, side in ((q, "q"), (k, "k"), (v, "k")))
        b, c = (x.repeat_interleave(group, 1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) * problem.softmax_scale
        offset = torch.arange(s.keys) - torch.arange(s.queries)[:, None] - (s.keys - s.queries)
        lo, hi = problem.band
        hidden = torch.zeros_like(offset, dtype=torch.bool)
        hidden |= offset < lo if lo is not None else hidden
        hidden |= offset > hi if hi is not None else hidden
        scores = scores.masked_fill(hidden, -1e30)
        if sink is not None:
            column = sink[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat((scores, column), -1)
        p = scores.softmax(-1)[..., : s.keys].masked_fill(hidden, 0.0)
        outs.append(torch.einsum("hqk,khd->qhd", p, c))
    return torch.cat(outs) if problem.lengths_q is not None else torch.stack(outs)


NO_GRADIENT = {
    "softcap=3.0, which torch's flash backward does not know": {"softcap": 3.0},
    "seqused_k, which torch's flash backward does not know": {"used_k": (3, 4)},
    "cu_seqlens_q or cu_seqlens_k alone": {"lengths_q": (3, 4)},
}


@pytest.mark.parametrize("sentence", NO_GRADIENT)
def test_where_there_is_no_gradient_it_says_so_at_once(stand_in, sentence):
    problem = replace(SMALL, **NO_GRADIENT[sentence])
    inputs = problem.inputs()
    mine = inputs._replace(q=inputs.q.requires_grad_())
    with pytest.raises(ValueError, match=sentence):
        call(problem, mine)
    with torch.no_grad():
        assert problem.check(inputs, *call(problem, mine)).ok


def test_there_is_no_gradient_through_lse_nor_through_a_users_function(stand_in):
    q, k, v = (x.requires_grad_() for x in SMALL.inputs()[:3])
    out, lse = cutex.flash_attn_func(q, k, v, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    with pytest.raises(ValueError, match="score_mod cannot be given"):
        cutex.flash_attn_func(q, k, v, score_mod=lambda s, *_: s)


def test_a_plan_changes_nothing_about_gradients(stand_in):
    q, k, v = SMALL.inputs()[:3]
    sink = torch.zeros(4)
    for a, b, c, d in itertools.product((False, True), repeat=4):
        tensors = [x.detach().requires_grad_(r) for x, r in ((q, a), (k, b), (v, c), (sink, d))]
        out = cutex.flash_attn_func(*tensors[:3], learnable_sink=tensors[3])
        assert out.requires_grad == (a or b or c or d)
    with torch.inference_mode():
        assert not cutex.flash_attn_func(q, k, v).requires_grad
        mine = [x.clone() for x in (q, k, v)]
    assert F.mse_loss(cutex.flash_attn_func(*mine), cutex.flash_attn_func(q, k, v)) == 0
