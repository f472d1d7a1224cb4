"""flash_attn_func and flash_attn_varlen_func raise one sentence for bad input."""

from __future__ import annotations

import pytest
import torch
from attention_stand_in import StandIn
from flash_attn_calls import PACKED, SMALL

import cutex
from cutex.ops.attention import plan, planned


@pytest.fixture
def stand_in(monkeypatch):
    yield StandIn(monkeypatch)
    planned.forget()


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
        "q and v have head dims 64 and 36, each must be a multiple of 8 up to 256",
        {"v": tensor(2, 40, 2, 36)},
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
        "alibi_slopes must be a strided tensor, got torch.sparse_coo",
        {"alibi_slopes": tensor(4).float().to_sparse()},
    ),
    (
        ValueError,
        "q has 0 dimensions, without cu_seqlens_q it has 4",
        {"q": tensor(), "alibi_slopes": tensor(4).float()},
    ),
    (
        TypeError,
        r"window_size=\(1.5, 0\): a side is a whole number or None",
        {"window_size": (1.5, 0)},
    ),
    (TypeError, r"window_size must be a pair \(left, right\), got 5", {"window_size": 5}),
    (ValueError, "softcap=-1.0: must be positive, or 0 for none", {"softcap": -1.0}),
    (TypeError, "softcap must be a number, got str", {"softcap": "5"}),
    (TypeError, "return_lse must be a bool, got str", {"return_lse": "no"}),
    (TypeError, "return_lse must be a bool, got list", {"return_lse": [True]}),
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
    (TypeError, "causal must be True or False, got 'yes'", {"causal": "yes"}),
    (TypeError, "causal must be True or False, got None", {"causal": None}),
    (
        TypeError,
        "score_mod <.*>: must be a Python function of score, batch, head, query, key",
        {"score_mod": lambda score, batch: score},
    ),
    (
        TypeError,
        "mask_mod <.*>: must be a Python function of batch, head, query, key",
        {"mask_mod": lambda query, key: query >= key},
    ),
    (TypeError, "score_mod <.*>: must be a Python function of score", {"score_mod": torch.tanh}),
]


@pytest.mark.parametrize(("error", "sentence", "changes"), BAD, ids=[x[1][:40] for x in BAD])
def test_bad_input_is_one_sentence(stand_in, error, sentence, changes):
    arguments = bad(**changes)
    for _ in range(2):
        with pytest.raises(error, match=sentence) as raised:
            cutex.flash_attn_func(**arguments)
        assert "\n" not in str(raised.value)
    assert not stand_in.launches


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
        r"cu_seqlens_q must be a vector, got the shape \(\)",
        {"cu_seqlens_q": torch.tensor(14, dtype=torch.int32)},
    ),
    (
        ValueError,
        r"cu_seqlens_q has shape \(0,\), it must be",
        {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)},
    ),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("error", "sentence", "changes"), BAD_VARLEN, ids=[x[1][:40] for x in BAD_VARLEN]
)
def test_bad_lengths_are_one_sentence(stand_in, error, sentence, changes):
    q, k, v, cu_q, cu_k = PACKED.inputs()[:5]
    arguments = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 9, "max_seqlen_k": 7}
    with pytest.raises(error, match=sentence):
        cutex.flash_attn_varlen_func(q, k, v, **{**arguments, **changes})
    assert not stand_in.launches


@pytest.mark.parametrize("name", ["softmax_scale", "causal", "softcap"])
def test_a_tensor_is_no_number_with_a_plan_either(stand_in, name):
    """On a GPU a comparison with one would wait for it at each call."""
    cutex.flash_attn_func(**bad(**{name: 1}))
    cutex.flash_attn_func(**bad(**{name: 1}))
    with pytest.raises(TypeError, match=f"{name} must be .*, got "):
        cutex.flash_attn_func(**bad(**{name: torch.ones((), dtype=torch.int32)}))


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
