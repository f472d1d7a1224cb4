"""AttentionCase: its reference, the errors that its tolerance finds, and the places of its NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from cutex.problem.attention import INITS
from cutex.problem.attention.case import AttentionCase
from cutex.problem.attention.randomized import draw
from cutex.problem.attention.reference import attend
from cutex.problem.attention.shapes import VIEWS

SMALL = AttentionCase(
    batch=2, seqlen_q=37, seqlen_k=53, heads_q=4, heads_kv=2, head_dim=64, head_dim_v=64
)
PACKED = replace(SMALL, lengths_q=(20, 0, 33), lengths_k=(41, 7, 18), batch=3, tail=5, causal=True)


def solved(problem: AttentionCase, **changed):
    """The problem's inputs, and torch's result for them at the kernel's precision."""
    other = replace(problem, **changed)
    inputs = problem.inputs()
    out, lse = problem.outputs()
    for s in problem.sequences:
        q = problem.rows(inputs.q, s, "q")
        k, v = (problem.rows(x, s, "k") for x in (inputs.k, inputs.v))
        o, found_lse = attend(other, q, k, v, inputs.sink, exact=False)
        problem.rows(out, s, "q").copy_(o)
        problem.lse_rows(lse, s).copy_(found_lse)
    return inputs, out, lse


def heads_first(x):
    return x.double().transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_scaled_dot_product_attention(causal):
    problem = replace(SMALL, causal=causal, seqlen_q=53)
    q, k, v = (x[0] for x in problem.inputs()[:3])
    out, lse = attend(problem, q, k, v, None, exact=True)
    q, k, v = map(heads_first, (q, k, v))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(heads_first(out), want, rtol=1e-12, atol=1e-12)
    scores = q @ k.repeat_interleave(2, 0).mT / 8
    if causal:
        scores.masked_fill_(torch.ones(53, 53).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_a_sink_is_one_more_key_whose_value_is_zero():
    problem = replace(SMALL, sink=True, heads_kv=4, softcap=3.0)
    inputs = problem.inputs()
    q, k, v = (x[0] for x in inputs[:3])
    out, lse = attend(problem, q, k, v, inputs.sink, exact=True)
    q, k, v = map(heads_first, (q, k, v))
    scores = 3 * (q @ k.mT / 8 / 3).tanh()
    column = inputs.sink.double()[:, None, None].expand(4, 37, 1)
    p = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(heads_first(out), p @ v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.cat((scores, column), -1).logsumexp(-1))


def test_rows_without_keys_are_zero():
    problem = replace(SMALL, causal=True, seqlen_q=60)  # the first 7 see nothing
    inputs = problem.inputs()
    q, k, v = (x[0] for x in inputs[:3])
    out, lse = attend(problem, q, k, v, None, exact=True)
    assert not out[:7].any() and out[7:].any(-1).all()
    assert (lse[:, :7] == -torch.inf).all() and lse[:, 7:].isfinite().all()
    sink = torch.randn(4)
    out, lse = attend(problem, q, k[:0], v[:0], sink, exact=True)
    assert not out.any() and torch.equal(lse.float(), sink[:, None].expand(4, 60))


@pytest.mark.parametrize("problem", [SMALL, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("init", INITS)
def test_torchs_own_computation_passes(problem, init):
    problem = replace(problem, init=init)
    found = problem.check(*solved(problem))
    assert found.ok, found.message
    assert found.max_error <= found.tolerance


@pytest.mark.parametrize("seed", range(40))
def test_torchs_own_computation_passes_on_randomized_problems(seed):
    problem = draw(seed, largest=7, most_work=2**22)
    found = problem.check(*solved(problem))
    assert found.ok, f"{problem}: {found.message}"


WRONG = {
    "one key too many": {"window": (8, 1)},
    "one key too few on the left": {"window": (7, 0)},
    "a scale that is off by a bit": {"scale": 64**-0.5 * (1 + 2**-7)},
    "no softcap": {"softcap": 0.0},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_computation_is_found(wrong):
    problem = replace(SMALL, window=(8, 0), softcap=8.0)
    assert problem.check(*solved(problem)).ok
    found = problem.check(*solved(problem, **WRONG[wrong]))
    assert not found.ok
    assert "sequence 0 (37 queries, 53 keys)" in found.message


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_wrong_key_of_thousands_is_found_in_o_and_in_lse(side):
    problem = AttentionCase(
        seqlen_q=8, seqlen_k=4000, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=64,
        window=(3900, 0)
    )  # fmt: skip
    inputs, out, lse = solved(problem, window=(3901, 0) if side == "left" else (3900, 1))
    _, right, right_lse = solved(problem)
    assert problem.check(inputs, right, right_lse).ok
    assert problem.check(inputs, out, right_lse).message.startswith("sequence 0")
    found = problem.check(inputs, right, lse)
    assert not found.ok and "LSE[0, 0] is" in found.message


def test_what_was_never_written_is_named():
    inputs, out, lse = solved(SMALL)
    out[1, 20, 3, 7] = torch.nan
    found = SMALL.check(inputs, out, lse)
    assert not found.ok and "O[20, 3, 7] is nan: 1 of 9472" in found.message
    inputs, out, lse = solved(SMALL)
    lse[1, 2, 5] = torch.nan
    found = SMALL.check(inputs, out, lse)
    assert not found.ok and "LSE[2, 5] is nan" in found.message
    assert "sequence 1" in found.message


def test_a_write_to_rows_of_nobody_is_found():
    for name, x in (("O", 1), ("LSE", 2)):
        result = solved(PACKED)
        result[x].narrow(0 if x == 1 else 1, 54, 1).fill_(0.5)
        found = PACKED.check(*result)
        assert not found.ok and f"{name} row [54] belongs to no sequence" in found.message
        assert PACKED.check(*result, poisoned=False).ok


@pytest.mark.parametrize("seed", range(12))
def test_pairs_flops_and_bytes_are_those_of_the_definition(seed):
    problem = draw(seed, largest=6, most_work=2**22)
    pairs = 0
    for s in problem.sequences:
        offset = torch.arange(s.keys) - torch.arange(s.queries)[:, None] - (s.keys - s.queries)
        seen = torch.ones_like(offset, dtype=torch.bool)
        lo, hi = problem.band
        seen &= offset >= lo if lo is not None else seen
        seen &= offset <= hi if hi is not None else seen
        pairs += int(seen.sum())
    assert problem.visible_pairs == pairs


def test_flops_follow_the_fields_convention():
    full = AttentionCase(batch=2, seqlen_q=4096, seqlen_k=4096, heads_q=16, heads_kv=4)
    assert full.flops == 4 * 2 * 16 * 4096 * 4096 * 128
    assert replace(full, causal=True).flops == full.flops // 2
    assert replace(full, window=(127, 0)).flops == pytest.approx(full.flops * 128 / 4096, rel=0.02)
    assert full.bytes == 2 * 2 * 4096 * 128 * (16 + 16 + 4 + 4) + 4 * 2 * 16 * 4096


@pytest.mark.parametrize("view", VIEWS)
def test_views_hold_data_and_are_surrounded_by_nan(view):
    problem = replace(SMALL, views=(view,) * 3, seed=3)
    for x in problem.inputs()[:3]:
        assert x.isfinite().all()
        memory = torch.as_strided(x, (x.untyped_storage().nbytes() // 2,), (1,), 0)
        held = 1
        for n, stride in zip(x.shape, x.stride(), strict=True):
            held *= n if stride else 1
        assert int(memory.isfinite().sum()) == held < len(memory)
        aligned = x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:3])
        assert (aligned and x.stride(3) == 1) == (view not in ("shifted", "transposed"))


def test_rows_that_do_not_count_are_nan():
    problem = replace(SMALL, used_q=(30, 0), used_k=(53, 11))
    q, k, v = problem.inputs()[:3]
    assert q[0, :30].isfinite().all() and q[0, 30:].isnan().all() and q[1].isnan().all()
    for x in (k, v):
        assert x[1, :11].isfinite().all() and x[1, 11:].isnan().all() and x[0].isfinite().all()
    q, k, v = PACKED.inputs()[:3]
    assert q[:53].isfinite().all() and q[53:].isnan().all() and len(q) == 58
    assert k[:66].isfinite().all() and k[66:].isnan().all()


def test_inits_are_what_they_say():
    def scores(init):
        problem = replace(SMALL, init=init, heads_kv=4, scale=0.2)
        q, k = (x[0, :, 0].double() for x in problem.inputs()[:2])
        return q @ k.T * 0.2

    assert scores("normal").mean().abs() < 1
    assert scores("offset").mean() == pytest.approx(64 * 400 * 0.2, rel=0.02)
    for init, sign in (("rising", 1), ("falling", -1)):
        rise = scores(init)
        assert (rise[:, 52] - rise[:, 0]).mean() == pytest.approx(sign * 5.2, rel=0.1)
    largest = scores("huge").abs().amax(0).sort().values
    assert largest[-1] > 8 * largest[-2]


def test_families_of_scores_are_what_they_say():
    def scores(init, head=0, **sizes):
        case = replace(SMALL, seqlen_q=40, seqlen_k=512, scale=0.125, init=init, **sizes)
        q, k = (x[-1, :, head].double() for x in case.inputs()[:2])
        return q @ k.T * 0.125

    sizes = {"heads_q": 9, "heads_kv": 9, "head_dim": 64, "head_dim_v": 64}
    for factor in (2, 4, 8, 16):
        assert scores(f"x{factor}", **sizes).std() == pytest.approx(factor, rel=0.1)
    assert (scores("zeros", **sizes) == 0).all()
    spread = [float(scores("wild", head, **sizes).std()) for head in range(9)]
    assert spread[0] == pytest.approx(8, rel=0.1) and spread[8] == pytest.approx(8, rel=0.1)
    assert max(spread[1:8]) < 1.2
    sink = scores("sink", **sizes)
    # a key of log-normal length may be longer yet: torch draws otherwise on other processors
    assert (sink.argmax(1) == 0).double().mean() > 0.5 and 50 < sink[:, 0].mean() < 70
    hot = scores("hot", **sizes).reshape(40, 4, 128)
    assert hot.amax(2).min() > 9 and len(set(hot.mean(0).argmax(1).tolist())) > 1
    gains = scores("qk-norm", **sizes)
    assert 2 < gains.std() < 12 and gains.abs().max() < 1.5 * 1.5 * 8 * 10


def test_keys_that_are_hot_belong_to_their_sequence():
    packed = replace(PACKED, init="sink", tail=0)
    k = packed.inputs().k.double()
    firsts = [s.first_k for s in packed.sequences if s.keys]
    alike = (k == k[:, :, :1]).all(2).all(1).nonzero().flatten().tolist()
    assert alike == firsts


def test_the_seed_fixes_the_inputs_and_a_copy_changes_them():
    a, b, c = SMALL.inputs(), SMALL.inputs(), SMALL.inputs(copy=1)
    assert all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(a[:3], c[:3], strict=True))
    assert draw(5) == draw(5) != draw(6)


BAD = {
    "heads_q=4: must be a multiple of heads_kv=3": {"heads_kv": 3},
    "head_dim=0: must be at least 1": {"head_dim": 0},
    "dtype 'fp8' is not one of bf16, fp16": {"dtype": "fp8"},
    "init 'zero' is not one of": {"init": "zero"},
    "view 'row' is not one of": {"views": ("row", "padded", "padded")},
    r"lengths_q=\(3,\): takes batch=2 numbers": {"lengths_q": (3,)},
    r"used_k=\(54, 1\): more than the sequences have": {"used_k": (54, 1)},
    "seqlen_k=-1: must be at least 0": {"seqlen_k": -1},
    "scale=0.0, softcap=0.0: the one must be positive": {"scale": 0.0},
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_is_no_problem_is_refused(sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(SMALL, **BAD[sentence])


def test_problems_of_one_kernel_differ_in_sizes_alone():
    problems = [draw(seed, kernel=7) for seed in range(30)]
    for field in ("head_dim", "head_dim_v", "dtype", "causal", "softcap", "sink"):
        assert len({getattr(p, field) for p in problems}) == 1
    assert len({(p.window[0] is None, p.window[1] is None) for p in problems}) == 1
    assert len({p.seqlen_k for p in problems}) > 10


def test_randomized_problems_have_everything():
    problems = [draw(seed) for seed in range(1500)]
    assert {p.views[0] for p in problems} == set(VIEWS)
    assert {p.init for p in problems} == set(INITS)
    sequences = [s for p in problems for s in p.sequences]
    for found in (
        any(s.queries == 0 < s.keys for s in sequences),
        any(s.keys == 0 < s.queries for s in sequences),
        any(1 == s.queries < s.keys for s in sequences),
        any(s.queries > s.keys > 0 for s in sequences),
        any(p.used_q and p.lengths_q for p in problems),
        any(p.lengths_q and not p.lengths_k and p.used_k for p in problems),
        any(p.sink and p.softcap and p.causal for p in problems),
        any(p.causal and p.window[0] for p in problems),
        any(p.window[0] == 0 and p.window[1] for p in problems),
    ):
        assert found
