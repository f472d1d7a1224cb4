"""Attention to caches under torch.compile: one graph, caches that are written, wrong arguments.

Kernels are stood in for by torch; test_serving_on_gpu.py has the same on a card.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cutex
from cutex.ops.attention import kvcache, mla, mla_chosen

BATCH, ROOM, HEADS, DIM = 2, 8, 2, 64


def attend(call, with_lse, key):
    """What a kernel would leave in the caches, and the mean of all values up to the lengths."""
    out = []
    for b, n in enumerate(call.cache_seqlens.tolist()):
        if call.k is not None:
            call.k_cache[b, n], call.v_cache[b, n] = call.k[b, 0], call.v[b, 0]
            n += 1
        out.append(call.q[b] + call.v_cache[b, :n].mean(0))
    lse = torch.zeros(call.lse_shape)
    return (torch.stack(out), lse) if with_lse else torch.stack(out)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kvcache, "attend", attend)
    monkeypatch.setattr(mla, "attend", lambda call, key: (call.q[..., :512], call.q[..., 0].mT))
    monkeypatch.setattr(
        mla_chosen, "attend", lambda call, given, key: (call.q[..., :512], call.q[..., 1].mT)
    )
    yield
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    """A layer of a decoder with a static cache."""

    def __init__(self) -> None:
        super().__init__()
        for name in "kv":
            rows = torch.zeros(BATCH, ROOM, HEADS, DIM, dtype=torch.bfloat16)
            self.register_buffer(name, rows)

    def forward(self, x: Tensor, lengths: Tensor, **options) -> Tensor:
        q, k, v = x, 2 * x, 3 * x
        out = cutex.flash_attn_with_kvcache(
            q, self.k, self.v, k, v, cache_seqlens=lengths, causal=True, **options
        )
        return out + x


def test_tokens_are_appended_within_one_graph():
    eager, layer = Layer(), Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    with torch.no_grad():
        for step in range(3):
            x = torch.randn(BATCH, 1, HEADS, DIM).bfloat16()
            assert torch.equal(compiled(x, lengths + step), eager(x, lengths + step))
            assert torch.equal(layer.k, eager.k) and torch.equal(layer.v, eager.v)
    assert layer.v[:, 7].any() and not layer.v[0, 6:7].any()


def test_caches_are_read_within_one_graph():
    caches = [torch.randn(BATCH, ROOM, HEADS, DIM).bfloat16() for _ in "kv"]
    latent = torch.randn(2, 64, 1, 576).bfloat16()
    table = torch.tensor([[0], [1]], dtype=torch.int32)

    def call(q: Tensor, of_latent: Tensor, lengths: Tensor):
        out, lse = cutex.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=4, window_size=(3, 0), return_lse=True
        )
        metadata, splits = cutex.get_mla_metadata()
        found = cutex.flash_mla_with_kvcache(
            of_latent, latent, table, lengths, 512, metadata, splits, causal=True
        )
        chosen = cutex.flash_mla_with_kvcache(
            of_latent, latent, None, None, 512, indices=table[:, None]
        )
        return out, lse, *found, *chosen

    q = torch.randn(BATCH, 1, HEADS, DIM).bfloat16()
    of_latent = torch.randn(2, 1, 16, 576).bfloat16()
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    with torch.no_grad():
        want = call(q, of_latent, lengths)
        got = torch.compile(call, fullgraph=True, backend="eager")(q, of_latent, lengths)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def fake(name: str, *tensors: Tensor, **options):
    """The results of a function within a graph, without contents."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return getattr(torch.ops.cutex, name)(*tensors, **options)


OPTIONS = dict.fromkeys(
    ("length", "page_table", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q",
     "cu_seqlens_k_new", "max_seqlen_q", "softmax_scale", "window_left", "window_right",
     "learnable_sink", "q_descale", "k_descale", "v_descale", "rotary_cos", "rotary_sin",
     "rotary_seqlens")
) | {"causal": False, "softcap": 0.0, "num_splits": 0, "return_lse": True,
     "rotary_interleaved": True}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens has dtype torch.float32"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"num_splits": 999}, "num_splits=999"),
        ({"page_table": torch.zeros(3, 1, dtype=torch.int32)}, r"it must be \(2, pages\)"),
    ],
)
def test_wrong_arguments_are_named_while_a_graph_is_traced(changed, message):
    q, cache = torch.zeros(BATCH, 1, 4, DIM).bfloat16(), torch.zeros(BATCH, ROOM, 2, DIM).bfloat16()
    lengths = {"cache_seqlens": torch.zeros(BATCH, dtype=torch.int32)}
    out, lse = fake("flash_attn_with_kvcache", q, cache, cache, **{**OPTIONS, **lengths})
    assert out.shape == (2, 1, 4, 64) and lse.shape == (2, 4, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        fake("flash_attn_with_kvcache", q, cache, cache, **{**OPTIONS, **lengths, **changed})


def test_a_gradient_is_refused_while_a_graph_is_traced():
    x = torch.randn(BATCH, 1, HEADS, DIM).bfloat16().requires_grad_()
    compiled = torch.compile(Layer(), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="no gradient"):
        compiled(x, torch.zeros(BATCH, dtype=torch.int32))
