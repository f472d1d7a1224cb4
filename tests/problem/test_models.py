"""The sizes of the corpus's models against published figures of the whole models.

A model's parameters, as its checkpoint counts them, must be those of its layers here, each as often
as the model has it, and of its other parts: one wrong size of one layer makes another count.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from cutex.problem.models import MODELS


class Whole(NamedTuple):
    """A whole model."""

    parameters: int  # published; of DeepSeek-V3 without the head that predicts a second token
    copies: dict[str, int]  # of each layer
    others: int  # parameters of embeddings, norms, biases, routers and what else is no layer here
    unit: int = 1  # that `parameters` was rounded to


def blocks(count: int, experts: int = 1) -> dict[str, int]:
    """Copies of the layers of `count` decoder blocks."""
    ffn = dict.fromkeys(("gate_up", "down"), count * experts)
    return dict.fromkeys(("qkv", "o"), count) | ffn


def untied(count: int) -> dict[str, int]:
    """Copies of the layers of `count` decoder blocks, and of the head at their end."""
    return {**blocks(count), "lm_head": 1}


def plain(count: int) -> dict[str, int]:
    return dict.fromkeys(("qkv", "o", "up", "down"), count)


def latent(dense: int, sparse: int, experts: int) -> dict[str, int]:
    """Copies of the layers of so many blocks with a dense FFN and with experts, shared ones too."""
    attention = dict.fromkeys(("q_b", "kv_a", "kv_b", "o"), dense + sparse)
    ffn = dict.fromkeys(("gate_up", "down"), dense)
    return attention | ffn | dict.fromkeys(("expert gate_up", "expert down"), sparse * experts)


def norms(count: int, hidden: int, of_block: int = 2) -> int:
    """Parameters of the norms of `count` blocks, and of the one at their end."""
    return (count * of_block + 1) * hidden


SIGLIP = 416_866_032  # the vision tower of Gemma 3

WHOLE = {
    "meta-llama/Llama-3.1-8B": Whole(
        8_030_261_248, untied(32), 128256 * 4096 + norms(32, 4096)
    ),
    "meta-llama/Llama-3.1-70B": Whole(
        70_553_706_496, blocks(80), 2 * 128256 * 8192 + norms(80, 8192)
    ),
    "meta-llama/Llama-3.1-405B": Whole(
        405_853_388_800, blocks(126), 2 * 128256 * 16384 + norms(126, 16384)
    ),
    "meta-llama/Llama-2-13b-hf": Whole(
        13_015_864_320, blocks(40), 2 * 32000 * 5120 + norms(40, 5120)
    ),
    "Qwen/Qwen2.5-7B": Whole(
        7_615_616_512, untied(28), 152064 * 3584 + norms(28, 3584) + 28 * (28 + 2 * 4) * 128
    ),
    "Qwen/Qwen2.5-32B": Whole(
        32_763_876_352, blocks(64), 2 * 152064 * 5120 + norms(64, 5120) + 64 * (40 + 2 * 8) * 128
    ),
    "Qwen/Qwen2.5-0.5B": Whole(
        494_032_768, blocks(24), 151936 * 896 + norms(24, 896) + 24 * (14 + 2 * 2) * 64
    ),
    "Qwen/Qwen3-30B-A3B": Whole(
        30_532_122_624,
        blocks(48, experts=128),
        2 * 151936 * 2048 + norms(48, 2048) + 48 * (128 * 2048 + 2 * 128),
    ),
    "mistralai/Mistral-Small-24B-Base-2501": Whole(
        23_572_403_200, blocks(40), 2 * 131072 * 5120 + norms(40, 5120)
    ),
    "mistralai/Mixtral-8x22B-v0.1": Whole(
        140_630_071_296,
        blocks(56, experts=8),
        2 * 32768 * 6144 + norms(56, 6144) + 56 * 8 * 6144,
    ),
    "deepseek-ai/DeepSeek-V3": Whole(
        671_026_419_200,
        {**latent(3, 58, 256 + 1), "q_a": 61, "lm_head": 1},
        129280 * 7168 + norms(61, 7168) + 61 * (1536 + 512) + 58 * (256 * 7168 + 256),
    ),
    "deepseek-ai/DeepSeek-V2-Lite": Whole(
        15_706_484_224,
        latent(1, 26, 64 + 2),
        2 * 102400 * 2048 + norms(27, 2048) + 27 * 512 + 26 * 64 * 2048,
    ),
    "google/gemma-2-9b": Whole(
        9_241_705_984, blocks(42), 256000 * 3584 + norms(42, 3584, of_block=4)
    ),
    "google/gemma-3-27b-pt": Whole(
        27_432_406_640,
        blocks(62),
        262208 * 5376 + norms(62, 5376, of_block=4) + 62 * 2 * 128 + SIGLIP + 1152 * 5376 + 1152,
    ),
    "microsoft/Phi-3-mini-4k-instruct": Whole(
        3_821_079_552, blocks(32), 2 * 32064 * 3072 + norms(32, 3072)
    ),
    "microsoft/phi-4": Whole(
        14_659_507_200, blocks(40), 2 * 100352 * 5120 + norms(40, 5120)
    ),
    "openai/gpt-oss-120b": Whole(
        116_829_156_672,
        blocks(36, experts=128),
        2 * 201088 * 2880
        + norms(36, 2880)
        + 36 * (5120 + 2880 + 64)  # biases and sinks of the attention
        + 36 * 128 * (2880 + 1 + 5760 + 2880),  # router, and biases of the experts
    ),
    "01-ai/Yi-34B": Whole(
        34_388_917_248, blocks(60), 2 * 64000 * 7168 + norms(60, 7168)
    ),
    "CohereForAI/c4ai-command-r-v01": Whole(
        35_000_000_000, blocks(40), 256000 * 8192 + norms(40, 8192, of_block=1), unit=100_000_000
    ),
    "openai-community/gpt2-xl": Whole(
        1_557_611_200,
        plain(48),
        (50257 + 1024) * 1600 + 2 * norms(48, 1600) + 48 * (3 + 1 + 4 + 1) * 1600,
    ),
    "google-bert/bert-large-uncased": Whole(
        336_226_108,
        plain(24),
        (30522 + 512 + 2) * 1024
        + 2 * norms(24, 1024)
        + 24 * (3 + 1 + 4 + 1) * 1024
        + (1024 * 1024 + 1024)  # pooler
        + (1024 * 1024 + 3 * 1024 + 30522)  # head of the masked words
        + (2 * 1024 + 2),  # head of the next sentence
    ),
    "openai/whisper-large-v3": Whole(
        1_543_490_560,
        {**plain(32 + 32), "qkv": 32 + 2 * 32, "o": 32 + 2 * 32},  # the decoder attends twice
        (51866 + 448 + 1500) * 1280
        + 2 * (norms(32, 1280) + norms(32, 1280, of_block=3))
        + (32 + 32) * (4 + 1) * 1280
        + (32 + 2 * 32) * (2 + 1) * 1280  # K has no bias
        + (3 * 128 * 1280 + 1280)  # convolutions
        + (3 * 1280 * 1280 + 1280),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.source)
def test_the_layers_add_up_to_the_published_parameters(model):
    whole = WHOLE[model.source]
    weights = {x.name: x.out_features * x.in_features for x in model.layers}
    assert weights.keys() == whole.copies.keys()  # none is left unchecked
    counted = sum(n * weights[name] for name, n in whole.copies.items()) + whole.others
    assert abs(counted - whole.parameters) <= whole.unit // 2


def test_no_model_is_left_out():
    assert [model.source for model in MODELS] == [*dict.fromkeys(m.source for m in MODELS)]
    assert WHOLE.keys() == {model.source for model in MODELS}
