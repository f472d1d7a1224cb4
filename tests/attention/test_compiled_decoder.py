"""A small decoder with static caches, compiled by inductor, its kernels simulated: caches in pages
are as exact as caches without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cutex
from cutex import ops

HEADS, HEADS_KV, DIM, WIDTH, TOKENS = 8, 2, 64, 128, 100
BATCH, ROOM, PAGE = 2, 128, 64
LENGTHS = (3, 60)  # the second goes over to another page
STEPS = 6


class Layer(nn.Module):
    """Attention to a cache to which the new token's rotated keys and values are appended."""

    def __init__(self, paged: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        rows = (BATCH * ROOM // PAGE, PAGE) if paged else (BATCH, ROOM)
        for name in "kv":
            self.register_buffer(name, torch.zeros(*rows, HEADS_KV, DIM))

    def forward(self, x: Tensor, lengths: Tensor, table: Tensor | None, *rotary: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(BATCH, 1, -1, DIM)
        q, k, v = heads.split([HEADS, HEADS_KV, HEADS_KV], 2)
        options = dict(zip(("rotary_cos", "rotary_sin"), rotary, strict=True))
        options |= {"cache_seqlens": lengths, "page_table": table, "rotary_interleaved": False}
        out = cutex.flash_attn_with_kvcache(q, self.k, self.v, k, v, causal=True, **options)
        return x + self.out(out.flatten(2))


class Decoder(nn.Module):
    """Two layers; of token numbers, the scores of the next."""

    def __init__(self, paged: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(paged) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, token: Tensor, *rest: Tensor | None) -> Tensor:
        x = self.embedding(token)
        for layer in self.layers:
            x = layer(x, *rest)
        return self.head(x)


def scores(paged: bool, compiled: bool) -> Tensor:
    """Of the same tokens, whatever the scores of those before."""
    torch.manual_seed(0)
    decoder = Decoder(paged).bfloat16()
    step = torch.compile(decoder, fullgraph=True) if compiled else decoder
    tokens = torch.randint(0, TOKENS, (STEPS, BATCH, 1))
    angles = 6 * torch.rand(ROOM, DIM // 2)
    rotary = angles.cos().bfloat16(), angles.sin().bfloat16()
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32) if paged else None
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    with torch.no_grad(), ops.simulated("sm_90a"):
        return torch.stack(
            [step(token, lengths + n, table, *rotary).clone() for n, token in enumerate(tokens)]
        )


@pytest.mark.slow
def test_pages_give_the_bits_of_caches_without():
    """Compiled as not; what inductor's own kernels round otherwise is no more than a bit or two."""
    plain = scores(paged=False, compiled=False)
    assert torch.equal(scores(paged=True, compiled=False), plain)
    found = [scores(paged, compiled=True) for paged in (False, True)]
    torch._dynamo.reset()
    assert torch.equal(*found)
    assert (found[0] - plain).abs().max() <= 2.0**-7 * plain.abs().max()
