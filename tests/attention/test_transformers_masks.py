"""What transformers may hand to attention: each of its mask functions is known and is what sdpa
has; the arguments, caches and layers of its models."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402
from transformers.generation import configuration_utils as generation  # noqa: E402

from cutex.ops.attention import in_transformers  # noqa: E402
from cutex.ops.attention.transformers_masks import (  # noqa: E402
    Mask,
    pattern_of,
    run_of_token,
)


def every_mask_function():
    """Each mask function that transformers can make, with whether a band expresses it."""
    m = masking_utils
    ids = torch.tensor([[0] * 5 + [1] * 39])
    places = torch.tensor([[*range(2, 7), *range(39)]])
    plain = {
        "causal_mask_function": (m.causal_mask_function, True),
        "bidirectional_mask_function": (m.bidirectional_mask_function, True),
        "sliding_window_overlay": (m.sliding_window_overlay(7), True),
        "sliding_window_causal_mask_function": (m.sliding_window_causal_mask_function(7), True),
        "sliding_window_bidirectional_overlay": (m.sliding_window_bidirectional_overlay(7), True),
        "sliding_window_bidirectional_mask_function": (
            m.sliding_window_bidirectional_mask_function(7), True),
        "chunked_overlay": (m.chunked_overlay(8, ids[:, 0]), False),
        "chunked_causal_mask_function": (m.chunked_causal_mask_function(8, ids[:, 0]), False),
        "blockwise_overlay": (m.blockwise_overlay(ids), False),
        "padding_mask_function": (m.padding_mask_function(ids.bool()), False),
        "packed_sequence_mask_function": (m.packed_sequence_mask_function(ids), False),
    }  # fmt: skip
    name = "packed_sequence_compatibility_function"
    if hasattr(m, name):  # of newer ones
        plain[name] = getattr(m, name)(m.causal_mask_function, places, ids), True
    return plain


def test_each_mask_function_of_transformers_is_known():
    names = {
        name
        for name, f in inspect.getmembers(masking_utils, inspect.isfunction)
        if name.endswith(("_overlay", "_mask_function", "compatibility_function"))
        and f.__module__ == masking_utils.__name__
    } - {"add_offsets_to_mask_function"}
    assert names == set(every_mask_function())
    for name, (function, expressed) in every_mask_function().items():
        if not name.startswith("packed_sequence_mask"):
            assert (pattern_of(function, 40) is not None) == expressed, name
    whole = masking_utils.chunked_causal_mask_function(8, torch.tensor([0]))
    assert pattern_of(whole, 8) is not None, "all in one chunk"
    either = masking_utils.or_masks(masking_utils.causal_mask_function, whole)
    assert pattern_of(either, 40) is None
    assert pattern_of(lambda b, h, q, k: k <= q, 40) is None, "a user's own"


@pytest.mark.parametrize("name", every_mask_function())
@pytest.mark.parametrize("sizes", [(40, 40, 0, 0), (1, 40, 30, 0), (6, 40, 20, 4), (9, 40, 0, 0)])
def test_a_mask_is_what_sdpa_has(name, sizes):
    """As a tensor, and as the layout that it is taken for, over all queries and keys."""
    queries, keys, q_offset, kv_offset = sizes
    function = every_mask_function()[name][0]
    packed = name.startswith("packed")
    if packed and sizes != (40, 40, 0, 0):
        return
    given = {
        "batch_size": 1, "q_length": queries, "kv_length": keys, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": function,
    }  # fmt: skip
    want = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    mask = in_transformers.mask_of(**given, dtype=torch.float32)
    assert isinstance(mask, Mask)
    assert torch.equal(mask + 0 == 0, want)
    assert torch.equal(mask[:, :, -1:] == 0, want[:, :, -1:])
    layout = mask.expressed
    if layout is None:
        return
    left, right = layout.window
    offset = torch.arange(keys) - torch.arange(queries)[:, None] - (layout.keys - queries)
    seen = torch.arange(keys).expand(queries, keys) < layout.keys
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    if layout.cu_seqlens_k is not None:
        number = torch.searchsorted(layout.cu_seqlens_k[1:], torch.arange(keys), right=True)
        seen &= number == number[:, None]
    assert torch.equal(seen, want[0, 0])


@pytest.mark.parametrize("batch", [1, 3])
def test_the_lengths_of_a_static_cache_are_as_a_plan_takes_them(batch):
    """Each layer's call would else make a plan of its own, for one token of one sequence, too."""
    function = masking_utils.sliding_window_causal_mask_function(40)
    given = {
        "mask_function": function,
        "attention_mask": None,
        "batch_size": batch,
        "device": "cpu",
    }
    places = {"q_offset": torch.tensor(64), "kv_offset": 0, "kv_length": 96}
    begins, ends = run_of_token({**given, **places})
    for x, place in ((begins, 25), (ends, 65)):
        assert x.tolist() == [place] * batch and x.stride() == (1,) and x.dtype == torch.int32


def test_models_pass_nothing_to_attention_that_we_do_not_know():
    """The arguments in the calls of all models of transformers."""
    known = {
        *inspect.signature(in_transformers.attention).parameters, *in_transformers.SPARSE,
        *in_transformers.FOR_TORCH, "sliding_window", "position_ids", "output_attentions",
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic",
    }  # fmt: skip
    folder = Path(transformers.__file__).parent / "models"
    found = {}
    for path in folder.glob("*/modeling_*.py"):
        text = path.read_text()
        for call_ in re.finditer(r"= attention_interface\((.*?)\n[ ]*\)\n", text, re.S):
            found.update(dict.fromkeys(re.findall(r"^\s*(\w+)=", call_[1], re.M), path.name))
    assert len(found) > 10
    assert not {k: v for k, v in found.items() if k not in known | {"sinks"}}


def test_transformers_caches_and_patterns_of_layers_are_those_that_we_tried():
    tried = {"dynamic", "static", "offloaded", "offloaded_static", "quantized"}
    usual = set(generation.STATIC_CACHE_IMPLEMENTATIONS + generation.DYNAMIC_CACHE_IMPLEMENTATIONS)
    assert usual == tried  # offloaded ones, which want a GPU, hand out tensors as the first two do
    assert set(masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING) <= {
        "full_attention", "sliding_attention", "chunked_attention", "compressed_sparse_attention",
        "heavily_compressed_attention", "minimax_m3_sparse", "indexed_attention",
        "linear_attention", "conv", "hybrid", "hybrid_sliding",
        "deepseek_sparse_attention", "qwen_sparse_attention",  # of 5.17: indexed ones
    }  # fmt: skip
