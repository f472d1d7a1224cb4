"""Models of transformers with attn_implementation="cutex" give what they give with sdpa.

Tiny models of every type in transformers' registry that can be made so; a kernel by definition
stands in for ours and all is float64, so that a mask that is off by one key cannot hide behind
rounding. Some run by default; `-m slow` has the others and the simulator.
"""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from attention_stand_in import StandIn, flash_on_cpu
from model_zoo import MAPPINGS, VOCABULARY, model_of

import cutex
from cutex.ops.attention import call, own_backward

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    cache_utils,
    masking_utils,
    modeling_flash_attention_utils,
)
from transformers.generation import configuration_utils as generation  # noqa: E402

from cutex.ops.attention import (  # noqa: E402
    in_transformers,
    in_transformers_flash,
    registered_token,
    transformers_masks,
)

# one for each kind of attention: grouped heads, windows, alternating and chunked layers, softcap,
# sinks, QK norm, latent attention, hybrids with Mamba and linear attention, biases of positions
DECODERS = ("llama", "mistral", "gemma2", "gemma3_text", "llama4_text", "gpt_oss", "qwen3", "phi",
            "deepseek_v3", "jamba", "qwen3_next", "gpt2", "bloom", "opt")  # fmt: skip
ENCODERS = ("bert", "roberta", "modernbert")
SEQ2SEQ = ("t5", "bart")
ALWAYS = {*DECODERS, *ENCODERS, *SEQ2SEQ, "whisper", "vit"}  # must be made
CACHES = ("dynamic", "static")
_arguments = inspect.signature(modeling_flash_attention_utils._flash_attention_forward).parameters
PAGED = "k_cache" in _arguments


@pytest.fixture
def wide(monkeypatch):
    """transformers on a stand-in for the kernel that takes float64."""
    monkeypatch.setitem(call.DTYPES, torch.float64, "bf16")
    monkeypatch.setattr(call, "SINK_DTYPES", (*call.SINK_DTYPES, torch.float64))
    stand_in = StandIn(monkeypatch)
    # gradients are by definition, too: the kernel takes no float64
    monkeypatch.setattr(own_backward, "why_not", lambda call: "by definition")
    monkeypatch.setattr(in_transformers, "flash_attn_with_kvcache", each_by_itself)
    monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, "eager", finite_mask)
    monkeypatch.setattr(transformers_masks, "_floats", finite_floats)
    in_transformers.register()
    in_transformers_flash.register()
    with cutex.ops.simulated("sm_90a"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield stand_in
    from cutex.ops.attention import planned

    planned.forget()


def finite_floats(mask, dtype):
    """A mask that is added to scores, for softmax in float32, as eager models have it of float64,
    too: float64's lowest number, or float32's beside a bias, would be -inf in it, and a padded
    query NaN, which all others see."""
    return torch.where(mask, 0.0, -1e30).to(dtype)


def finite_mask(dtype=None, **made):
    """transformers' mask for eager attention by `finite_floats`."""
    mask = masking_utils.sdpa_mask(**{**made, "allow_is_causal_skip": False})
    return None if mask is None else finite_floats(mask, dtype)


def each_by_itself(q, k, v, cache_seqlens=None, cache_leftpad=None, **options):
    """flash_attn_with_kvcache by flash_attn_func, an entry of the batch at a time."""
    found = []
    for b in range(len(q)):
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        keys = slice(first, None if cache_seqlens is None else int(cache_seqlens[b]))
        mine = q[b : b + 1], k[b : b + 1, keys], v[b : b + 1, keys]
        found.append(cutex.flash_attn_func(*mine, **options))
    DECODED.append(len(found))
    return torch.cat(found)


DECODED: list[int] = []  # the batches of all calls


def zoo(task, *quick):
    """The types of a task: those named run always, the others in the slow tests."""
    return [
        pytest.param(kind, marks=() if kind in quick else pytest.mark.slow)
        for kind in sorted(MAPPINGS[task])
    ]


def made(kind, task="causal", ours="cutex"):
    """The model with sdpa, or eager attention if it has none, and the same with ours."""
    try:
        return [model_of(kind, task, torch.float64, name) for name in (None, ours)]
    except Exception as reason:
        if kind in ALWAYS:
            raise
        pytest.skip(f"{kind} cannot be made small: {reason}")


def tokens(rows, batch=2, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, rows), generator=g)


def same(models, run):
    """Assert that `run` returns the same for the reference and for ours, where that is finite."""
    results = []
    for model in models:
        torch.manual_seed(0)
        try:
            results.append(run(model))
        except Exception as error:
            if model is not models[0] and "no sparse attention" not in str(error):
                raise
            pytest.skip(str(error))
    want, mine = results
    close(mine.where(want.isfinite(), 0.0), want.where(want.isfinite(), 0.0))


def close(mine, want):
    error = (mine - want).norm() / want.norm().clamp(min=1e-9)
    assert error < 1e-4, float(error)  # transformers' eager softmax is float32


def paddings(ids):
    """Padding masks by name."""
    ones = torch.ones_like(ids)
    left, right, sides, hole = (ones.clone() for _ in range(4))
    left[1, :7] = 0
    right[1, 15:] = 0
    sides[0, :3] = sides[1, 15:] = 0
    hole[0, 4:6] = hole[1, 9] = 0
    return {"none": None, "ones": ones, "left": left, "right": right, "sides": sides, "hole": hole}


# ---- each kind of model


def logits(model, ids, mask, **more):
    """Those of all tokens that are no padding."""
    given = {} if mask is None else {"attention_mask": mask}
    found = model(ids, **given, **more).logits
    return found if mask is None or "decoder_input_ids" in more else found[mask.bool()]


def generated(model, ids, mask, cache=None, **more):
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **({"cache_implementation": cache} if cache else {}), **more,
    )  # fmt: skip
    logits = torch.stack(found.logits)
    if not logits.isfinite().all():
        raise ArithmeticError("logits that are not finite: every token after them is arbitrary")
    return logits


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", zoo("causal", *DECODERS))
def test_a_decoders_logits_and_gradients(wide, kind):
    models, ids = made(kind), tokens(21)
    for mask in paddings(ids).values():
        same(models, lambda model, mask=mask: logits(model, ids, mask, use_cache=False))

    def gradients(model):
        with torch.enable_grad(), flash_on_cpu():
            model.train()(ids, use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    same(models, gradients)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", zoo("causal", *DECODERS))
def test_a_decoder_generates_the_same_with_each_cache(wide, kind, cache):
    models, ids = made(kind), tokens(13)
    if getattr(models[0].config, "is_decoder", None) is False:
        pytest.skip("an encoder: generate gives it a decoder's masks")
    left = torch.ones_like(ids)
    left[1, :5] = 0
    for mask in (torch.ones_like(ids), left):
        same(models, lambda model, mask=mask: generated(model, ids, mask, cache))


class Rounded(cache_utils.QuantizedLayer):
    """A quantised layer of groups with a scale each, as quanto's and hqq's, by torch alone: keys
    are quantised anew whenever `residual_length` of them wait."""

    def _quantize(self, x, axis):
        groups = x.unflatten(-1, (-1, self.q_group_size))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
        return (groups / scale).round().to(torch.int8), scale

    def _dequantize(self, of):
        return (of[0] * of[1]).flatten(-2).to(self.dtype)


GENERATIONS = {
    "quantised to fp8": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    "quantised in groups": {
        "cache_implementation": "quantized",
        "cache_config": {"backend": "quanto", "residual_length": 4, "q_group_size": 32},
    },
    "beams": {"num_beams": 3},
    "beams of a static cache": {"num_beams": 3, "cache_implementation": "static"},
    "candidates of the prompt": {"prompt_lookup_num_tokens": 3},
    "prompts in chunks": {"prefill_chunk_size": 4},
    "chunks into a static cache": {"prefill_chunk_size": 4, "cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("ours", ["cutex", "cutex_flash_3"])
@pytest.mark.parametrize("way", GENERATIONS)
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma2", "mistral"))]
)
def test_each_way_to_generate(wide, monkeypatch, kind, way, ours):
    """transformers refuses quantised caches of windows itself, with sdpa as with ours."""
    monkeypatch.setattr(cache_utils, "QuantoQuantizedLayer", Rounded)
    monkeypatch.setattr(in_transformers_flash, "flash_attn_with_kvcache", each_by_itself)
    models, ids = made(kind, ours=ours), tokens(13, batch=1 if "candidates" in way else 2)
    left = torch.ones_like(ids)
    left[-1, :5] = 0
    for mask in (torch.ones_like(ids), left):
        same(models, lambda model, mask=mask: generated(model, ids, mask, **GENERATIONS[way]))


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_of_padded_prompts_are_decoded_where_their_keys_are(wide, cache):
    """By one call for the batch, without a copy of the keys."""
    models, ids = made("llama"), tokens(13)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    DECODED.clear()
    same(models, lambda model: generated(model, ids, mask, cache))
    steps, layers = 5, 2
    assert [2] * (steps * layers) == DECODED


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma2", "gpt_oss"))]
)
def test_a_compiled_token_of_a_static_cache_is_an_operator_of_ours(wide, monkeypatch, kind):
    """As `generate` compiles it on a GPU."""
    monkeypatch.setattr(registered_token, "flash_attn_with_kvcache", each_by_itself)
    models, ids, graphs = made(kind), tokens(13), []
    mask = torch.ones_like(ids)
    mask[1, :5] = 0

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def run(model):
        torch._dynamo.reset()
        how = generation.CompileConfig(backend=backend, fullgraph=False, mode=None)
        how._compile_all_devices = model is models[1]
        return generated(model, ids, mask, "static", compile_config=how)

    same(models, run)
    assert graphs and (kind != "llama" or len(graphs) == 1)  # others' windows begin to slide
    ours = [sum("flash_attn_token" in x for x in graph) for graph in graphs]
    layers = models[1].config.num_hidden_layers
    whole = kind != "gpt_oss"  # whose experts break graphs, so that a layer's attention has one
    assert {*ours} == {layers} if whole else {*ours} == {0, 1} and sum(ours) >= layers
    assert not any("scaled_dot" in x for graph in graphs for x in graph)


FLASH = ("llama", "mistral", "gemma2", "qwen3", "phi")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", FLASH)
def test_transformers_own_flash_path_on_our_functions(wide, kind, cache):
    models, ids = made(kind, ours="cutex_flash_3"), tokens(13)
    left = torch.ones_like(ids)
    left[1, :5] = 0
    for mask in (torch.ones_like(ids), left):
        same(models, lambda model, mask=mask: generated(model, ids, mask, cache))
    mask = paddings(tokens(21))["right"]
    same(models, lambda model: logits(model, tokens(21), mask))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_static_cache_without_a_mask_on_transformers_own_flash_path(wide, rows):
    """transformers itself would see all of the cache's slots."""
    ids = tokens(9 + rows)

    def run(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=50)
        first = model(ids[:, :9], past_key_values=cache).logits
        return torch.cat((first, model(ids[:, 9:], past_key_values=cache).logits), 1)

    same(made("llama", ours="cutex_flash_3"), run)


def test_masks_that_flash_attention_drops_are_refused_in_a_sentence(wide):
    given = {"batch_size": 1, "q_length": 9, "kv_length": 9}
    chunks = masking_utils.chunked_causal_mask_function(4, torch.tensor([0]))
    with pytest.raises(ValueError, match="cutex_flash_3' has causal masks, sliding windows and"):
        in_transformers_flash.mask_of(**given, mask_function=chunks)


@pytest.mark.parametrize("kind", zoo("masked", *ENCODERS))
def test_an_encoders_logits(wide, kind):
    models, ids = made(kind, "masked"), tokens(21)
    for mask in paddings(ids).values():
        same(models, lambda model, mask=mask: logits(model, ids, mask))


@pytest.mark.parametrize("kind", zoo("seq2seq", *SEQ2SEQ))
def test_an_encoder_decoder(wide, kind):
    """Also with as many queries as keys, whose padding is none of the queries'."""
    models, ids = made(kind, "seq2seq"), tokens(21)
    for mask in paddings(ids).values():
        for rows in (21, 8):
            given = {"decoder_input_ids": tokens(rows, seed=2)}
            same(models, lambda model, m=mask, given=given: logits(model, ids, m, **given))
    mask = paddings(ids)["sides"]
    for cache in CACHES:
        same(models, lambda model, cache=cache: generated(model, ids, mask, cache))


@pytest.mark.parametrize("kind", zoo("speech", "whisper"))
def test_a_model_of_speech(wide, kind):
    heard = torch.randn(2, 16, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    run = lambda model: model(input_features=heard, decoder_input_ids=tokens(9)).logits
    same(made(kind, "speech"), run)


@pytest.mark.parametrize("kind", zoo("image", "vit"))
def test_a_model_of_images(wide, kind):
    seen = torch.randn(
        2, 3, 48, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    same(made(kind, "image"), lambda model: model(pixel_values=seen).logits)


def test_the_zoo_runs_on_our_kernel(wide):
    """Otherwise all of the above would compare torch with itself."""
    for kind, launches in (("llama", 2), ("gemma2", 2), ("gpt_oss", 2), ("llama4_text", 1)):
        model = made(kind)[1]
        wide.launches.clear()
        model(tokens(21), use_cache=False)
        assert len(wide.launches) == launches, kind  # chunks are left to torch


# ---- packed sequences

PACKED = {
    "from 0": [range(12), range(13)],
    "from 2, as RoBERTa counts": [range(2, 14), range(2, 15)],
    "the first goes on": [range(5, 14), range(16)],
    "of one token": [range(1), range(23), range(1)],
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss", "opt"])
@pytest.mark.parametrize("places", PACKED.values(), ids=PACKED)
def test_packed_sequences_do_not_see_each_other(wide, kind, places, use_cache):
    """With a cache as well, where transformers' flash attention does so and sdpa does not."""
    model, ours = made(kind)
    ids, at, apart = tokens(25, batch=1), 0, []
    for part in places:
        rows, at = slice(at, at + len(part)), at + len(part)
        apart.append(model(ids[:, rows], position_ids=torch.tensor([[*part]])).logits)
    positions = torch.tensor([[i for part in places for i in part]])
    together = ours(ids, position_ids=positions, use_cache=use_cache).logits
    close(together, torch.cat(apart, 1))


@pytest.mark.parametrize("places", [[*range(0, 50, 2)], [*range(12), *range(20, 33)]])
def test_positions_that_step_otherwise(wide, places):
    """Without a cache sdpa's mask splits where they do not rise by 1."""
    ids, places = tokens(25, batch=1), torch.tensor([places])
    same(made("llama"), lambda model: model(ids, position_ids=places, use_cache=False).logits)


def test_a_chunk_that_goes_on_from_a_cache(wide):
    models, ids = made("mistral"), tokens(25, batch=1)

    def in_chunks(model):
        cache = transformers.DynamicCache(config=model.config)
        parts = [
            model(ids[:, rows], position_ids=torch.arange(25)[None, rows], past_key_values=cache)
            for rows in (slice(0, 9), slice(9, 20), slice(20, 25))
        ]
        return torch.cat([x.logits for x in parts], 1)

    same(models, in_chunks)
    close(in_chunks(models[1]), models[0](ids, use_cache=False).logits)


@pytest.mark.parametrize("begin", [0, 3, 30])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_chunk_into_a_static_cache(wide, begin, rows):
    """Of full and of sliding layers; the cache is longer than what is valid in it, or has slid."""
    ids = tokens(begin + rows)

    def run(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=50)
        if begin:
            model(ids[:, :begin], past_key_values=cache)
        return model(ids[:, begin:], past_key_values=cache).logits

    same(made("gemma3_text"), run)


def test_sparse_attention_is_refused_in_a_sentence(wide):
    q = torch.zeros(1, 2, 9, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match="indices: attn_implementation 'cutex' has no sparse"):
        in_transformers.attention(torch.nn.Module(), q, q, q, None, indices=torch.zeros(1))


# ---- the simulator


@pytest.mark.slow
def test_a_static_cache_in_the_simulator():
    in_transformers.register()
    found, ids = {}, tokens(13)
    with cutex.ops.simulated("sm_90a"), torch.no_grad():
        for name in ("sdpa", "cutex"):
            model = model_of("llama", dtype=torch.bfloat16, implementation=name)
            cache = transformers.StaticCache(config=model.config, max_cache_len=40)
            first = model(ids[:, :9], past_key_values=cache).logits
            found[name] = torch.cat((first, model(ids[:, 9:], past_key_values=cache).logits), 1)
    error = (found["cutex"] - found["sdpa"]).float().norm() / found["sdpa"].float().norm()
    assert error < 0.03, float(error)


@pytest.mark.slow
@pytest.mark.skipif(not PAGED, reason="transformers passes no pages to its flash functions")
def test_pages_of_continuous_batching_in_the_simulator():
    """One token each of two requests, as transformers calls its function of pages."""
    in_transformers_flash.register()
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, h, 64, generator=g).bfloat16() for h in (4, 2, 2))
    pages = [torch.randn(5, 16, 2, 64, generator=g).bfloat16() for _ in range(2)]
    table = torch.tensor([[3, 1, -1], [4, -1, -1]], dtype=torch.int32)
    ends, past = torch.tensor([0, 21, 31], dtype=torch.int32), (20, 9)
    want = []
    for b, n in enumerate(past):
        rows = [x[table[b, : -(-n // 16)]].flatten(0, 1)[:n] for x in pages]
        keys, values = (torch.cat((x, y[0, b][None])) for x, y in zip(rows, (k, v), strict=True))
        scores = torch.einsum("hd,khd->hk", q[0, b].double(), keys.double().repeat_interleave(2, 1))
        p = (scores / 8).softmax(-1)
        want.append(torch.einsum("hk,khd->hd", p, values.double().repeat_interleave(2, 1)))
    with cutex.ops.simulated("sm_90a"):
        out = modeling_flash_attention_utils._flash_attention_forward(
            q, k, v, None, query_length=2, is_causal=True, cu_seq_lens_q=ends.new_tensor([0, 1, 2]),
            cu_seq_lens_k=ends, max_length_q=1, max_length_k=1, block_table=table,
            k_cache=pages[0], v_cache=pages[1], attn_implementation="cutex_flash_3",
        )  # fmt: skip
    assert (out[0].double() - torch.stack(want)).abs().max() < 0.02
    assert torch.equal(pages[0][1, 4], k[0, 0]) and torch.equal(pages[1][4, 9], v[0, 1])


def test_a_mask_that_a_compiler_is_given():
    """A compiled layer takes the mask of an eager model, and leaves it to torch."""
    torch._dynamo.reset()
    q = torch.randn(1, 2, 9, 64, dtype=torch.float64)
    mask = in_transformers.mask_of(1, 9, 9, dtype=torch.float64)
    compiled = torch.compile(lambda q, mask: q + (mask == 0).sum(), backend="eager")
    assert torch.equal(compiled(q, mask), q + 45)
