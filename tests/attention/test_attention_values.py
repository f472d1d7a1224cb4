"""Attention on Hopper is right whatever the values are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cutlass import Float32, cute
from flash_attn_calls import call
from torch import Tensor

import cutex
from cutex.compile import Compiled, compile
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.forward import Forward
from cutex.ops.attention import planned
from cutex.problem.attention import INITS
from cutex.problem.attention.case import AttentionCase, Inputs
from cutex.problem.attention.reference import attend
from cutex.sim import simulate

CASE = AttentionCase(seqlen_q=70, seqlen_k=520, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=64)
SLOW = pytest.mark.slow
BIG = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def by_the_forward_kernel(monkeypatch):
    """Not by those of caches, which few queries take."""
    monkeypatch.setattr(planned, "are_few", lambda call: False)


def computed(case: AttentionCase, inputs: Inputs) -> tuple[Tensor, Tensor]:
    with cutex.ops.simulated("sm_90a"):
        return call(case, inputs)


def wanted(case: AttentionCase, inputs: Inputs, exact: bool = True) -> tuple[Tensor, Tensor]:
    """O (rows, heads, head_dim_v) and LSE (heads, rows) of the only sequence."""
    return attend(case, inputs.q[0], inputs.k[0], inputs.v[0], None, exact=exact)


@pytest.mark.sweep(144)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(
    ("causal", "dtype"),
    [(False, "bf16"), (False, "fp16"), (True, "fp16"), pytest.param(True, "bf16", marks=SLOW)],
)
def test_every_family_of_data(init, causal, dtype):
    case = replace(CASE, init=init, causal=causal, dtype=dtype)
    inputs = case.inputs()
    found = case.check(inputs, *computed(case, inputs))
    assert found.ok, found.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "dtype"),
    [(init, "bf16") for init in ("x16", "qk-norm", "sink", "hot", "falling")]
    + [pytest.param(init, "fp16", marks=SLOW) for init in ("x8", "sink", "hot")],
)
def test_wild_scores_are_computed_once(init, dtype):
    """As many products as of tame scores: neither causal rows nor those that see all keys are
    loaded and computed again."""
    for causal in (False, True):
        config = Sm90ForwardConfig(head_dim=64, head_dim_v=64, causal=causal, num_ctas=1, tile_n=64)
        kernel = compile(Forward(config), dtype, "sm_90a")
        keys = 1728 if init == "falling" else 576  # more than a chunk
        case = replace(CASE, seqlen_q=128, seqlen_k=keys, causal=causal, dtype=dtype)
        assert products(kernel, replace(case, init=init)) == products(kernel, case)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_drift_are_computed_once_from_both_ends(head_dim, dtype, causal):
    """By little in a block, by more than float32 holds over all keys, up or down; a sink, too."""
    dims = {"head_dim": head_dim, "head_dim_v": head_dim, "causal": causal}
    config = Sm90ForwardConfig(**dims, num_ctas=1, tile_n=128, both_ends=True)
    kernel = compile(Forward(config), dtype, "sm_90a")
    case = replace(CASE, seqlen_q=192, seqlen_k=1024, dtype=dtype, **dims)
    tame = products(kernel, case)
    for init in ("falling", "rising", "sink", "x16"):
        assert products(kernel, replace(case, init=init)) == tame, init
    for drift in (160.0, -160.0):
        inputs = case.inputs()
        inputs.q[..., 0] = 4.0
        scores = torch.linspace(0.0, drift, case.seqlen_k)[:, None]
        inputs.k[..., 0] = (scores / (4.0 * case.softmax_scale)).to(inputs.k.dtype)
        assert products(kernel, case, inputs) == tame, drift


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, False)])
def test_fp16_follows_scores_that_rise_in_any_block(head_dim, causal):
    """Nothing is computed again for one key above all others, wherever it comes, for a wild row
    among tame ones, or for few rows that do not show what scores are like."""
    dims = {"head_dim": head_dim, "head_dim_v": head_dim, "causal": causal}
    kernel = compile(Forward(Sm90ForwardConfig(**dims, num_ctas=1, tile_n=128)), "fp16", "sm_90a")
    case = replace(CASE, seqlen_q=128, seqlen_k=1024, dtype="fp16", **dims)
    tame = products(kernel, case)
    for at in (900, 500, 5):
        inputs = case.inputs()
        inputs.q[..., 0], inputs.k[:, at, :, 0] = 4.0, 60.0
        assert products(kernel, case, inputs) == tame
    inputs = case.inputs()
    inputs.q[:, 37].mul_(16.0)
    assert products(kernel, case, inputs) == tame
    few = replace(case, seqlen_q=8, seqlen_k=424)
    assert products(kernel, replace(few, init="falling")) == products(kernel, few)


@pytest.mark.slow
def test_a_wild_row_of_bf16_is_seen_where_rows_see_little():
    """Rows of log-normal lengths, some of whose scores differ by more than bf16's range, in causal
    tiles, whose only block that is looked at has a mask."""
    config = Sm90ForwardConfig(head_dim=64, head_dim_v=64, causal=True, num_ctas=1, tile_n=128)
    kernel = compile(Forward(config), "bf16", "sm_90a")
    case = replace(CASE, seqlen_q=128, seqlen_k=1024, causal=True, dtype="bf16")
    inputs = case.inputs()
    for x in inputs[:2]:
        lengths = torch.randn(x.shape[:-1], generator=torch.Generator().manual_seed(3)).exp()
        x.mul_(lengths[..., None].to(x.dtype))
    assert products(kernel, case, inputs) == products(kernel, case)


def products(kernel: Compiled, case: AttentionCase, inputs: Inputs | None = None) -> int:
    """How many instructions of tensor cores `kernel` executes."""
    inputs = case.inputs() if inputs is None else inputs
    out, lse = case.outputs()
    counter = torch.zeros(2, dtype=torch.int32)
    report = simulate(kernel, *inputs[:3], out, lse, counter, case.softmax_scale)
    found = case.check(inputs, out, lse)
    assert found.ok, found.message
    return sum(n for op, n in report.counts.items() if op.startswith("wgmma.mma"))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("init", ["x4", "x8", "x16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_peaked_rows_are_as_exact_as_with_a_maximum(init, dtype):
    """O of P that is 1 for a row's largest score, rounded: what others compute."""
    case = replace(CASE, init=init, dtype=dtype, seqlen_q=128, seqlen_k=768)
    inputs = case.inputs()
    q, k, v = (x[0, :, 0].double() for x in inputs[:3])
    scores = q @ k.T * case.softmax_scale
    p = (scores - scores.amax(1, keepdim=True)).exp()
    want = p @ v / p.sum(1, keepdim=True)
    rounded = (p.to(inputs.q.dtype).double() @ v / p.sum(1, keepdim=True)).to(inputs.q.dtype)
    out, _ = computed(case, inputs)
    assert (out[0, :, 0] - want).norm() < 1.1 * (rounded - want).norm()


@pytest.mark.parametrize(
    ("init", "dtype", "causal", "seqlen_k", "head_dim", "seeds"),
    [
        ("falling", "bf16", False, 768, 64, 1),
        pytest.param("falling", "fp16", False, 768, 64, 8, marks=SLOW),
        pytest.param("falling", "bf16", True, 576, 64, 8, marks=SLOW),
        pytest.param("falling", "bf16", False, 1024, 256, 8, marks=SLOW),
        pytest.param("falling", "bf16", True, 320, 256, 8, marks=SLOW),
        pytest.param("rising", "bf16", True, 832, 96, 8, marks=SLOW),
        pytest.param("x16", "bf16", True, 832, 128, 8, marks=SLOW),
    ],
)
def test_lse_is_as_exact_as_with_a_maximum(init, dtype, causal, seqlen_k, head_dim, seeds):
    """In float32, of scores that are added up alike: exponents far from 0 are rounded by as much
    more, and powers of two of scores, and LSE with them, are as exact as the scale by which these
    are multiplied."""
    case = replace(CASE, init=init, dtype=dtype, causal=causal, seqlen_q=64, seqlen_k=seqlen_k)
    case = replace(case, head_dim=head_dim, head_dim_v=head_dim)
    found, usual = [], []
    for seed in range(seeds):
        inputs = replace(case, seed=seed).inputs()
        _, lse = computed(case, inputs)
        _, want = wanted(case, inputs)
        found.append(lse[0] - want)
        usual.append(lse_by_maximum(case, inputs) - want)
    assert torch.stack(found).norm() < 1.1 * torch.stack(usual).norm()


def lse_by_maximum(case: AttentionCase, inputs: Inputs) -> Tensor:
    """The LSE of the only head, in float32 throughout; scores are added up as the simulator's
    tensor cores do, 16 products at a time, so that both share these roundings, the most of large
    scores'."""
    q, k = (x[0, :, 0].float().numpy() for x in inputs[:2])
    added = np.zeros((case.seqlen_q, case.seqlen_k), np.float32)
    for c in range(0, case.head_dim, 16):
        added += q[:, c : c + 16] @ k[:, c : c + 16].T
    scores, scale = torch.from_numpy(added), torch.tensor(case.softmax_scale)
    if case.causal:
        hidden = torch.ones(scores.shape, dtype=torch.bool)
        scores.masked_fill_(hidden.triu(case.seqlen_k - case.seqlen_q + 1), -torch.inf)
    largest = scores.amax(1, keepdim=True)
    powers = ((scores - largest) * (scale * math.log2(math.e))).exp2()
    return largest[:, 0] * scale + powers.sum(1).log()


@pytest.mark.slow
def test_lse_of_equal_keys_is_as_exact_as_in_float32():
    """The sum's exponent is larger than the reference that it is added to."""
    case = replace(CASE, dtype="fp16", seqlen_q=128, seqlen_k=512)
    inputs = case.inputs()
    inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
    _, lse = computed(case, inputs)
    _, want = wanted(case, inputs)
    q, k = (x[0, :, 0].double() for x in inputs[:2])
    scores = (q @ k[0]).float() * torch.tensor(case.softmax_scale)
    usual = scores + torch.tensor(float(case.seqlen_k)).log()
    assert (lse[0] - want).norm() < 1.15 * (usual - want).norm()


@pytest.mark.slow
def test_lse_takes_the_scale_as_it_is():
    """Of scores that are exact, LSE is off by what rounds it in the end, to either side, and by the
    4e-9 that it takes more for what tensor cores truncate of others; by 1 over the root of 128 in
    float32, or in powers of two, all rows would be off by more than 1e-8 alike."""
    case = replace(CASE, seqlen_q=64, seqlen_k=256, head_dim=128, head_dim_v=128)
    case = replace(case, heads_q=4, heads_kv=4)
    inputs = case.inputs()
    for x in inputs[:2]:
        x.copy_(x.float().mul(8.0).round())
    _, lse = computed(case, inputs)
    _, want = wanted(case, inputs)
    assert abs((lse[0].double() / want - 1.0).mean() - 4e-9) < 4e-9


@pytest.mark.parametrize("score", [16.0, 60.0])
def test_a_lone_key_that_outweighs_all_is_as_exact_as_with_a_maximum(score):
    """It comes last, after blocks of which none shows what scores are like."""
    inputs = CASE.inputs()
    inputs.q[..., 0] = 2.0
    inputs.k[..., 0] = 0.0
    inputs.k[:, 5, :, 0] = score / (2.0 * CASE.softmax_scale)
    q, k, v = (x[0, :, 0].double() for x in inputs[:3])
    scores = q @ k.T * CASE.softmax_scale
    want = scores.softmax(1) @ v
    p = (scores - scores.amax(1, keepdim=True)).exp()
    rounded = (p.bfloat16().double() @ v / p.sum(1, keepdim=True)).bfloat16()
    out, _ = computed(CASE, inputs)
    assert (out[0, :, 0] - want).norm() <= 1.1 * (rounded - want).norm()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("window", [(800, 0), (700, None)])
def test_rows_whose_last_block_is_masked_are_as_exact_as_with_a_maximum(window, dtype):
    """Blocks before it came without anybody looking for their largest probability: that of the
    masked one is not the row's."""
    case = replace(CASE, dtype=dtype, seqlen_q=64, seqlen_k=1024, window=window)
    inputs = case.inputs()
    found, theirs = errors(case, inputs)
    assert found < 1.1 * theirs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("window", [(None, 64), (None, None), (200, 0)])
@pytest.mark.parametrize(
    ("below", "above", "key"), [(0.0, 37.5, 400), (40.0, 35.0, 400), (45.0, 38.0, 70)]
)
def test_a_key_that_outweighs_all_of_any_sign_and_place(dtype, window, below, above, key):
    """In a block whose scores too few rows show to be peaked, in one that is guarded, or behind
    these; its score and all others may be far below 0. Its probability leaves no rounding in O."""
    case = replace(CASE, dtype=dtype, seqlen_q=80, seqlen_k=576, window=window)
    inputs = case.inputs()
    inputs.q.mul_(3.0)[..., 0] = 2.0
    inputs.k[..., 0] = -below / (2.0 * case.softmax_scale)
    inputs.k[:, key, :, 0] = (above - below) / (2.0 * case.softmax_scale)
    found, theirs = errors(case, inputs)
    assert found < 1.1 * theirs + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rise", [20.0, 50.0, 80.0, 87.0, 110.0])
def test_peaked_scores_that_rise_at_once(dtype, rise):
    """By powers of two that fp32 holds, by more than one factor can take back, and by more than it
    holds; two keys of the next block are larger by little."""
    case = replace(CASE, dtype=dtype, seqlen_q=64, seqlen_k=704)
    inputs = case.inputs()
    inputs.q.mul_(3.0)[..., 0] = 2.0
    inputs.k[..., 0] = 0.0
    for key, above in ((300, 0.0), (310, -1.0), (100, 0.5), (101, 1.0)):
        inputs.k[:, key, :, 0] = (rise + above) / (2.0 * case.softmax_scale)
    found, theirs = errors(case, inputs)
    assert found < 1.1 * theirs + 1e-5


def test_many_keys_far_below_one_that_comes_late_are_not_lost():
    """A peaked block, then a key to which references rise in fp16, and behind it hundreds of keys
    of 2^-22 of its probability, which alone have values: had references risen above that key, they
    would be rounded to 0."""
    case = replace(CASE, seqlen_q=64, seqlen_k=1024, scale=1.0, dtype="fp16")
    inputs = case.inputs()
    inputs.q.zero_()[..., 0] = 1.0
    inputs.k[..., 0].mul_(0.5)
    inputs.k[:, [896, 930, 964, 998], :, 0] = 4.0
    inputs.k[:, 700, :, 0] = 15.5
    inputs.v.fill_(1.0)[:, 700] = 0.0
    found, theirs = errors(case, inputs)
    assert found < 2.0 * theirs + 2.0**-6


@pytest.mark.slow
def test_what_has_overflowed_before_a_masked_block_is_seen():
    """In fp16, with a window: a key of tame blocks, whose probability is infinite, and a larger one
    in the last block, which is masked, and where references rise above both."""
    case = replace(CASE, seqlen_q=64, seqlen_k=704, scale=1.0, window=(500, 0), dtype="fp16")
    inputs = case.inputs()
    inputs.q.zero_()[..., 0] = 1.0
    inputs.k.zero_()[:, 300, :, 0] = 13.0
    inputs.k[:, 210, :, 0] = 14.0
    found, theirs = errors(case, inputs)
    assert found < 1.1 * theirs + 1e-4


@pytest.mark.slow
def test_a_large_key_at_a_tie_beside_another_one():
    """All rows alike, in blocks of which none is peaked: what the largest key's part of a block has
    beside it is less than the mean, most of which is one key elsewhere. O is off by no more than
    half a unit of that probability."""
    power = math.log2((1.0 + 1.5 * 2.0**-7) * 2.0**17 + 10.0)  # rounded up
    case = replace(CASE, scale=power * math.log(2.0) / 17.0)
    inputs = case.inputs()
    inputs.q.zero_()[..., 0] = 1.0
    inputs.k.zero_()[:, 70, :, 0] = 17.0
    inputs.k[:, 300, :, 0] = 10.625
    found, _ = errors(case, inputs)
    assert found < 1.5 * 2.0**-8


@pytest.mark.slow
def test_a_lone_key_whose_rounding_is_a_tie():
    """Its probability, known but for what the other keys of its part of a block have, lies between
    two bf16 numbers in one row: the whole rounding would be left in O."""
    case = replace(CASE, seqlen_q=192, seqlen_k=576, heads_q=2, seed=3)
    inputs = case.inputs()
    inputs.q.mul_(0.5)[..., 0] = 2.0
    inputs.k[..., 0] = -35.0 / (2.0 * case.softmax_scale)
    inputs.k[:, 70, :, 0] = -18.0 / (2.0 * case.softmax_scale)
    out, _ = computed(case, inputs)
    want, torchs = (wanted(case, inputs, exact=exact)[0] for exact in (True, False))
    found, theirs = ((x - want).norm(dim=-1).max() for x in (out[0].double(), torchs))
    assert found < 1.1 * theirs + 1e-5


@pytest.mark.parametrize(
    ("head_dim", "power"),
    [(64, 23), *(pytest.param(*x, marks=SLOW) for x in ((64, 25), (256, 20), (256, 25)))],
)
def test_a_lone_key_at_a_tie_among_scores_far_below_0(head_dim, power):
    """All rows alike, the probability at the middle between two bf16 numbers, of which an estimate
    cannot tell to which it was rounded: scores below 0 are ordered, too."""
    for odd in (1, 3, 5):
        scale = (power + math.log2(1.0 + odd * 2.0**-8)) * math.log(2.0) / 17.0
        case = replace(CASE, seqlen_q=64, head_dim=head_dim, head_dim_v=head_dim, scale=scale)
        inputs = case.inputs()
        inputs.q.zero_()[..., 0] = 1.0
        inputs.k.zero_()[..., 0] = -35.0
        inputs.k[:, 70, :, 0] = -18.0
        found, theirs = errors(case, inputs)
        assert found < 1.1 * theirs + 1e-5


@pytest.mark.slow
def test_a_lone_key_whose_reference_moves_at_the_end():
    """Its probability is near a tie: relative to the reference at the end, which has one bit less
    of its fraction, it would be rounded to the other side."""
    case = replace(CASE, seqlen_q=64, seqlen_k=640)
    inputs = case.inputs()
    rows = torch.tensor([(16.0, -6.25), (17.0, -2.75), (18.5, 2.5), (20.0, 7.75)])
    inputs.q.zero_()[0, :, 0, :2] = rows.repeat(16, 1)
    inputs.k.zero_()[0, 520, 0, :2] = torch.tensor([13.0, 1.0])  # to which references rise first
    inputs.k[0, 300, 0, :2] = torch.tensor([27.0, -3.0])
    config = Sm90ForwardConfig(head_dim=64, head_dim_v=64, tile_n=64, guards_all=True)
    # NOTE: torch has the maximum as reference, and no error
    out, lse = case.outputs()
    counter = torch.zeros(2, dtype=torch.int32)
    kernel = compile(Forward(config), "bf16", "sm_90a")
    simulate(kernel, *inputs[:3], out, lse, counter, case.softmax_scale)
    want, _ = wanted(case, inputs)
    assert (out[0].double() - want).norm() < 1e-6 * want.norm()


def errors(case: AttentionCase, inputs: Inputs) -> tuple[float, float]:
    """The norm of O's error, and that of torch at the same precision, relative to O."""
    out, _ = computed(case, inputs)
    want, torchs = (wanted(case, inputs, exact=exact)[0] for exact in (True, False))
    return tuple(float((x - want).norm() / want.norm()) for x in (out[0].double(), torchs))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize("score", [40.0, 80.0, 120.0])
def test_a_sink_and_a_large_value_of_v(factor, score):
    """The product of an exponential that exceeds all before by far, and of a value that is large
    itself, in scores that are tame and in others that are not."""
    inputs = CASE.inputs()
    inputs.q.mul_(factor)
    inputs.q[..., 0] = 8.0
    inputs.k[..., 0] = 0.0
    inputs.k[:, 3, :, 0] = score
    inputs.v[:, 3, :, 5] = 1e37
    out, lse = computed(CASE, inputs)
    want, want_lse = wanted(CASE, inputs)
    assert torch.allclose(out[0].double(), want, rtol=0.02, atol=0.02)
    assert (lse[0].double() - want_lse).abs().max() < 1e-4


@pytest.mark.sweep(4)
@pytest.mark.parametrize("column", [0, 5, 31, 63])
@pytest.mark.parametrize("value", [3e38, float("inf")])
def test_a_large_value_in_any_column_of_v_stays_there(column, value):
    inputs = CASE.inputs()
    inputs.v[:, 7, :, column] = value
    out, lse = computed(CASE, inputs)
    want, want_lse = wanted(CASE, inputs)
    others = [c for c in range(64) if c != column]
    assert (out[0][..., others].double() - want[..., others]).abs().max() < 0.02
    assert torch.allclose(out[0][..., column].double(), want[..., column], rtol=0.02)
    assert (lse[0].double() - want_lse).abs().max() < 1e-4


@pytest.mark.parametrize(
    "rest", [pytest.param(-50.0, marks=SLOW), -150.0, pytest.param(-1000.0, marks=SLOW)]
)
def test_keys_of_minus_infinity_first_and_small_scores_after(rest):
    """Whichever block is taken first: the end, the beginning, both."""
    for hidden in (slice(384, None), slice(0, 128), slice(128, None), slice(0, 519)):
        inputs = CASE.inputs()
        inputs.q.fill_(1.0)
        inputs.k.fill_(rest / 8)  # 64 products, times 1 / 8
        inputs.k[:, hidden, :, 0] = -torch.inf
        out, lse = computed(CASE, inputs)
        want, want_lse = wanted(CASE, inputs)
        assert (out[0].double() - want).abs().max() < 0.02, hidden
        assert (lse[0].double() - want_lse).abs().max() < 1e-3, hidden


@pytest.mark.sweep(5)
@pytest.mark.parametrize("hidden", [-1e9, -1e10, -1e30, BIG, -float("inf")])
def test_a_score_mod_that_hides_keys_by_a_large_negative_score(hidden):
    """In row 3 it hides all keys: the softmax is then that of equal scores."""
    inputs = CASE.inputs()

    @cute.jit
    def mod(score, batch, head, q, k):
        return Float32(hidden) if (k % 3 == 0) | (q == 3) else score

    with cutex.ops.simulated("sm_90a"):
        out, lse = cutex.flash_attn_func(*inputs[:3], score_mod=mod, return_lse=True)
    q, k, v = (x[0, :, 0].double() for x in inputs[:3])
    scores = q @ k.T / 8
    scores[:, ::3] = hidden
    scores[3] = hidden
    shown = slice(0, None) if hidden > -float("inf") else [i for i in range(70) if i != 3]
    want = torch.softmax(scores, 1) @ v
    assert (out[0, :, 0].double() - want)[shown].abs().max() < 0.02
    want_lse = torch.logsumexp(scores, 1)
    error = (lse[0, 0].double() - want_lse) / want_lse.abs().clamp(min=1)
    assert error[shown].abs().max() < 1e-5


@pytest.mark.sweep(8)
@pytest.mark.parametrize("size", [1e3, 1e5, 1e7, 1e10, 1e20])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_any_size(size, sign):
    """Nearly all scores of a row are alike, some are a little larger."""
    case = replace(CASE, scale=1.0)
    inputs = case.inputs()
    inputs.q.zero_()
    inputs.k.zero_()
    inputs.q[..., 0] = 1.0
    inputs.k[..., 0] = sign * size
    inputs.q[..., 1] = 1.0
    inputs.k[:, 40:50, :, 1] = abs(float(inputs.k[0, 0, 0, 0])) * 2**-20
    out, lse = computed(case, inputs)
    want, want_lse = wanted(case, inputs, exact=False)  # scores in float32, as ours
    assert (out[0].double() - want).abs().max() < 0.02
    assert ((lse[0].double() - want_lse) / want_lse).abs().max() < 1e-6
