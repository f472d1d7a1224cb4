"""A flag of a public function takes True and False, not what Python would count as True."""

from __future__ import annotations

import inspect

import pytest
import torch

import cutex

HALF = {"dtype": torch.float16}
LENGTHS = torch.tensor([3, 4], dtype=torch.int32)
CACHE = torch.zeros(2, 8, 2, 64, **HALF)
NEW = torch.zeros(2, 1, 2, 64, **HALF)
TABLE = torch.zeros(8, 8, **HALF)
PACKED = {
    "q": torch.zeros(8, 2, 64, **HALF), "k": torch.zeros(8, 2, 64, **HALF),
    "v": torch.zeros(8, 2, 64, **HALF), "cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 8], dtype=torch.int32),
}  # fmt: skip
ARGUMENTS = {
    "flash_attn_func": {"q": CACHE, "k": CACHE, "v": CACHE},
    "flash_attn_varlen_func": PACKED,
    "flash_attn_with_kvcache": {
        "q": NEW, "k_cache": CACHE, "v_cache": CACHE.clone(), "k": NEW, "v": NEW,
        "cache_seqlens": LENGTHS,
    },
    "flash_mla_with_kvcache": {
        "q": torch.zeros(2, 1, 16, 576, **HALF), "k_cache": torch.zeros(2, 64, 1, 576, **HALF),
        "block_table": torch.zeros(2, 1, dtype=torch.int32), "cache_seqlens": LENGTHS,
    },
    "grouped_mm": {
        "x": TABLE, "w": TABLE[None], "offs": LENGTHS[:1], "out": TABLE.clone(),
        "out_index": torch.arange(8, dtype=torch.int32),
    },
    "matmul": {"a": TABLE, "b": TABLE},
    "quantize": {"x": TABLE, "format": "mxfp8"},
    "reduce": {"x": TABLE},
    "scaled_grouped_mm": {
        "a": TABLE.to(torch.float8_e4m3fn), "b": TABLE[None].to(torch.float8_e4m3fn).mT,
        "scale_a": torch.ones(1), "scale_b": torch.ones(1), "offs": LENGTHS[:1],
        "scale_recipe_a": "TensorWise", "scale_recipe_b": "TensorWise",
    },
    "scaled_mm": {
        "a": TABLE.to(torch.float8_e4m3fn), "b": TABLE.to(torch.float8_e4m3fn).mT,
        "scale_a": torch.ones(1), "scale_b": torch.ones(1), "scale_recipe_a": "TensorWise",
        "scale_recipe_b": "TensorWise",
    },
    "rope": {"x": NEW, "cos": TABLE, "sin": TABLE},
    "scan": {"x": TABLE},
    "softmax": {"x": TABLE},
}  # fmt: skip


TOOLS = ("simulate", "warm_up")  # which compute nothing of their own
TURNED = {"rotary_interleaved": {"rotary_cos": TABLE, "rotary_sin": TABLE}}  # without, not read


def flags():
    for name in cutex.__all__:
        function = getattr(cutex, name)
        if inspect.isfunction(function) and name not in TOOLS:
            for parameter in inspect.signature(function).parameters.values():
                if "bool" in str(parameter.annotation):
                    yield name, parameter.name


@pytest.mark.parametrize(("name", "flag"), [*flags()])
def test_only_true_and_false_are_taken(name, flag):
    for value in ("no", 2, torch.tensor(True)):
        with cutex.ops.simulated("sm_90a"), pytest.raises((TypeError, ValueError)) as error:
            getattr(cutex, name)(**{**ARGUMENTS[name], **TURNED.get(flag, {}), flag: value})
        said = str(error.value)
        assert flag.removeprefix("return_softmax_") in said and "\n" not in said, value
