"""Tiny random models of transformers, one for each type in its registry that can be made so.

The sizes are given by the names that configs use for them, so that a type that transformers adds is
made without an edit; `ALTERED` has what single types need besides.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HEAD_DIM, VOCABULARY, WINDOW = 64, 97, 8

SMALL: dict[str, Any] = {
    name: value
    for value, names in {
        128: "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim embedding_size "
        "max_position_embeddings n_positions n_ctx v_head_dim qk_nope_head_dim "
        "max_source_positions max_target_positions",
        64: "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim "
        "encoder_ffn_dim head_dim d_kv qk_rope_head_dim query_pre_attn_scalar "
        "mamba_head_dim mamba_d_head index_head_dim hidden_dim",
        32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank "
        "moe_shared_expert_intermediate_size rotary_dim linear_key_head_dim linear_value_head_dim",
        16: "mamba_d_state hidden_size_per_layer_input patch_size num_mel_bins",
        8: "sliding_window attention_chunk_size window_size local_attention",
        4: "num_experts num_local_experts n_routed_experts moe_num_experts index_topk "
        "mamba_num_heads mamba_n_heads",
        2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "num_decoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_experts_per_tok linear_num_key_heads linear_num_value_heads "
        "index_n_heads eos_token_id decoder_start_token_id",
        1: "num_key_value_heads n_group topk_group first_k_dense_replace bos_token_id",
        0: "pad_token_id num_nextn_predict_layers attention_dropout hidden_dropout embd_pdrop "
        "attn_pdrop resid_pdrop dropout "
        "activation_dropout dropout_rate hidden_dropout_prob attention_probs_dropout_prob "
        "embedding_dropout mlp_dropout classifier_dropout encoder_layerdrop decoder_layerdrop "
        "residual_dropout ffn_dropout token_dropout resid_dropout embed_dropout",
        VOCABULARY: "vocab_size vocab_size_per_layer_input",
        48: "image_size",
        0.2: "initializer_range init_std",
    }.items()
    for name in names.split()
}  # fmt: skip

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
MLA = {"num_key_value_heads": 2}  # of multi-head latent attention each head has its own keys
ALTERED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
         "glm_moe_dsa", "minicpm3", "youtu", "diffllama"), MLA,
    ),
    "llama4_text": {"num_hidden_layers": 4},  # each fourth layer attends without chunks
    "mamba2": {"num_heads": 4, "head_dim": 64},
    "ernie4_5_moe": {"moe_k": 2},
    "reformer": {"is_decoder": True},
    "codegen": {"n_head": 4, "n_embd": 256},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), ROPE),
    "t5": {"decoder_start_token_id": 0},
    "qwen3_next": {"num_hidden_layers": 4},  # each fourth layer attends
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3},
    "falcon_h1": {"mamba_d_ssm": 256},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "roberta": {"pad_token_id": 1}, "camembert": {"pad_token_id": 1},
}  # fmt: skip
# whose sdpa loses something in 5.17: the softcap, the causal mask, the positions' bias
NOT_BY_SDPA = ("gemma2", "vaultgemma", "doge", "umt5")
MOST_PARAMETERS = 3_000_000

MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
AUTO = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "speech": transformers.AutoModelForSpeechSeq2Seq,
    "image": transformers.AutoModelForImageClassification,
}


def config_of(kind: str) -> Any:
    """A small config of the model type `kind`."""
    made = CONFIG_MAPPING[kind]
    defaults = made()
    small = {
        k: x for k, v in SMALL.items() if (x := _like(getattr(defaults, k, None), v)) is not None
    }
    return made(**{**small, **ALTERED.get(kind, {})})


def _like(default: Any, value: Any) -> Any:
    """`value` in the type that the config's default has; None for what it does not have."""
    return type(default)(value) if type(default) in (int, float) else None


def model_of(
    kind: str,
    task: str = "causal",
    dtype: torch.dtype = torch.float32,
    implementation: str | None = None,
) -> Any:
    """A random model of type `kind`; without an `implementation` of attention with the one that
    ours must equal. Raises where it cannot be made small."""
    config = config_of(kind)
    config._experts_implementation = "eager"  # the others take no float64

    def make(name: str) -> Any:
        return AUTO[task].from_config(copy.deepcopy(config), attn_implementation=name)

    with torch.device("meta"):
        model = make("eager")
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{kind}: {size} parameters")
    torch.manual_seed(0)
    by_sdpa = model._supports_sdpa and kind not in NOT_BY_SDPA
    return make(implementation or ("sdpa" if by_sdpa else "eager")).to(dtype).eval()
