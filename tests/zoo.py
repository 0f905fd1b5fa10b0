"""Tiny random checkpoints for the architectures of mlx-lm, and mlx-lm's own way of running one of them.

Every entry is a config.json small enough to load in milliseconds, yet with each kind of layer of its family at least
once and windows short enough to be crossed several times. It knows nothing of weft; tests that compare weft with the
model definitions start here.
"""

import copy
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from thoroughness import ALL

mx.disable_compile()  # on a CPU MLX calls the C++ compiler, which weft never lets it do
VOCABULARY = 128
WINDOW = 12
Config = dict[str, Any]

# mlx-lm takes from a config the fields its ModelArgs names and drops the rest, so families may share these.
DENSE: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
MIXTURE: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
LATENT: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# Recurrent key widths are multiples of 32, for mlx-lm's Metal kernels walk a state in steps of 32.
DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
    "num_hidden_layers": 4,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
MAMBA2: Config = {
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "ssm_state_size": 32,
    "mamba_d_state": 32,
    "conv_kernel": 4,
    "mamba_d_conv": 4,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.0, 100.0],
}
YARN: Config = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LONGROPE: Config = {
    "type": "longrope",
    "short_factor": 1.0,
    "long_factor": 2.0,
    "short_mscale": 1.1,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 32,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def _config(model_type: str, *shared: Config, **own: Any) -> Config:
    """A config of the family `model_type`: the dense fields, then `shared`, then what is its `own`."""
    config = {**DENSE, "model_type": model_type}
    for fields in shared:
        config |= fields
    return copy.deepcopy(config | own)


def _nested(model_type: str, text: Config, **own: Any) -> Config:
    """A config that keeps its language model under text_config, as vision families do."""
    return {"model_type": model_type, "text_config": text, **own}


ARCHITECTURES: dict[str, Config] = {
    # --- attention over everything -------------------------------------------------------------------------------
    "llama": _config("llama"),
    "mistral": _config("mistral"),
    "qwen2": _config("qwen2"),
    "qwen3": _config("qwen3"),
    "qwen3_moe": _config("qwen3_moe", MIXTURE, mlp_only_layers=[0]),
    "qwen2_moe": _config("qwen2_moe", MIXTURE),
    "mixtral": _config("mixtral", MIXTURE),
    "phi3": _config("phi3", partial_rotary_factor=0.5),
    "phimoe": _config("phimoe", MIXTURE, max_position_embeddings=64, rope_scaling=LONGROPE),
    "phi": _config("phi", partial_rotary_factor=0.5),
    "gemma": _config("gemma"),
    "gemma2": _config("gemma2", query_pre_attn_scalar=16),
    "cohere": _config("cohere", logit_scale=1.0, use_qk_norm=True),
    "starcoder2": _config("starcoder2"),
    "stablelm": _config("stablelm", use_qkv_bias=True, partial_rotary_factor=0.5, qk_layernorm=True),
    "internlm2": _config("internlm2", rope_scaling={"type": "dynamic", "factor": 2.0}),
    "internlm3": _config("internlm3", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    "olmo2": _config("olmo2"),
    "olmoe": _config("olmoe", MIXTURE),
    "granite": _config(
        "granite", logits_scaling=2.0, attention_multiplier=0.25, embedding_multiplier=2.0, residual_multiplier=0.8
    ),
    "granitemoe": _config(
        "granitemoe",
        MIXTURE,
        logits_scaling=2.0,
        attention_multiplier=0.25,
        embedding_multiplier=2.0,
        residual_multiplier=0.8,
    ),
    "helium": _config("helium"),
    "exaone": _config("exaone", num_layers=2),
    "smollm3": _config("smollm3", no_rope_layers=[1, 0]),
    "seed_oss": _config("seed_oss", attention_bias=True),
    "ernie4_5": _config("ernie4_5", use_bias=True),
    "ernie4_5_moe": _config(
        "ernie4_5_moe",
        MIXTURE,
        use_bias=False,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=1,
        moe_num_shared_experts=1,
    ),
    "hunyuan_v1_dense": _config("hunyuan_v1_dense"),
    "hunyuan": _config(
        "hunyuan",
        MIXTURE,
        num_hidden_layers=4,
        moe_topk=2,
        num_shared_expert=1,
        use_mixed_mlp_moe=True,
        use_qk_norm=True,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
    ),
    "glm": _config("glm"),
    "glm4": _config("glm4", partial_rotary_factor=0.5),
    "glm4_moe": _config(
        "glm4_moe",
        MIXTURE,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        rope_scaling=None,
        n_routed_experts=8,
        n_group=2,
    ),
    "minimax": _config("minimax", MIXTURE, rotary_dim=8),
    "dots1": _config("dots1", MIXTURE, num_hidden_layers=2),
    "deepseek": _config("deepseek", MIXTURE),
    "bailing_moe": _config("bailing_moe", MIXTURE, use_qk_norm=True),
    "nemotron": _config("nemotron", hidden_act="relu2", partial_rotary_factor=0.5),
    "apertus": _config("apertus", post_norm=False, qk_norm=True),
    "nanochat": _config("nanochat", num_key_value_heads=2),
    "gpt2": _config("gpt2", n_ctx=512, n_embd=64, n_head=4, n_layer=2, n_positions=512),
    "gpt_bigcode": _config("gpt_bigcode", n_embd=64, n_head=4, n_layer=2, n_positions=512, n_inner=96),
    "gpt_neox": _config("gpt_neox", rotary_emb_base=10000, rotary_pct=0.5),
    "mimo": _config("mimo", num_nextn_predict_layers=0),
    "minicpm": _config("minicpm", dim_model_base=32, scale_depth=1.4, scale_emb=2.0),
    "solar_open": _config("solar_open", MIXTURE, partial_rotary_factor=0.5, use_qk_norm=True),
    "telechat3": _config("telechat3"),
    "talkie": _config("talkie", num_key_value_heads=4),
    "Klear": _config("Klear", MIXTURE),
    "mistral3": _nested("mistral3", _config("mistral")),
    "pixtral": _nested("pixtral", _config("mistral")),
    "qwen2_vl": _nested("qwen2_vl", _config("qwen2")),
    "qwen3_vl": _nested("qwen3_vl", _config("qwen3")),
    "qwen3_vl_moe": _nested("qwen3_vl_moe", _config("qwen3_moe", MIXTURE)),
    "llama4_text": _config(
        "llama4_text", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], use_qk_norm=True, intermediate_size_mlp=96
    ),
    "plamo": _config("plamo", n_shared_head=2),
    "qwen": _config("qwen", kv_channels=16, intermediate_size=192),
    "gptj": _config("gptj", n_embd=64, n_head=4, n_layer=2, n_positions=512, rotary_dim=8),
    "phixtral": _config("phixtral", MIXTURE, num_vocab=VOCABULARY, model_dim=64, num_heads=4, num_layers=2, rotary_dim=8),
    "lille-130m": _config("lille-130m", block_size=512, n_embd=64, n_head=4, n_kv_heads=2, n_layer=2),
    "dbrx": _config(
        "dbrx",
        d_model=64,
        n_layers=2,
        n_heads=4,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "openelm": _config(
        "openelm",
        num_transformer_layers=2,
        model_dim=64,
        ffn_dim_divisor=16,
        num_query_heads=[4, 6],
        num_kv_heads=[2, 3],
        ffn_multipliers=[1.0, 2.0],
    ),
    # --- attention that remembers layers, loops or lists of its own ------------------------------------------------
    "afm7": _config("afm7", hidden_dim=64, num_layers=4, num_kv_reuse_layers=2, num_heads=4, num_kv_heads=2),
    "nanbeige": _config("nanbeige", num_loops=2),
    "iquestloopcoder": _config("iquestloopcoder", loop_window_size=WINDOW),
    "nemotron-nas": _config(
        "nemotron-nas",
        num_hidden_layers=4,
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    ),
    # --- windows ---------------------------------------------------------------------------------------------------
    "llama_windowed": _config("llama", num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL]),
    "ministral3": _config("ministral3", num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING], rope_parameters=YARN),
    "gemma3_text": _config(
        "gemma3_text",
        num_hidden_layers=4,
        sliding_window_pattern=3,
        query_pre_attn_scalar=16,
        rope_local_base_freq=1000.0,
    ),
    "gemma3": _nested(
        "gemma3",
        _config("gemma3_text", num_hidden_layers=3, sliding_window_pattern=3, query_pre_attn_scalar=16),
        vocab_size=VOCABULARY,
    ),
    "gemma3n": _nested(
        "gemma3n",
        _config(
            "gemma3n_text",
            num_hidden_layers=6,
            layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=16,
            rope_local_base_freq=1000.0,
            final_logit_softcapping=30.0,
            activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
            altup_num_inputs=3,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=8,
        ),
    ),
    "gemma4_text": _config(
        "gemma4_text",
        num_hidden_layers=6,
        layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
        global_head_dim=32,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
    ),
    "gemma4": _nested(
        "gemma4",
        _config(
            "gemma4_text",
            num_hidden_layers=3,
            layer_types=[SLIDING, FULL, SLIDING],
            global_head_dim=32,
            num_kv_shared_layers=1,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=16,
        ),
        vocab_size=VOCABULARY,
    ),
    "gemma4_moe": _config(
        "gemma4_text",
        MIXTURE,
        num_hidden_layers=4,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        top_k_experts=2,
    ),
    "gpt_oss": _config("gpt_oss", MIXTURE, num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL]),
    "cohere2": _config("cohere2", num_hidden_layers=4, sliding_window_pattern=4, logit_scale=1.0),
    "olmo3": _config("olmo3", num_hidden_layers=4, layer_types=[SLIDING, SLIDING, SLIDING, FULL]),
    "exaone4": _config("exaone4", num_hidden_layers=4, sliding_window_pattern="LLLG", rope_scaling=None),
    "exaone_moe": _config(
        "exaone_moe",
        MIXTURE,
        num_hidden_layers=4,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        is_moe_layer=[False, True, True, True],
    ),
    "step3p5": _config(
        "step3p5",
        num_hidden_layers=4,
        num_attention_groups=2,
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 2},
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=32,
        share_expert_dim=32,
        moe_layers_enum="1,2,3",
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
    ),
    "mimo_v2_flash": _config(
        "mimo_v2_flash",
        MIXTURE,
        num_hidden_layers=4,
        hybrid_layer_pattern=[0, 1, 1, 0],
        moe_layer_freq=[0, 1, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        layernorm_epsilon=1e-5,
        swa_rope_theta=1000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        v_head_dim=24,
        swa_head_dim=16,
        swa_v_head_dim=24,
        partial_rotary_factor=0.5,
        attention_value_scale=0.7,
    ),
    "afmoe": _config("afmoe", MIXTURE, num_hidden_layers=4, num_dense_layers=1, layer_types=[SLIDING, SLIDING, SLIDING, FULL]),
    "mellum": _config(
        "mellum",
        MIXTURE,
        num_hidden_layers=4,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
            FULL: {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "laguna": _config(
        "laguna",
        MIXTURE,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        num_attention_heads_per_layer=[4, 6, 6, 4],
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
            FULL: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "muse_glimmer": _config("muse_glimmer", num_hidden_layers=4, output_multiplier=1.0, qk_scale_factor=2.0),
    "spark2_5": _config(
        "spark2_5",
        num_hidden_layers=4,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
            FULL: {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": _nested(
        "llama4",
        _config(
            "llama4_text",
            MIXTURE,
            num_hidden_layers=4,
            attention_chunk_size=WINDOW,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=96,
            num_experts_per_tok=1,
            rope_scaling=None,
            use_qk_norm=True,
            floor_scale=8,
        ),
    ),
    # --- latent attention --------------------------------------------------------------------------------------------
    "deepseek_v2": _config("deepseek_v2", MIXTURE, LATENT, rope_scaling=YARN),
    "deepseek_v3": _config("deepseek_v3", MIXTURE, LATENT, n_routed_experts=8, n_group=2, num_hidden_layers=3),
    "deepseek_v32": _config("deepseek_v32", MIXTURE, LATENT, index_head_dim=16, index_n_heads=2, index_topk=16),
    "glm_moe_dsa": _config(
        "glm_moe_dsa",
        MIXTURE,
        LATENT,
        index_head_dim=16,
        index_n_heads=2,
        index_topk=16,
        moe_layer_freq=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "glm4_moe_lite": _config("glm4_moe_lite", MIXTURE, LATENT, num_nextn_predict_layers=0),
    "mistral4": _config("mistral4", MIXTURE, LATENT, rope_parameters=YARN),
    "minicpm3": _config(
        "minicpm3",
        LATENT,
        dim_model_base=32,
        scale_depth=1.4,
        scale_emb=2.0,
        rope_scaling=LONGROPE,
        num_key_value_heads=4,
    ),
    "kimi_vl": _nested("kimi_vl", _config("deepseek_v3", MIXTURE, LATENT)),
    "kimi_k25": _nested("kimi_k25", _config("deepseek_v3", MIXTURE, LATENT)),
    "youtu_llm": _config("youtu_llm", LATENT),
    "longcat_flash": _config(
        "longcat_flash",
        MIXTURE,
        LATENT,
        attention_method="MLA",
        zero_expert_type="identity",
        zero_expert_num=2,
        ffn_hidden_size=96,
        moe_topk=2,
        expert_ffn_hidden_size=32,
        num_layers=2,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
    ),
    "longcat_flash_ngram": _config(
        "longcat_flash_ngram",
        MIXTURE,
        LATENT,
        zero_expert_num=2,
        ffn_hidden_size=96,
        moe_topk=2,
        expert_ffn_hidden_size=32,
        num_layers=2,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        ngram_vocab_size_ratio=2,
        emb_neighbor_num=3,
        emb_split_num=2,
    ),
    "minimax_m3_vl": _nested(
        "minimax_m3_vl",
        _config(
            "minimax_m3",
            MIXTURE,
            num_hidden_layers=3,
            dense_intermediate_size=96,
            mlp_layer_types=["dense", "sparse", "sparse"],
            layer_types=[FULL, "sparse_attention", "sparse_attention"],
            index_n_heads=2,
            index_head_dim=16,
            index_block_size=4,
            index_topk_blocks=3,
        ),
    ),
    "deepseek_v41": _config(
        "deepseek_v41",
        MIXTURE,
        num_hidden_layers=3,
        head_dim=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        o_groups=2,
        o_lora_rank=16,
        compress_ratios=[0, 4, 4],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1],
        index_n_heads=2,
        index_head_dim=32,
        index_topk=6,
        hc_mult=2,
        hc_sinkhorn_iters=3,
    ),
    # --- recurrent, and hybrids of recurrence and attention ----------------------------------------------------------
    "qwen3_next": _config("qwen3_next", MIXTURE, DELTA),
    "qwen3_5": _nested("qwen3_5", _config("qwen3_5_text", DELTA)),
    "qwen3_5_moe": _nested("qwen3_5_moe", _config("qwen3_5_moe_text", MIXTURE, DELTA)),
    "olmo_hybrid": _config(
        "olmo_hybrid",
        DELTA,
        layer_types=["linear_attention", "linear_attention", FULL, "linear_attention"],
        linear_allow_neg_eigval=True,
        linear_num_key_heads=4,
        rope_parameters=None,
    ),
    "kimi_linear": _config(
        "kimi_linear",
        MIXTURE,
        LATENT,
        num_hidden_layers=4,
        head_dim=16,
        model_max_length=512,
        linear_attn_config={
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    ),
    "kimi_k3": _nested(
        "kimi_k3",
        _config(
            "kimi_linear",
            MIXTURE,
            LATENT,
            num_hidden_layers=4,
            activation_situ_beta=1.0,
            activation_situ_linear_beta=1.0,
            attn_res_block_size=2,
            mla_use_output_gate=True,
            linear_attn_config={
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "num_heads": 2,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
        ),
    ),
    "bailing_moe_v3": _config(
        "bailing_hybrid",
        MIXTURE,
        LATENT,
        architectures=["BailingMoeV3ForCausalLM"],
        num_hidden_layers=4,
        layer_group_size=3,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=2,
    ),
    "bailing_hybrid": _config(
        "bailing_hybrid", MIXTURE, LATENT, num_hidden_layers=4, layer_group_size=3, group_norm_size=2, head_dim=16
    ),
    "bailing_moe_linear": _config(
        "bailing_moe_linear",
        MIXTURE,
        num_hidden_layers=4,
        layer_group_size=3,
        group_norm_size=2,
        use_qk_norm=True,
        moe_router_enable_expert_bias=True,
        score_function="sigmoid",
    ),
    "nemotron_h": _config(
        "nemotron_h", MIXTURE, MAMBA2, hybrid_override_pattern=["M", "-", "M", "*", "E", "M"], moe_latent_size=32
    ),
    "falcon_h1": _config("falcon_h1", MAMBA2, mamba_rms_norm=True),
    "granitemoehybrid": _config(
        "granitemoehybrid",
        MIXTURE,
        MAMBA2,
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        embedding_multiplier=2.0,
        attention_multiplier=0.25,
        logits_scaling=2.0,
        residual_multiplier=0.8,
    ),
    "lfm2": _config(
        "lfm2",
        num_hidden_layers=4,
        conv_bias=True,
        conv_L_cache=3,
        block_dim=64,
        block_ff_dim=96,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
        layer_types=["conv", "conv", FULL, "conv"],
    ),
    "lfm2-vl": _nested(
        "lfm2-vl",
        _config(
            "lfm2",
            conv_bias=False,
            conv_L_cache=3,
            block_dim=64,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", FULL],
        ),
    ),
    "lfm2_moe": _config(
        "lfm2_moe",
        MIXTURE,
        num_hidden_layers=4,
        conv_bias=False,
        conv_L_cache=3,
        num_dense_layers=1,
        use_expert_bias=True,
        layer_types=["conv", "conv", FULL, "conv"],
    ),
    "gear": _config("gear", num_hidden_layers=4, layer_types=["conv_mixer", SLIDING, FULL, "conv_mixer"], conv_L_cache=3),
    "baichuan_m1": _config("baichuan_m1", num_hidden_layers=3, sliding_window_layers=[1], conv_window=2),
    "mamba": _config(
        "mamba",
        state_size=16,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=4,
    ),
    "falcon_mamba": _config("falcon_mamba", state_size=16, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4),
    "mamba2": _config("mamba2", MAMBA2, num_heads=4, state_size=32, time_step_rank="auto"),
    "jamba": _config(
        "jamba",
        MIXTURE,
        num_hidden_layers=3,
        attn_layer_offset=1,
        attn_layer_period=3,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_expand=2,
    ),
    "plamo2": _config(
        "plamo2",
        num_hidden_layers=4,
        hidden_size_per_head=16,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_num_heads=4,
        mamba_step=2,
        attention_window_size=WINDOW,
        full_attention_idx=[3],
    ),
    "rwkv7": _config(
        "rwkv7",
        num_hidden_layers=3,
        head_dim=32,
        a_low_rank_dim=8,
        v_low_rank_dim=8,
        gate_low_rank_dim=8,
        decay_low_rank_dim=8,
    ),
    "recurrent_gemma": _config(
        "recurrent_gemma",
        num_hidden_layers=4,
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=WINDOW,
        block_types=["recurrent", "recurrent", "attention"],
    ),
}

# The model files of mlx-lm, in any of its versions that weft works with, that are not in the table, and why.
ABSENT: dict[str, str] = {
    "bitnet": "its weights are packed ternary numbers",
    "muse_spark": "its kernels exist for Metal only",
    "muse_spark_open": "mlx-lm 0.32.1's name of muse_spark",
    "olmo": "needs the package ai2-olmo",
    "phi3small": "its block-sparse layers add a boolean mask to the scores and so see the future",
    "plamo3": "its mask is one token wider than its cache, so its answer depends on where chunks end",
    "prism_hadamard_qwen35": "its weights are packed two-bit numbers",
}

# --- weights -------------------------------------------------------------------------------------------------------

# Norms that multiply by 1 + weight although mlx-lm starts the weight at one: their weights belong around zero.
PLUS_ONE_NORMS = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "nemotron"})
# Families that multiply embeddings by sqrt(hidden size); with tied embeddings the last token would drown the rest.
SCALED_EMBEDDINGS = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text", "gemma4_moe"})
# Parameters that mlx-lm starts at zero and that are near one in a trained model.
AROUND_ONE = re.compile(r"^rwkv7 .*g_norm\.weight$|^cohere .*[qk]_norm\.weight$|correct_output_scale$")
# Uniform ranges by "family path", first match wins. Decays make a head forget between a half and ten per cent a token:
# the state is still alive after a hundred tokens, and yet no head is a plain sum.
RANGES: tuple[tuple[str, float, float], ...] = (
    (r"^bailing_moe_v3 .*A_log$", 0.0, 0.7),  # its gate is exp(-5 · sigmoid(exp(A_log) · (a + dt_bias)))
    (r"^bailing_moe_v3 .*dt_bias$", -5.0, -3.0),
    (r"A_log$", math.log(0.02), math.log(0.3)),
    (r"dt_bias$|dt_proj\.bias$", -2.5, -0.5),
    (r"dt_proj\.weight$", -0.3, 0.3),
    (r"\.(in_proj_ba?|in_proj_a|a_proj|b_proj|f_proj|f_b_proj)\.weight$", -0.15, 0.15),  # gates of the delta rule
    (r"^rwkv7 .*w_lora\.lora\.2\.bias$", -5.0, -3.0),
    (r"^rwkv7 .*\.(x_[rwkvag]|k_a|k_k)$", 0.1, 0.9),
    (r"recurrent_param$", -6.0, -4.0),
)
GAIN = 2.0  # times 1/sqrt(fan in): layers speak louder than the embedding, so greedy decoding does not stick


# fmt: off
PROMISED = (
    "llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma3_text", "gemma3n", "gemma4_text",
    "gpt_oss", "nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba", "mamba2", "jamba", "plamo2",
    "kimi_linear", "rwkv7", "recurrent_gemma", "deepseek_v3", "glm4_moe_lite",
)
# One or two for each other way of holding a row, and for caches of an unusual kind.
ODD = ("gear", "gemma2", "llama4", "deepseek_v32", "internlm2", "gpt_bigcode", "phi", "stablelm", "longcat_flash", "mistral4")
# fmt: on
# How weights are packed: bits, numbers that share a scale, and mlx's mode. In "mixed" every other layer has eight bits.
SCHEMES = {
    "4bit-32": (4, 32, "affine"),
    "4bit-64": (4, 64, "affine"),
    "8bit": (8, 32, "affine"),
    "mixed": (4, 32, "affine"),
    "mxfp4": (4, 32, "mxfp4"),
}
# An architecture with packed weights has a name of two parts. `make test` looks at each scheme on a few families of different
# kinds, `make conformance` at all schemes on these, and at four bits on everything.
# fmt: off
PACKED_FAMILIES = (
    "llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma3_text", "gemma4_text", "gpt_oss", "nemotron_h",
    "falcon_h1", "granitemoehybrid", "lfm2", "deepseek_v3",
)
# fmt: on
PACKED = tuple(
    f"{name}:{scheme}"
    for place, name in enumerate(PACKED_FAMILIES)
    for number, scheme in enumerate(SCHEMES)
    if ALL or number == place % len(SCHEMES) or name == "qwen3_5"
)
# mlx-lm can not pack the first one's fused layers, divides the packed head of the second by its length when it is loaded, and
# reads the shapes of weights in the forward of the third.
UNPACKABLE = ("afm7", "baichuan_m1", "kimi_k3")
if ALL:
    PACKED += tuple(f"{name}:4bit-32" for name in ARCHITECTURES if name not in PACKED_FAMILIES + UNPACKABLE)
HOUSED = (*ARCHITECTURES, *PACKED)
# Whom the longer tests look at; `make conformance` lets them look at all.
EXAMINED = HOUSED if ALL else PROMISED + ODD + PACKED


def is_in_mlx_lm(name: str) -> bool:
    """Whether the installed mlx-lm has the architecture `name`."""
    try:
        _get_classes(ARCHITECTURES[name.partition(":")[0]])
    except ValueError:
        return False
    return True


def make_checkpoint(name: str, folder: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors (every parameter random, float32 or packed) of architecture `name` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    name, _, scheme = name.partition(":")
    config = copy.deepcopy(ARCHITECTURES[name])
    model = _build(config)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    weights = {path: _draw(rng, name, path, start) for path, start in sorted(_flat(model).items())}
    weights = _settle(model, weights)
    if scheme:
        model.load_weights(list(weights.items()), strict=False)
        config["quantization"] = _pack(model, scheme)
        weights = _flat(model)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _pack(model: nn.Module, scheme: str) -> Config:
    """Quantise a model's layers in place; returns the section of its config that says how."""
    bits, group_size, mode = SCHEMES[scheme]
    found: Config = {"bits": bits, "group_size": group_size, "mode": mode}
    packed: list[str] = []

    def how(path: str, layer: nn.Module) -> bool | Config:
        if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % group_size:
            return False
        packed.append(path)
        if scheme != "mixed" or len(packed) % 2:
            return True
        found[path] = {"bits": 8, "group_size": group_size, "mode": mode}
        return dict(found[path])

    nn.quantize(model, group_size, bits, mode=mode, class_predicate=how)
    assert packed, f"{scheme} packs nothing of it"
    return found


def greedy(model: nn.Module, prompt: list[int], n: int) -> tuple[list[int], mx.array]:
    """The `n` tokens that mlx-lm's single-stream way gives after `prompt`, and the float32 logits of each step.

    The prompt but its last token is one chunk; from there one token at a time.
    """
    cache = make_prompt_cache(model)
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=cache)
    token, tokens, steps = prompt[-1], [], []
    for _ in range(n):
        logits = model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)  # (V,)
        token = int(mx.argmax(logits).item())
        tokens.append(token)
        steps.append(logits)
    return tokens, mx.stack(steps)


def _build(config: Config) -> nn.Module:
    """The freshly initialised model of a config; a copy is handed over, for some ModelArgs edit what they are given."""
    model_class, args_class = _get_classes(config)
    model: nn.Module = model_class(args_class.from_dict(copy.deepcopy(config)))
    model.eval()
    return model


def _flat(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _draw(rng: np.random.Generator, name: str, path: str, start: mx.array) -> mx.array:
    """Random values for the parameter at `path`, of a size that keeps activations finite; `start` is what it was."""
    assert start.dtype == mx.float32, f"{name}: {path} starts as {start.dtype}"
    for pattern, low, high in RANGES:
        if re.search(pattern, f"{name} {path}"):
            return mx.array(rng.uniform(low, high, start.shape).astype(np.float32))
    centre, spread = _centre_and_spread(name, path, np.array(start))
    values = centre + spread * rng.standard_normal(start.shape)
    if name == "baichuan_m1" and path == "lm_head.weight":
        values = np.sign(values) / math.sqrt(start.shape[-1])  # rows of length one survive the division by their length
    return mx.array(values.astype(np.float32))


def _centre_and_spread(name: str, path: str, first: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation for the parameter at `path`, judged by what it starts as."""
    if AROUND_ONE.search(f"{name} {path}"):
        return 1.0, 0.1
    if "norm" in path and name in PLUS_ONE_NORMS and path.endswith("weight"):
        return 0.0, 0.1
    constant = float(first.flat[0]) if np.all(first == first.flat[0]) else 0.0
    if constant != 0.0:
        return constant, 0.1 * abs(constant)
    if "embed" in path and "proj" not in path:
        return 0.0, 0.03 if name in SCALED_EMBEDDINGS else 0.25
    if first.ndim >= 2 and not path.endswith("bias"):
        fan_in = first.shape[1] if "conv" in path else first.shape[-1]
        return 0.0, GAIN / math.sqrt(fan_in)
    return 0.0, 0.2


def _settle(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The weights after as many rounds of the family's `sanitize` as it takes until one more changes nothing.

    Loading sanitises what it reads; baichuan_m1, for one, divides the rows of its head by their length each time.
    """
    if not hasattr(model, "sanitize"):
        return weights
    for _ in range(10):
        cleaned = model.sanitize(dict(weights))
        if cleaned.keys() == weights.keys() and all(mx.array_equal(cleaned[k], weights[k]) for k in weights):
            return weights
        weights = cleaned
    raise AssertionError(f"sanitize of {type(model).__module__} does not come to rest")
