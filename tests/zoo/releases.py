"""Numbers of released models, for config classes of transformers whose defaults make no model.

Only what the class lacks or has wrongly: the rest is its default. The sizes are those for which the repository named
behind it is known; they were not read from its ``config.json`` again, and serve for shares of bytes alone.
"""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 50000.0}
_COMPASS = {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}}
_BLOOM = {"hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880}
_LFM2_ATTENTION = (2, 6, 10, 14, 18, 21)

# fmt: off
RELEASES: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27,
                                     "num_attention_heads": 16, "intermediate_size": 4304, "image_size": 364,
                                     "patch_size": 14}},  # CohereLabs/aya-vision-8b
    "bloom": _BLOOM,  # bigscience/bloom-7b1
    "chameleon": {"vocabulary_map": {"<image>": 8711, "IMGIMGBS00": 4, "IMGIMGBT01": 5}},  # facebook/chameleon-7b
    "cohere_compass": {"text_config": {"model_type": "cohere_compass_text", **_COMPASS}},
    "cohere_compass_text": _COMPASS,
    "dbrx": {"d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768, "vocab_size": 100352,
             "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0},
             "ffn_config": {"ffn_hidden_size": 10752, "hidden_size": 6144, "moe_num_experts": 16, "moe_top_k": 4}},
    # databricks/dbrx-instruct
    "dots1": {"hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 62,
              "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    # rednote-hilab/dots.llm1.inst
    "emu3": {"vocabulary_map": {"<image>": 151854, "<|visual token 000000|>": 151855, "<|visual token 000001|>": 151856,
                                "<|extra_200|>": 151846}},  # BAAI/Emu3-Chat-hf
    "glm4_moe": {"head_dim": 128}, "glm4v_moe": {"text_config": {"model_type": "glm4v_moe_text", "head_dim": 128}},
    # zai-org/GLM-4.5-Air, zai-org/GLM-4.5V
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
                                         "vocab_size_per_layer_input": 0}},
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128167},
    # tencent/Hunyuan-7B-Instruct
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8, "intermediate_size": 3072, "num_experts": 64,
                       "moe_topk": 8, "vocab_size": 128167},  # tencent/Hunyuan-A13B-Instruct
    "hunyuan_vl": {"text_config": {"model_type": "hunyuan_vl_text", "head_dim": 128}},  # tencent/HunyuanOCR
    "lfm2_moe": {"layer_types": ["full_attention" if n in _LFM2_ATTENTION else "conv" for n in range(24)],
                 "num_hidden_layers": 24},  # LiquidAI/LFM2-8B-A1B
    "ministral": {"head_dim": 128, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 131072},
    # mistralai/Ministral-8B-Instruct-2410
    "nemotron": {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
                 "intermediate_size": 9216, "num_hidden_layers": 32},  # nvidia/Minitron-4B-Base
    "reformer": {"is_decoder": True},  # google/reformer-crime-and-punishment
}
# fmt: on
