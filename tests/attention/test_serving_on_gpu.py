"""Attention to caches and MLA on a GPU: randomized cases against float64, and CUDA graphs that are
replayed with other lengths and pages."""

from __future__ import annotations

import random

import pytest
import torch
from kvcache_calls import arguments, outcome
from test_mla import CASES, DV, SMALL, Case, D
from test_mla_chosen import CASES as CHOSEN
from test_mla_chosen import Case as ChosenCase

import cutex
from cutex.arch import local_arch
from cutex.problem.attention.case import AttentionCase

pytestmark = pytest.mark.gpu
HEAD_DIMS = (64, 64), (128, 128), (256, 256), (96, 96), (192, 128)


def needs_hopper() -> None:
    if local_arch(["sm_90a"]) is None:
        pytest.skip("MLA has a kernel for Hopper")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_latent_caches_are_attended_to(name):
    needs_hopper()
    assert Case(**{**SMALL, **CASES[name]}, device="cuda").outcome() == ""


@pytest.mark.parametrize("seed", range(12))
def test_randomized_latent_caches_are_attended_to(seed):
    needs_hopper()
    r = random.Random(seed)
    tokens, batch = r.choice((1, 1, 2, 3, 4)), r.choice((1, 2, 5, 17))
    lengths = tuple(int(2 ** r.uniform(0, 12.5)) - 1 for _ in range(batch))
    case = Case(
        r.choice((1, 16, 33, 64, 128)), tokens, (*lengths[:-1], max(1, lengths[-1])),
        causal=tokens > 1, page_size=r.choice((64, 64, 0, 16, 128)),
        dtype=r.choice((torch.bfloat16, torch.float16)), seed=seed, device="cuda",
    )  # fmt: skip
    assert case.outcome(num_splits=r.choice((None, None, 2))) == ""


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_keys_are_attended_to(name):
    needs_hopper()
    assert ChosenCase(**CHOSEN[name], device="cuda").outcome() == ""


@pytest.mark.parametrize("seed", range(12))
def test_randomized_chosen_keys_are_attended_to(seed):
    needs_hopper()
    r = random.Random(seed)
    batch, topk = r.choice((1, 2, 5, 90)), r.choice((1, 63, 64, 500, 2048))
    case = ChosenCase(
        r.choice((1, 16, 33, 64, 128)), r.choice((1, 1, 2, 3)), topk, r.choice((0.0, 0.3, 0.99)),
        r.choice((None, tuple(r.randint(0, topk) for _ in range(batch)))), r.choice((1, 64)), batch,
        r.choice((None, None, 2)), r.choice((torch.bfloat16, torch.float16)), seed, "cuda", 200,
    )  # fmt: skip
    assert case.outcome() == ""


@pytest.mark.parametrize("seed", range(12))
def test_randomized_caches_are_attended_to(seed):
    r = random.Random(seed)
    head_dim, head_dim_v = r.choice(HEAD_DIMS)
    heads_kv, tokens, batch = r.choice((1, 2, 4, 8)), r.choice((1, 1, 2, 4, 8)), r.choice((1, 3, 9))
    lengths = tuple(int(2 ** r.uniform(3, 13)) for _ in range(batch))
    case = AttentionCase(
        batch=batch, seqlen_q=tokens, seqlen_k=max(lengths), used_k=lengths, heads_kv=heads_kv,
        heads_q=heads_kv * r.choice((1, 4, 8, 16)), head_dim=head_dim, head_dim_v=head_dim_v,
        causal=tokens > 1, dtype=r.choice(("bf16", "fp16")), seed=seed,
        window=r.choice(((None, None), (1000, 0))),
    )  # fmt: skip
    assert outcome(case, "cuda", page_size=r.choice((0, 16, 64, 128)), new=r.choice((0, 2))) == ""


def replayed(call, changed: list) -> list:
    """The results of a graph of `call`, for which each of `changed` is called before a replay."""
    call()  # compiles, and makes what the graph needs
    graph, found = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = call()
    for change in changed:
        change()
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        found.append([x.clone() for x in results])
    return found


OTHER = (700, 0, 65, 3000), (1, 4000, 128, 64), (0, 0, 0, 1), (4096, 4096, 4096, 4096)


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_of_latent_caches_is_replayed_with_other_lengths_and_pages(heads):
    needs_hopper()
    cases = [Case(heads, 2, x, causal=True, seed=i, device="cuda") for i, x in enumerate(OTHER)]
    pages = max(x.cache.shape[0] for x in cases)
    cache = torch.empty(pages, 64, 1, D, device="cuda", dtype=torch.bfloat16)
    table = torch.zeros(4, 65, dtype=torch.int32, device="cuda")
    q, lengths = torch.empty_like(cases[0].q), torch.empty_like(cases[0].lengths)

    def change(case: Case) -> None:
        cache.fill_(torch.nan)[: case.cache.shape[0]] = case.cache
        table[:, : case.table.shape[1]] = case.table
        q.copy_(case.q)
        lengths.copy_(case.lengths)

    change(cases[3])

    def call():
        return cutex.flash_mla_with_kvcache(q, cache, table, lengths, DV, causal=True)

    found = replayed(call, [lambda case=case: change(case) for case in cases])
    for case, (out, lse) in zip(cases, found, strict=True):
        case.run = lambda out=out, lse=lse: (out, lse)
        assert case.outcome() == ""


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_graph_of_caches_is_replayed_with_other_lengths_and_pages(tokens):
    cases = [
        AttentionCase(
            batch=4, seqlen_q=tokens, seqlen_k=4096, heads_q=16, heads_kv=4, used_k=x, seed=i,
            causal=True,
        )
        for i, x in enumerate(OTHER)
    ]  # fmt: skip
    inputs = [x.inputs("cuda") for x in cases]
    given = [arguments(x, i, page_size=16) for x, i in zip(cases, inputs, strict=True)]
    held = {**given[3]}
    for name in ("q", "k_cache", "v_cache", "page_table", "cache_seqlens"):
        held[name] = held[name].clone()

    def change(other: dict) -> None:
        for name in ("k_cache", "v_cache", "page_table"):
            x = other[name]
            held[name].zero_()[tuple(slice(n) for n in x.shape)] = x
        held["q"].copy_(other["q"])
        held["cache_seqlens"].copy_(other["cache_seqlens"])

    def call():
        return cutex.flash_attn_with_kvcache(**held, return_lse=True)

    found = replayed(call, [lambda other=other: change(other) for other in given])
    for case, own, (out, lse) in zip(cases, inputs, found, strict=True):
        result = case.check(own, out, lse, poisoned=False)
        assert result.ok, result.message


def test_a_compiled_token_is_replayed_by_torchs_graphs():
    """As the step of a static cache is, with other lengths; whose memory torch watches."""
    if local_arch(["sm_90a"]) is None:
        pytest.skip("a kernel for Hopper")
    from cutex.ops.attention.registered_token import flash_attn_token

    kind = {"device": "cuda", "dtype": torch.bfloat16}
    k, v = (torch.randn(2, 4, 900, 64, **kind).transpose(1, 2) for _ in range(2))
    step = torch.compile(
        lambda q, begins, ends: flash_attn_token(2 * q, k, v, begins, ends).sum(2),
        mode="reduce-overhead",
    )
    for ends in ((1, 900), (5, 20), (640, 333), (900, 899), (77, 78)):
        q = torch.randn(2, 1, 16, 64, **kind)
        begins = torch.tensor([0, 19 if ends[1] > 19 else 0], device="cuda", dtype=torch.int32)
        torch.compiler.cudagraph_mark_step_begin()
        found = step(q, begins, torch.tensor(ends, device="cuda", dtype=torch.int32)).double()
        for b, end in enumerate(ends):
            keys, values = (
                x[b, int(begins[b]) : end].double().repeat_interleave(4, 1) for x in (k, v)
            )
            p = (torch.einsum("hd,khd->hk", 2 * q[b, 0].double(), keys) / 8).softmax(-1)
            want = torch.einsum("hk,khd->hd", p, values).sum(0)
            assert (found[b, 0] - want).abs().max() < 0.1 + 0.02 * want.abs().max()


class Decoder(torch.nn.Module):
    """Two layers of a decoder with static caches, whose tokens' keys and values are appended."""

    def __init__(self, pages: bool) -> None:
        super().__init__()
        room = (8, 16) if pages else (2, 64)
        for name in ("k_0", "v_0", "k_1", "v_1"):
            rows = torch.zeros(*room, 2, 64, dtype=torch.bfloat16, device="cuda")
            self.register_buffer(name, rows)
        self.table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4) if pages else None

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for k, v in ((self.k_0, self.v_0), (self.k_1, self.v_1)):
            q = x.repeat_interleave(4, 2)
            out = cutex.flash_attn_with_kvcache(
                q, k, v, x, -x, cache_seqlens=lengths, page_table=self.table, causal=True
            )
            x = out[:, :, ::4] * 2
        return x


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("pages", [False, True])
def test_a_decode_loop_is_compiled_as_one_graph(pages, mode):
    from torch._dynamo.utils import counters

    eager, model = Decoder(pages), Decoder(pages)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    lengths = torch.tensor([3, 20], dtype=torch.int32, device="cuda")
    counters.clear()
    with torch.no_grad():
        for step in range(6):
            x = torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
            now = lengths + step
            assert torch.equal(compiled(x, now), eager(x, now))
            assert all(map(torch.equal, model.buffers(), eager.buffers()))
    assert not counters["inductor"]["cudagraph_skips"]
    torch._dynamo.reset()
