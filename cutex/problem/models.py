"""The corpus: linear layers of public models times token counts, with the source of each shape.

Sizes are those of the models' own configuration: config.json of the repository that a `Model`
names. The files below say the same sizes, and ask for no account; tests/problem/test_models.py adds
each model's layers up to its published parameter count.

| models | repository: file |
|---|---|
| Llama, Qwen, Mixtral, Gemma, Phi | Lightning-AI/litgpt: litgpt/config.py |
| Gemma | google/gemma_pytorch: gemma/config.py |
| DeepSeek-V3 | deepseek-ai/DeepSeek-V3: inference/configs/config_671B.json |
| DeepSeek-V2-Lite | AMD-AGI/Primus: primus/configs/models/megatron/deepseek_v2_lite.yaml |
| gpt-oss-120b | openai/gpt-oss: gpt_oss/torch/model.py |
| Command R | huggingface/transformers: src/transformers/models/cohere/configuration_cohere.py |
| Mistral Small, Yi, GPT-2, BERT, Whisper | config.json alone |

A layer's passes are those of cutex/problem/layer.py; half of the corpus, by a hash of the product,
is for fitting choices, the other half only for reporting.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from cutex.problem.layer import LayerProblem

DTYPES = ("bf16", "e4m3")

DECODE = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
FEW = (80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 384)
PREFILL = (512, 640, 768, 1024, 1536, 2048, 3000, 4096, 6144, 8192, 16384)
TRAINED = (1024, 2048, 4096, 8192, 16384)
MAX_FLOPS = 4e12  # 6 ms on an H200; larger problems behave alike
MAX_BYTES = 4 << 30


class Layer(NamedTuple):
    """A weight (out_features, in_features)."""

    name: str
    out_features: int
    in_features: int


@dataclass(frozen=True)
class Model:
    """A model's linear layers."""

    source: str  # the repository whose config.json says the sizes
    layers: tuple[Layer, ...]


def dense(
    source: str, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int = 0
) -> Model:
    """A decoder with grouped heads and a gated FFN (of a mixture, one expert's), its Q, K and V,
    and its gate and up, fused."""
    layers = [
        Layer("qkv", (heads + 2 * kv_heads) * head_dim, hidden),
        Layer("o", hidden, heads * head_dim),
        Layer("gate_up", 2 * ffn, hidden),
        Layer("down", hidden, ffn),
    ]
    if vocab:
        layers.append(Layer("lm_head", vocab, hidden))
    return Model(source, tuple(layers))


def plain(source: str, hidden: int, ffn: int) -> Model:
    """A transformer with as many heads of K and V as of Q, fused, and an FFN without a gate."""
    return Model(
        source,
        (
            Layer("qkv", 3 * hidden, hidden),
            Layer("o", hidden, hidden),
            Layer("up", ffn, hidden),
            Layer("down", hidden, ffn),
        ),
    )


def latent(
    source: str, hidden: int, heads: int, q_rank: int, ffn: int, expert: int, vocab: int = 0
) -> Model:
    """Multi-head latent attention (ranks 512 and 64, heads of 128 + 64), experts and a dense FFN;
    `q_rank` 0: Q comes from the hidden state directly."""
    layers = [
        Layer("q_b", heads * 192, q_rank or hidden),
        Layer("kv_a", 512 + 64, hidden),
        Layer("kv_b", heads * 256, 512),
        Layer("o", hidden, heads * 128),
        Layer("gate_up", 2 * ffn, hidden),
        Layer("down", hidden, ffn),
        Layer("expert gate_up", 2 * expert, hidden),
        Layer("expert down", hidden, expert),
    ]
    if q_rank:
        layers.append(Layer("q_a", q_rank, hidden))
    if vocab:
        layers.append(Layer("lm_head", vocab, hidden))
    return Model(source, tuple(layers))


MODELS = (
    dense("meta-llama/Llama-3.1-8B", 4096, 32, 8, 128, 14336, vocab=128256),
    dense("meta-llama/Llama-3.1-70B", 8192, 64, 8, 128, 28672),
    dense("meta-llama/Llama-3.1-405B", 16384, 128, 8, 128, 53248),
    dense("meta-llama/Llama-2-13b-hf", 5120, 40, 40, 128, 13824),
    dense("Qwen/Qwen2.5-7B", 3584, 28, 4, 128, 18944, vocab=152064),
    dense("Qwen/Qwen2.5-32B", 5120, 40, 8, 128, 27648),
    dense("Qwen/Qwen2.5-0.5B", 896, 14, 2, 64, 4864),
    dense("Qwen/Qwen3-30B-A3B", 2048, 32, 4, 128, 768),
    dense("mistralai/Mistral-Small-24B-Base-2501", 5120, 32, 8, 128, 32768),
    dense("mistralai/Mixtral-8x22B-v0.1", 6144, 48, 8, 128, 16384),
    latent("deepseek-ai/DeepSeek-V3", 7168, 128, 1536, 18432, 2048, vocab=129280),
    latent("deepseek-ai/DeepSeek-V2-Lite", 2048, 16, 0, 10944, 1408),
    dense("google/gemma-2-9b", 3584, 16, 8, 256, 14336),
    dense("google/gemma-3-27b-pt", 5376, 32, 16, 128, 21504),
    dense("microsoft/Phi-3-mini-4k-instruct", 3072, 32, 32, 96, 8192),
    dense("microsoft/phi-4", 5120, 40, 10, 128, 17920),
    dense("openai/gpt-oss-120b", 2880, 64, 8, 64, 2880),
    dense("01-ai/Yi-34B", 7168, 56, 8, 128, 20480),
    dense("CohereForAI/c4ai-command-r-v01", 8192, 64, 64, 128, 22528),
    plain("openai-community/gpt2-xl", 1600, 6400),
    plain("google-bert/bert-large-uncased", 1024, 4096),
    plain("openai/whisper-large-v3", 1280, 5120),
)


@dataclass(frozen=True)
class Entry:
    """A problem of the corpus."""

    problem: LayerProblem
    source: str
    layer: str

    @property
    def name(self) -> str:
        m, n, k = self.problem.mnk
        return f"{m}x{n}x{k} {self.problem.direction} {self.problem.dtype}"

    @property
    def fits(self) -> bool:
        """Whether it is of the half that choices may be fitted on."""
        return hash_below(self.name, 2) == 0


def hash_below(text: str, count: int) -> int:
    """A number below `count` that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % count


def corpus(dtype: str = "bf16") -> tuple[Entry, ...]:
    """Every layer with two token counts of each kind, and, with bf16, training passes; no problem
    twice, those over MAX_FLOPS or MAX_BYTES left out."""
    found: dict[str, Entry] = {}

    def add(model: Model, layer: Layer, tokens: int, direction: str) -> None:
        problem = LayerProblem(tokens, layer.out_features, layer.in_features, direction, dtype)
        if problem.flops <= MAX_FLOPS and problem.bytes <= MAX_BYTES:
            entry = Entry(problem, model.source, layer.name)
            found.setdefault(entry.name, entry)

    for model in MODELS:
        for layer in model.layers:
            seed = f"{model.source} {layer.name}"
            for kind, counts in (("decode", DECODE), ("few", FEW), ("prefill", PREFILL)):
                for tokens in spread_over(counts, 2 if kind == "few" else 1, f"{seed} {kind}"):
                    add(model, layer, tokens, "forward")
            if dtype != "e4m3" and layer.name != "lm_head":
                for direction in ("dgrad", "wgrad"):
                    for tokens in spread_over(TRAINED, 1, f"{seed} {direction}"):
                        if hash_below(f"{seed} {direction} kept", 3):
                            add(model, layer, tokens, direction)
    return tuple(found.values())


def fitting(dtype: str = "bf16") -> dict[str, Entry]:
    """Every layer with every token count, forward and, with bf16, backward, by name: those of the
    half that choices may be fitted on, also if they are not in the corpus."""
    counts: dict[str, tuple[int, ...]] = {"forward": (*DECODE, *FEW, *PREFILL)}
    if dtype != "e4m3":
        counts |= {"dgrad": TRAINED, "wgrad": TRAINED}
    found: dict[str, Entry] = {}
    for model in MODELS:
        for layer in model.layers:
            for direction, tokens in ((d, t) for d, of in counts.items() for t in of):
                problem = LayerProblem(
                    tokens, layer.out_features, layer.in_features, direction, dtype
                )
                entry = Entry(problem, model.source, layer.name)
                if entry.fits and problem.flops <= MAX_FLOPS and problem.bytes <= MAX_BYTES:
                    found.setdefault(entry.name, entry)
    return found


def spread_over(counts: tuple[int, ...], number: int, seed: str) -> list[int]:
    """`number` entries of `counts`, evenly spaced, from an offset that `seed` gives."""
    first, step = hash_below(seed, len(counts)), max(1, len(counts) // number)
    return [counts[(first + i * step) % len(counts)] for i in range(number)]
