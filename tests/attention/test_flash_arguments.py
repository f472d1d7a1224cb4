"""FlashAttention's calls as they are: its arguments, its orders, its head dims, packed operands."""

from __future__ import annotations

import pytest
import torch
from attention_stand_in import StandIn

import cutex
from cutex.ops.attention import planned
from cutex.ops.attention.call import HEAD_DIMS, kernel_dims
from cutex.ops.attention.flash_arguments import NEUTRAL, OTHER_NAMES


@pytest.fixture
def stand_in(monkeypatch):
    with cutex.ops.simulated("sm_90a"):
        yield StandIn(monkeypatch)
    planned.forget()


def normal(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).bfloat16()


def operands(d=64, dv=None, heads=4, heads_kv=2, rows=40):
    dims = (d, d, d if dv is None else dv)
    return [
        normal(2, rows, n, dim, seed=i)
        for i, (n, dim) in enumerate(zip((heads, heads_kv, heads_kv), dims, strict=True))
    ]


ENDS = torch.tensor([0, 9, 29], dtype=torch.int32)


def reference(q, k, v, window=(None, None), scale=None):
    """O by definition, in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    offset = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
    left, right = window
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    if left is not None:
        hidden |= offset < -left
    if right is not None:
        hidden |= offset > right
    # a row without keys is 0
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (probabilities @ v).transpose(1, 2)


def close(x, y):
    torch.testing.assert_close(x.double(), y.double(), rtol=0.02, atol=0.02)


# ---- arguments


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_value_passes_and_another_is_one_sentence(stand_in, name):
    q, k, v = operands()
    want = cutex.flash_attn_func(q, k, v, causal=True)
    for value in NEUTRAL[name].values:
        assert torch.equal(cutex.flash_attn_func(q, k, v, causal=True, **{name: value}), want)
        rows = (x.flatten(0, 1)[:29] for x in (q, k, v))
        cutex.flash_attn_varlen_func(*rows, ENDS, ENDS, 20, 20, **{name: value})
    for value in (2, 0.5, "yes", torch.ones(4)):
        with pytest.raises(ValueError, match=f"^{name} is ") as error:
            cutex.flash_attn_func(q, k, v, **{name: value})
        assert "\n" not in str(error.value)


def test_an_argument_that_nobody_has_is_refused_by_its_name(stand_in):
    q, k, v = operands()
    for function, more in ((cutex.flash_attn_func, ()), (cutex.flash_attn_varlen_func, (ENDS,))):
        with pytest.raises(
            TypeError, match=rf"^{function.__name__}\(\) got an unexpected .*'dropout'"
        ):
            function(q, k, v, *more, dropout=0.0)


def test_arguments_of_another_name_are_ours(stand_in):
    q, k, v = operands()
    out, lse = cutex.flash_attn_func(q, k, v, return_softmax_lse=True)
    assert set(OTHER_NAMES.values()) <= {"return_lse", "learnable_sink"}
    want = cutex.flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    sink = torch.randn(4)
    ours = cutex.flash_attn_func(q, k, v, learnable_sink=sink)
    assert torch.equal(cutex.flash_attn_func(q, k, v, s_aux=sink), ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_s_aux_is_a_key_more_of_each_head_whose_value_is_zero(stand_in, dtype):
    """As vLLM's and transformers' gpt-oss call it, of each function."""
    q, k, v = operands()
    sink = torch.tensor([3.0, -torch.inf, 0.5, -20.0]).to(dtype)
    repeated = [x.double().repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), repeated[0]) * q.shape[-1] ** -0.5
    column = sink.double()[:, None, None].expand(*scores.shape[:3], 1)
    lse = torch.logsumexp(torch.cat((scores, column), -1), -1)
    want = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), repeated[1])
    out, found = cutex.flash_attn_func(q, k, v, s_aux=sink, return_softmax_lse=True)
    close(out, want)
    close(found, lse)
    ends = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    close(cutex.flash_attn_varlen_func(*flat, ends, ends, 40, 40, s_aux=sink), want.flatten(0, 1))
    assert torch.equal(cutex.flash_attn_func(q, k, v, learnable_sink=sink, s_aux=None), out)
    assert torch.equal(cutex.flash_attn_func(q, k, v, learnable_sink=sink, s_aux=sink), out)


def test_an_argument_by_both_of_its_names_is_refused_in_a_sentence(stand_in):
    q, k, v = operands()
    sinks = {"learnable_sink": torch.randn(4), "s_aux": torch.randn(4)}
    for function in (cutex.flash_attn_func, cutex.flash_attn_with_kvcache):
        with pytest.raises(ValueError, match=r"^learnable_sink and s_aux are the same"):
            function(q, k, v, **sinks)
    out = cutex.flash_attn_func(q, k, v, return_lse=True, return_softmax_lse=False)
    assert isinstance(out, tuple), "False is the other name's default"


@pytest.mark.parametrize(
    ("window", "ours"),
    [
        ((-1, -1), (None, None)), ((-1, 0), (None, 0)), ((5, -1), (5, None)), ([-1, 3], (None, 3)),
    ],
)  # fmt: skip
def test_a_window_of_minus_1_is_an_open_side(stand_in, window, ours):
    q, k, v = operands()
    close(cutex.flash_attn_func(q, k, v, window_size=window), reference(q, k, v, ours))
    graded = [x.clone().requires_grad_() for x in (q, k, v)]
    close(cutex.flash_attn_func(*graded, window_size=window), reference(q, k, v, ours))


@pytest.mark.parametrize(
    ("window", "ours"),
    [
        ((None, -1), (None, -1)), ((None, -3), (None, -3)), ((-2, None), (-2, None)),
        ((-2, 4), (-2, 4)), ((9, -3), (9, -3)), ((-3, 0), (-3, 0)), ((None, -100), (None, -100)),
        ((-(2**40), None), (-100, None)), ((-2, -1), (None, None)), ((-5, -7), (None, None)),
    ],
)  # fmt: skip
def test_another_negative_side_is_a_bound_off_the_diagonal(stand_in, window, ours):
    q, k, v = operands()
    close(cutex.flash_attn_func(q, k, v, window_size=window), reference(q, k, v, ours))


def test_a_window_in_a_tensor_is_that_of_its_numbers_at_each_call(stand_in):
    """FlashAttention's own tests draw theirs so; the same tensor may have other numbers later."""
    q, k, v = operands()
    flat = [x[0] for x in (q, k, v)]
    ends = torch.tensor([0, 40], dtype=torch.int32)
    window = torch.tensor([5, 0])
    for sides in [(5, 0), (3, 2), (-1, 7)]:
        window.copy_(torch.tensor(sides))
        want = reference(q, k, v, (None if sides[0] < 0 else sides[0], sides[1]))
        close(cutex.flash_attn_func(q, k, v, window_size=window), want)
        packed = cutex.flash_attn_varlen_func(*flat, ends, ends, 40, 40, window_size=window)
        close(packed, want[0])
    for bad in (torch.tensor(3), torch.tensor([1, 2, 3])):
        with pytest.raises(TypeError, match="window_size must be a pair"):
            cutex.flash_attn_func(q, k, v, window_size=bad)
    with pytest.raises(TypeError, match="a side is a whole number"):
        cutex.flash_attn_func(q, k, v, window_size=torch.tensor([1.0, 2.0]))


# dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
SECOND = [
    ((0.0, None, True), {"window": (None, 0)}),
    ((0.0, 0.2, True), {"window": (None, 0), "scale": 0.2}),
    ((0.0, 0.2, False, (5, 0)), {"window": (5, 0), "scale": 0.2}),
    ((0.0, None, True, (-1, -1), 0.0, None), {"window": (None, 0)}),
    ((0.0, None), {}),
    ((0, 0.2), {"scale": 0.2}),
]
# the same with names for some, as its users write it
MIXED = [
    ((0.0,), {"causal": True}, {"window": (None, 0)}),
    ((0.0,), {"softmax_scale": 0.2, "causal": True}, {"window": (None, 0), "scale": 0.2}),
    ((0.0, 0.2), {"causal": True, "window_size": (5, -1)}, {"window": (5, 0), "scale": 0.2}),
    ((0.0,), {"window_size": (5, 0), "alibi_slopes": None}, {"window": (5, 0)}),
    ((0.2,), {"causal": True}, {"window": (None, 0), "scale": 0.2}),  # FlashAttention-3's order
    ((0.2, True), {"window_size": (5, -1)}, {"window": (5, 0), "scale": 0.2}),
]


@pytest.mark.parametrize(("given", "want"), SECOND)
def test_the_order_of_flash_attn_2_is_recognised(stand_in, given, want):
    q, k, v = operands()
    close(cutex.flash_attn_func(q, k, v, *given), reference(q, k, v, **want))
    flat = [x[:1].flatten(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 40], dtype=torch.int32)
    out = cutex.flash_attn_varlen_func(*flat, ends, ends, 40, 40, *given)
    close(out[None], reference(q[:1], k[:1], v[:1], **want))


@pytest.mark.parametrize(("given", "by_name", "want"), MIXED)
def test_either_order_with_names_for_the_rest(stand_in, given, by_name, want):
    q, k, v = operands()
    close(cutex.flash_attn_func(q, k, v, *given, **by_name), reference(q, k, v, **want))
    flat = [x[:1].flatten(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 40], dtype=torch.int32)
    out = cutex.flash_attn_varlen_func(*flat, ends, ends, 40, 40, *given, **by_name)
    close(out[None], reference(q[:1], k[:1], v[:1], **want))


def test_an_argument_given_twice_is_told(stand_in):
    q, k, v = operands()
    with pytest.raises(TypeError, match=r"multiple values for argument 'causal'"):
        cutex.flash_attn_func(q, k, v, 0.0, None, True, causal=True)
    with pytest.raises(TypeError, match=r"10 arguments after the operands: at most 9"):
        cutex.flash_attn_func(q, k, v, 0.0, *[None] * 9)


@pytest.mark.parametrize("given", [
    (None, None, 0.125, True), (ENDS, ENDS, 0.125, True), (None, None, None, 0.125, True),
    (0.125, True, 128), (0.125, True, ENDS),
], ids=str)  # fmt: skip
def test_an_order_of_another_version_is_told_not_misread(stand_in, given):
    """flash-attn 3 has seqused_q and seqused_k before softmax_scale, 4 a page table, too."""
    x = normal(20, 4, 64)
    with pytest.raises(TypeError, match=r"arguments by place are .*; those of another order go by"):
        cutex.flash_attn_varlen_func(x, x, x, ENDS, ENDS, 10, 10, *given)


def test_flash_attn_2s_last_argument_by_place_is_the_block_table(stand_in):
    flat, ends = normal(40, 4, 64), torch.tensor([0, 40], dtype=torch.int32)
    rest = 0.0, None, True, (-1, -1), 0.0, None, False, False, None
    out = cutex.flash_attn_varlen_func(flat, flat, flat, ends, ends, 40, 40, *rest)
    close(out[None], reference(*(flat[None],) * 3, window=(None, 0)))


@pytest.mark.slow
def test_a_block_table_among_arguments_of_flash_attn_2():
    """0.0 in dropout_p's place, as its users and its tests have it."""
    q = normal(2, 4, 64)
    k = normal(3, 64, 2, 64)
    ends = torch.tensor([0, 1, 2], dtype=torch.int32)
    ends_k = torch.tensor([0, 80, 87], dtype=torch.int32)
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    with cutex.ops.simulated("sm_90a"):
        out, _ = cutex.flash_attn_varlen_func(
            q, k, k, ends, ends_k, 1, 80, 0.0, causal=True, block_table=table, deterministic=True,
            return_lse=True,
        )  # fmt: skip
    for b, keys in enumerate((torch.cat((k[2], k[0]))[:80], k[1][:7])):
        close(out[b][None, None], reference(q[b][None, None], keys[None], keys[None]))


def test_what_is_no_neutral_value_in_that_order_is_told_by_its_name(stand_in):
    q, k, v = operands()
    with pytest.raises(ValueError, match=r"^dropout_p is 0\.1: there is no dropout here"):
        cutex.flash_attn_func(q, k, v, 0.1, None, True)
    with pytest.raises(ValueError, match=r"^dropout_p is 0\.1: there is no dropout here"):
        cutex.flash_attn_func(q, k, v, 0.1, softmax_scale=0.2, causal=True)
    with pytest.raises(TypeError, match=r"^causal must be True or False, got None"):
        cutex.flash_attn_func(q, k, v, causal=None)


# ---- packed operands


def test_packed_operands_are_read_where_they_are(stand_in):
    qkv = normal(2, 40, 3, 4, 64)
    want = cutex.flash_attn_func(*qkv.unbind(2), causal=True, softmax_scale=0.2)
    assert torch.equal(cutex.flash_attn_qkvpacked_func(qkv, 0.0, 0.2, True), want)
    assert torch.equal(cutex.flash_attn_qkvpacked_func(qkv, softmax_scale=0.2, causal=True), want)
    given = stand_in.launches[-1][1]
    assert [given[name].data_ptr() - qkv.data_ptr() for name in "qkv"] == [0, 512, 1024]
    q, kv = normal(2, 40, 4, 64, seed=1), normal(2, 40, 2, 2, 64)
    out, lse = cutex.flash_attn_kvpacked_func(q, kv, causal=True, return_lse=True)
    want = cutex.flash_attn_func(q, *kv.unbind(2), causal=True, return_lse=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_packed_operands_of_several_sequences(stand_in):
    qkv = normal(29, 3, 4, 64)
    q, k, v = qkv.unbind(1)
    want = cutex.flash_attn_varlen_func(q, k, v, ENDS, ENDS, 20, 20, causal=True)
    assert torch.equal(cutex.flash_attn_varlen_qkvpacked_func(qkv, ENDS, 20, 0.0, None, True), want)
    kv = qkv[:, 1:]
    got = cutex.flash_attn_varlen_kvpacked_func(q, kv, ENDS, ENDS, 20, 20, causal=True)
    assert torch.equal(got, want)


def test_packed_operands_that_are_none(stand_in):
    with pytest.raises(
        ValueError, match=r"qkv has shape \(2, 9, 2, 4, 64\), it must be \(batch, se"
    ):
        cutex.flash_attn_qkvpacked_func(normal(2, 9, 2, 4, 64))
    with pytest.raises(
        ValueError, match=r"kv has shape \(9, 4, 64\), it must be \(total, 2, heads"
    ):
        cutex.flash_attn_varlen_kvpacked_func(normal(9, 4, 64), normal(9, 4, 64), ENDS, ENDS)
    with pytest.raises(TypeError, match=r"qkv must be a torch.Tensor, got list"):
        cutex.flash_attn_qkvpacked_func([1])
    with pytest.raises(TypeError, match=r"10 arguments after the operands: at most 9"):
        cutex.flash_attn_qkvpacked_func(normal(2, 9, 3, 4, 64), *[None] * 10)


# ---- head dims


def test_each_multiple_of_8_up_to_256_has_a_kernel_that_holds_it():
    for d in range(8, 257, 8):
        for dv in range(8, 257, 8):
            held = kernel_dims(d, dv)
            assert held in HEAD_DIMS and held[0] >= d and held[1] >= dv
    assert all(kernel_dims(*dims) == dims for dims in HEAD_DIMS)
    assert kernel_dims(72, 40) == (96, 96) and kernel_dims(160, 112) == (192, 128)
    for dims in ((0, 64), (64, 0), (36, 36), (264, 264), (64, 12), (4, 8)):
        assert kernel_dims(*dims) is None


@pytest.mark.parametrize("dims", [(8, 8), (32, 32), (40, 72), (80, 80), (112, 112), (160, 8)])
def test_any_of_them_by_definition(stand_in, dims):
    q, k, v = operands(*dims)
    out = cutex.flash_attn_func(q, k, v, causal=True)
    close(out, reference(q, k, v, (None, 0)))
    config = stand_in.launches[-1][0]
    assert (config.head_dim, config.head_dim_v) == kernel_dims(*dims)


def test_others_are_told_what_is_taken(stand_in):
    for d in (36, 264):
        with pytest.raises(
            ValueError, match=f"have head dims {d} and {d}, each must be a multiple"
        ):
            cutex.flash_attn_func(*operands(d))


def poisoned(shape, seed):
    """A view whose neighbouring columns are NaN."""
    *sizes, d = shape
    x = torch.full((*sizes, d + 24), torch.nan).bfloat16()[..., 8 : d + 8]
    return x.copy_(normal(*shape, seed=seed))


KERNELS = [
    pytest.param(arch, dims, marks=() if (arch, dims) == ("sm_90a", (72, 40)) else pytest.mark.slow)
    for arch in ("sm_90a", "sm_100a")
    for dims in ((72, 40), (40, 32), (112, 112), (160, 112), (200, 136), (248, 248))
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dims"), KERNELS)
@pytest.mark.parametrize(
    "kind", ["dense", *(pytest.param(x, marks=pytest.mark.slow) for x in ("packed", "few rows"))]
)
def test_the_kernel_reads_and_writes_the_columns_that_there_are(arch, dims, kind):
    """Dense, packed, and with heads packed into rows."""
    d, dv = dims
    q, k = poisoned((2, 70, 4, d), 0), poisoned((2, 70, 2, d), 1)
    v = poisoned((2, 70, 2, dv), 2)
    if kind == "few rows":
        q = q[:, :3]
    with cutex.ops.simulated(arch):
        if kind == "packed":
            ends = torch.tensor([0, 70, 140], dtype=torch.int32)
            flat = (x.flatten(0, 1) for x in (q, k, v))
            out = cutex.flash_attn_varlen_func(*flat, ends, ends, 70, 70, causal=True)
            out = out.view(2, 70, 4, dv)
        else:
            out = cutex.flash_attn_func(q, k, v, causal=True)
    close(out, reference(q, k, v, (None, 0)))
