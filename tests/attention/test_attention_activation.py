"""cutex.attention.activate: torch's attention and transformers' models on our kernel."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from types import SimpleNamespace

import pytest
import torch
from attention_stand_in import StandIn, flash_on_cpu
from torch.nn import attention as torch_attention
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn

import cutex
from cutex.ops.attention import in_torch, kvcache, planned
from cutex.ops.attention.transformers_masks import Layout


@contextlib.contextmanager
def activated():
    with cutex.ops.simulated("sm_90a"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch would warn of every override
        cutex.attention.activate()
        try:
            yield
        finally:
            cutex.attention.deactivate()


@pytest.fixture
def active(monkeypatch):
    """The stand-in behind torch's attention for CPU tensors."""
    stand_in = StandIn(monkeypatch)
    with activated():
        yield stand_in
    planned.forget()


def heads_first(batch=2, heads=4, rows=40, head_dim=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, rows, head_dim, generator=g).bfloat16()


def close(x, y):
    torch.testing.assert_close(x.float(), y.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention_runs_on_it(active, causal):
    q, k, v = (heads_first(seed=i) for i in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.2)
    ((config, given),) = active.launches
    assert config.causal == causal and given["scale"] == 0.2
    close(out, F.scaled_dot_product_attention(*(x.float() for x in (q, k, v)), is_causal=causal,
                                              scale=0.2))  # fmt: skip
    assert out.stride() == q.stride()
    assert len(active.launches) == 1  # float32 ran on torch's own kernel


@pytest.mark.parametrize(
    "more",
    [{"attn_mask": torch.ones(40, 40).tril().bool()}, {"dropout_p": 0.5}],
    ids=["mask", "dropout"],
)
def test_what_the_kernel_does_not_take_runs_as_before(active, more):
    q = heads_first()
    assert F.scaled_dot_product_attention(q, q, q, **more).isfinite().all()
    odd = heads_first(head_dim=36)
    assert F.scaled_dot_product_attention(odd, odd, odd).shape == odd.shape
    q, k, v = packed(9, head_dim=192), packed(9, head_dim=192), packed(9, head_dim=128)
    with pytest.raises(ValueError, match="neither cutex nor torch has a kernel"):
        varlen_attn(q, k, v, ends(9), ends(9), 9, 9)  # torch's outputs have the shape of q
    assert not active.launches


def test_the_operators_of_the_gpu_path_give_what_torch_expects(active):
    """Called as torch calls them: layouts as its meta functions state, LSE for its backward."""
    q, k, v = (heads_first(seed=i) for i in range(3))
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    with torch.device("meta"):
        meta = torch.ops.aten._scaled_dot_product_flash_attention(
            *(x.to("meta") for x in (q, k, v)), 0.0, True
        )
    for x, y in zip(found, meta, strict=True):
        if isinstance(x, torch.Tensor):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        else:
            assert x == y
    with pytest.raises(ValueError, match="neither cutex nor torch has a kernel"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5, True)


@pytest.mark.parametrize("trained", [False, True])
def test_a_call_like_one_before_finds_its_plan(active, monkeypatch, trained):
    q, k, v = (heads_first(seed=i).requires_grad_(trained) for i in range(3))
    F.scaled_dot_product_attention(q, k, v)
    monkeypatch.setattr(in_torch, "attend", None)  # what a call without a plan needs
    out = F.scaled_dot_product_attention(q + 1, k, v)
    close(out, F.scaled_dot_product_attention(*(x.float() for x in (q + 1, k, v))))
    assert out.stride() == q.stride() and (out.grad_fn is not None) == trained
    assert len(active.launches) == 2


def test_a_query_of_many_keys_is_one_of_a_cache(active, monkeypatch):
    q, k, v = heads_first(rows=1), heads_first(seed=1), heads_first(seed=2).requires_grad_()
    calls = []

    def attend(q, k, v, *, softmax_scale, return_lse, **_):
        assert return_lse
        calls.append(softmax_scale)
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        scores = q @ k.mT * softmax_scale
        return (scores.softmax(-1) @ v).transpose(1, 2).bfloat16(), scores.logsumexp(-1)

    monkeypatch.setattr(in_torch, "flash_attn_with_kvcache", attend)
    out = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    close(out, F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.3))
    assert calls == [0.3] and out.shape == q.shape
    out.sum().backward()
    assert v.grad is not None and v.grad.isfinite().all()
    k = k.mT.contiguous().mT  # which TMA cannot step through
    torch.ops.aten._scaled_dot_product_flash_attention(q, k, v.detach(), scale=0.3)
    assert calls == [0.3] and len(active.launches) == 1


def packed(*lengths, heads=4, head_dim=64, seed=0):
    return heads_first(1, heads, sum(lengths), head_dim, seed)[0].transpose(0, 1).contiguous()


def ends(*lengths):
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def test_torchs_varlen_attention_runs_on_it(active):
    q, k, v = (packed(9, 20, 5, seed=i) for i in range(3))
    cu = ends(9, 20, 5)
    out, lse = varlen_attn(
        q,
        k,
        v,
        cu,
        cu,
        20,
        20,
        window_size=(4, 0),
        return_aux=torch_attention.varlen.AuxRequest(lse=True),
    )
    config, given = active.launches[-1]
    assert given["lo"] == -4 and config.causal and lse.shape == (4, 34)
    close(out, cutex.flash_attn_varlen_func(q, k, v, cu, cu, 20, 20, window_size=(4, 0)))
    if hasattr(varlen, "varlen_attn_out"):  # since torch 2.12
        again = torch.full_like(out, torch.nan)
        varlen.varlen_attn_out(again, q, k, v, cu, cu, 20, 20, window_size=(4, 0))
        assert torch.equal(again, out)
        over_q = q.clone()
        varlen.varlen_attn_out(over_q, over_q, k, v, cu, cu, 20, 20, window_size=(4, 0))
        assert torch.equal(over_q, out)
        with pytest.raises(ValueError, match="its elements overlap"):
            memory = torch.zeros(9000, dtype=q.dtype)
            overlapping = memory.as_strided(q.shape, (64, 64, 1))
            varlen.varlen_attn_out(overlapping, q, k, v, cu, cu, 20, 20)
    if "seqused_k" in inspect.signature(varlen_attn).parameters:  # since torch 2.12
        used = torch.tensor([3, 0, 5], dtype=torch.int32)
        fewer = varlen_attn(q, k, v, cu, cu, 20, 20, seqused_k=used)
        close(fewer, cutex.flash_attn_varlen_func(q, k, v, cu, cu, 20, 20, seqused_k=used))
        assert not fewer[9:29].any()


def test_torchs_autograd_differentiates_it(active):
    q, k, v = (packed(9, 20, seed=i).requires_grad_() for i in range(3))
    cu_q, cu_k = ends(9, 20), ends(4, 25)  # rows of the first sequence see no key
    with flash_on_cpu():
        varlen_attn(q, k, v, cu_q, cu_k, 20, 25, window_size=(-1, 0)).square().sum().backward()
    assert len(active.launches) == 1
    for x in (q, k, v):
        assert x.grad.isfinite().all() and x.grad.any()


def test_it_can_be_taken_back(active):
    q = heads_first()
    assert torch_attention.current_flash_attention_impl() == "cutex"
    assert "cutex" in torch_attention.list_flash_attention_impls()
    cutex.attention.deactivate()
    assert torch_attention.current_flash_attention_impl() is None
    F.scaled_dot_product_attention(q, q, q)
    assert not active.launches
    cutex.attention.activate()
    F.scaled_dot_product_attention(q, q, q)
    assert len(active.launches) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_and_the_simulator_it_says_so():
    with pytest.raises(ValueError, match=r"there is no GPU here: activate\(\) needs a Hopper or"):
        cutex.attention.activate()


# ---- transformers


@pytest.fixture
def tiny():
    """A model made from a config, with grouped heads and weights that make attention matter."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip

    def make(implementation):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=implementation
        )
        return model.bfloat16().eval()

    return make


@pytest.mark.slow
def test_a_model_of_transformers_runs_on_it(active, tiny):
    model, own = tiny("cutex"), tiny("eager")
    ids = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close_logits(model(ids).logits, own(ids).logits)
        assert len(active.launches) == 2
        padded = torch.ones_like(ids)
        padded[1, :11] = 0  # on the left, as generation pads
        mine, theirs = (m(ids, attention_mask=padded).logits for m in (model, own))
        close_logits(mine[0], theirs[0])
        close_logits(mine[1, 11:], theirs[1, 11:])
        generated = (
            m.generate(ids[:, :9], max_new_tokens=4, do_sample=False) for m in (model, own)
        )
        mine, theirs = generated
        assert mine.shape == theirs.shape == (2, 13)


@pytest.mark.slow
def test_packed_sequences_of_transformers_do_not_see_each_other(active, tiny):
    model = tiny("cutex")
    ids = torch.randint(97, (1, 30), generator=torch.Generator().manual_seed(1))
    places = torch.cat((torch.arange(12), torch.arange(18)))[None]
    with torch.no_grad():
        together = model(ids, position_ids=places, use_cache=False).logits
        apart = torch.cat([model(x).logits for x in (ids[:, :12], ids[:, 12:])], 1)
    close_logits(together, apart)


@pytest.mark.slow
def test_scaled_dot_product_attention_in_the_simulator():
    """The kernel itself, behind torch's own function."""
    q, k, v = (heads_first(1, heads, rows=70, seed=heads) for heads in (4, 2, 2))
    with activated():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wide = (x.float() for x in (q, k, v))
    close(out, F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True))


@pytest.mark.parametrize("window", [(None, None), (None, 0), (7, None)])
@pytest.mark.parametrize("given", [(), ("ends",), ("ends", "begins", "sink")])
def test_a_token_finds_the_plan_of_the_call_before(monkeypatch, window, given):
    asked = []
    plans = SimpleNamespace(launched=lambda key, *x: (asked.append((key, [*map(id, x)])), "out")[1])
    monkeypatch.setattr(kvcache, "PLANS", plans)
    q, k, v, *vectors = (torch.zeros(2) for _ in range(6))
    all_vectors = zip(("ends", "begins", "sink"), vectors, strict=True)
    ends, begins, sink = (x if name in given else None for name, x in all_vectors)
    options = {"softmax_scale": 0.5, "softcap": 2.0, "learnable_sink": sink}
    options |= Layout(window, 2).options
    cutex.flash_attn_with_kvcache(q, k, v, cache_seqlens=ends, cache_leftpad=begins, **options)
    assert kvcache.known_token(q, k, v, ends, begins, **options) == "out"
    assert asked[0] == asked[1]


# ---- on a GPU


@pytest.fixture
def on_gpu():
    cutex.attention.activate()
    yield
    cutex.attention.deactivate()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "causal"), [(300, False), (300, True), (1, False)])
def test_scaled_dot_product_attention_and_its_gradients_on_a_gpu(on_gpu, rows, causal):
    sizes = enumerate((rows, 300, 300))
    q, k, v = (heads_first(rows=n, seed=i).cuda().requires_grad_() for i, n in sizes)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    attend = cutex.flash_attn_func if rows > 1 else cutex.flash_attn_with_kvcache
    given = (x.detach().transpose(1, 2) for x in (q, k, v))
    ours, _ = attend(*given, causal=causal, return_lse=True)
    assert torch.equal(out.transpose(1, 2), ours), "it ran on torch's own kernel"
    grad = torch.randn_like(out)
    out.backward(grad)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    F.scaled_dot_product_attention(*wide, is_causal=causal).backward(grad.double())
    for x, y in zip((q, k, v), wide, strict=True):
        assert (x.grad.double() - y.grad).norm() < 0.01 * y.grad.norm()


@pytest.mark.gpu
def test_torchs_varlen_attention_on_a_gpu(on_gpu):
    q, k, v = (packed(190, 1, 300, seed=i).cuda() for i in range(3))
    cu = ends(190, 1, 300).cuda()
    out = varlen_attn(q, k, v, cu, cu, 300, 300, window_size=(-1, 0))
    ours = cutex.flash_attn_varlen_func(q, k, v, cu, cu, 300, 300, causal=True)
    assert torch.equal(out, ours), "it ran on torch's own kernel"


@pytest.mark.gpu
def test_a_model_of_transformers_on_a_gpu(on_gpu, tiny):
    model, own, exact = tiny("cutex").cuda(), tiny("eager").cuda(), tiny("eager").cuda().float()
    ids = torch.randint(97, (2, 90), generator=torch.Generator().manual_seed(1)).cuda()
    close_logits(model(ids).logits, own(ids).logits)
    for m in (model, own, exact):
        m(ids, labels=ids).loss.backward()
    for name, want in exact.named_parameters():
        mine, theirs = (
            (m.get_parameter(name).grad - want.grad).norm() for m in (model, own)
        )  # the error of bf16 either way
        assert mine <= 2 * theirs, name
    with torch.no_grad():
        made = model.generate(ids[:, :9], max_new_tokens=4, do_sample=False)
    assert made.shape == (2, 13)


# ---- in the simulator


@pytest.mark.slow
def test_a_model_of_transformers_in_the_simulator(tiny):
    model, own = tiny("eager"), tiny("eager")
    ids = torch.randint(97, (1, 30), generator=torch.Generator().manual_seed(1))
    with activated(), torch.no_grad():
        model.set_attn_implementation("cutex")
        close_logits(model(ids).logits, own(ids).logits)


def close_logits(x, y):
    error = (x.float() - y.float()).norm() / y.float().norm()
    assert error < 0.03, float(error)
