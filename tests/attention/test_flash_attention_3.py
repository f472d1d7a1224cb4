"""FlashAttention-3 as a peer: the arguments of its operator, in their places."""

from __future__ import annotations

import pytest
import torch

from cutex.peers import flash_attention_3
from cutex.problem.attention import AttentionProblem
from cutex.problem.attention.case import AttentionCase, Inputs

SIZES = {"batch": 2, "seqlen_q": 40, "seqlen_k": 72, "heads_q": 4, "heads_kv": 2}
WIDTH = {"head_dim": 64, "head_dim_v": 32}


def operator(*given):
    """The operator's definition: packed sequences in, O and LSE (heads, rows) out."""
    q, k, v, k_new, v_new, q_v, out, cu_q, cu_k, *given = given
    cu_k_new, used_q, used_k, most_q, most_k, *given = given
    pages, batch, pads, cos, sin, rotary_lengths, *given = given
    of_q, of_k, of_v, scale, causal, left, right, softcap, interleaved, plan, *given = given
    splits, pack_gqa, margin, sinks, world, rank, lengths = given
    assert not any(
        x is not None
        for x in (k_new, v_new, q_v, cu_k_new, used_q, used_k, pages, batch, pads, cos, sin)
    )
    assert [rotary_lengths, of_q, of_k, of_v, plan, pack_gqa, sinks, lengths] == [None] * 8
    assert (interleaved, splits, margin, world, rank) == (True, 0, 0, 1, 0)
    lengths_q, lengths_k = (tuple(x.diff().tolist()) for x in (cu_q, cu_k))
    assert (most_q, most_k) == (max(lengths_q), max(lengths_k))
    assert (causal and right == 0) or not causal
    case = AttentionCase(
        batch=len(lengths_q),
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        causal=causal,
        window=tuple(None if x < 0 else x for x in (left, right)),
        softcap=softcap,
        scale=scale,
    )
    lse = torch.empty(q.shape[1], q.shape[0])
    from cutex.problem.attention.reference import attend

    inputs = Inputs(q, k, v, cu_q, cu_k)
    for s in case.sequences:
        rows = (case.rows(x, s, side) for x, side in zip(inputs[:3], "qkk", strict=True))
        of_o, of_lse = attend(case, *rows, None, exact=True)
        case.rows(out, s, "q").copy_(of_o)
        case.lse_rows(lse, s).copy_(of_lse)
    return out, lse


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"causal": True},
        {"causal": True, "varlen": True},
        {"window": "16,3", "softcap": 15.0},
        {"window": "16,-", "varlen": True},
        {"causal": True, "window": "9,-"},
    ],
    ids=str,
)
def test_its_operator_gets_each_argument_in_its_place(more):
    problem = AttentionProblem(**SIZES, **WIDTH, **more)
    tensors = *problem.inputs(), *problem.outputs()
    out, lse = flash_attention_3.launch_of(problem, operator)(*tensors)
    *_, blank, blank_lse = tensors
    assert out.shape == blank.shape and lse.shape == blank_lse.shape
    assert out.data_ptr() == blank.data_ptr()  # it is written where the caller wants it
    check = problem.check(*tensors[:-2], out, lse)
    assert check.ok, check.message


def test_where_it_is_not_there_one_sentence_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv(flash_attention_3.LIBRARY, str(tmp_path / "fa3.so"))
    with pytest.raises(ImportError, match=r"CUTEX_FA3=.*fa3.so: there is no such file"):
        flash_attention_3.forward(AttentionProblem(**SIZES, **WIDTH))
    monkeypatch.delenv(flash_attention_3.LIBRARY)
    with pytest.raises(ImportError, match="CUTEX_FA3 may name its library"):
        flash_attention_3.forward(AttentionProblem(**SIZES, **WIDTH))
