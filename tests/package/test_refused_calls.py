"""Calls that no kernel takes, of the kinds found by trying each argument of each function: refused
in one sentence that names the argument, before anything is compiled."""

from __future__ import annotations

import pytest
import torch

import cutex

ROWS = torch.ones(6, 40)
HALF = torch.ones(8, 64, dtype=torch.bfloat16)
INDICES = torch.zeros(6, dtype=torch.int64)
QUERIES, LATENT = HALF.view(8, 1, 64), HALF.new_ones(1, 1, 16, 576)
WEIGHTS = HALF.new_ones(3, 64, 64)
EDGES = torch.tensor([3, 3, 8], dtype=torch.int32)
MANY = torch.ones(16, 32)


def moe(weights: torch.Tensor, ids: torch.Tensor) -> object:
    return cutex.moe(HALF, weights, ids, WEIGHTS.repeat(1, 1, 2), WEIGHTS)


def cached(q: torch.Tensor = QUERIES, **options: object) -> object:
    cache = HALF.new_ones(8, 40, 1, 64)
    return cutex.flash_attn_with_kvcache(q, cache, cache, **options)


def latent(q: torch.Tensor = LATENT, **options: object) -> object:
    cache, lengths = HALF.new_ones(1, 64, 1, 576), torch.tensor([64], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    return cutex.flash_mla_with_kvcache(q, cache, table, lengths, **options)


REFUSED = [
    (lambda: cutex.cross_entropy(ROWS[:, :0], INDICES), ValueError, "x has no columns"),
    (lambda: cutex.cross_entropy(ROWS, INDICES.to_sparse()), ValueError, "target must be"),
    (
        lambda: cutex.linear_cross_entropy(HALF, HALF, torch.zeros(8).long().to_sparse()),
        ValueError, "target must be a strided",
    ),
    (lambda: cutex.scan(ROWS, out_dtype=MANY), TypeError, "out_dtype=tensor"),
    (lambda: cutex.map(lambda x: x, ROWS, out_dtype=MANY), TypeError, "out_dtype=tensor"),
    (lambda: cutex.matmul(HALF, HALF.T, out_dtype=MANY), TypeError, "out_dtype has dtype tensor"),
    (lambda: cutex.pack_w4(HALF, dtype=MANY), TypeError, "dtype must be bfloat16 or float16"),
    (
        lambda: cutex.rope(ROWS.view(2, 5, 3, 8), ROWS[:, :4], ROWS[:, :4],
                           positions=torch.zeros(2, 5).long().to_sparse()),
        ValueError, "positions must be a strided",
    ),
    (lambda: cutex.grouped_mm(HALF, WEIGHTS, EDGES.to_sparse()), ValueError, "offs must be"),
    (lambda: moe(torch.ones(8, 2).to_sparse(), EDGES), ValueError, "router_weights must be"),
    (lambda: moe(torch.ones(8, 2), EDGES.to_sparse()), ValueError, "expert_ids must be a strided"),
    (
        lambda: cutex.quantize(HALF, "nvfp4", tensor_scale=torch.ones(1).to_sparse()),
        ValueError, "tensor_scale must be a strided",
    ),
    (lambda: cutex.warm_up("abc"), TypeError, "shapes must be an iterable"),
    (lambda: cutex.warm_up(torch.tensor(1.0)), TypeError, "shapes must be an iterable"),
    (lambda: cutex.warm_up([(8, 8, 8)], bias="no"), TypeError, "bias must be True or False"),
    (lambda: cutex.warm_up([(8, 8, 8)], residual=1), TypeError, "residual must be True or False"),
    (lambda: latent(is_fp8_kvcache=""), TypeError, "is_fp8_kvcache must be True or False"),
    (lambda: cached(cu_seqlens_q=EDGES[0]), ValueError, "cu_seqlens_q has shape (), it must be"),
    (lambda: cached(torch._neg_view(QUERIES[:, None])), ValueError, "q is a view that"),
    (lambda: latent(torch._neg_view(LATENT)), ValueError, "negated lazily"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_it_is_refused_in_one_sentence(call, kind, says):
    with cutex.ops.simulated("sm_90a"), pytest.raises(kind) as refused:
        call()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
