"""Tiny values for the fields of transformers' config classes, by name.

They differ from each other where they can, so that a cut along the wrong axis changes a shape, and degrees 2, 4
and 8 divide the query heads, 2 the KV heads.
"""

from __future__ import annotations

VOCABULARY = 320

# fmt: off
_NAMES: dict[object, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    64: "hidden_size d_model n_embd emb_dim embed_dim dim hidden_dim lru_width",
    160: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff dff dim_ff d_inner ffn_hidden_size "
         "feed_forward_size intermediate_size_mlp dense_intermediate_size ffn_intermediate_size mlp_dim",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
       "num_decoder_layers num_blocks depth num_key_value_heads num_kv_heads swa_num_key_value_heads "
       "encoder_num_key_value_heads decoder_num_key_value_heads num_global_key_value_heads num_experts_per_tok "
       "moe_topk top_k_experts moe_k moe_top_k mamba_n_groups n_groups mamba_ngroups type_vocab_size n_group",
    8: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
       "num_encoder_attention_heads num_decoder_attention_heads attention_heads swa_num_attention_heads "
       "encoder_num_attention_heads decoder_num_attention_heads num_experts n_routed_experts num_local_experts "
       "moe_num_experts qk_rope_head_dim sliding_window sliding_window_size attention_window_size local_attention "
       "window_size mamba_n_heads mamba_num_heads n_mamba_heads mamba_chunk_size chunk_size linear_num_value_heads "
       "linear_num_heads index_head_dim indexer_head_dim rotary_dim",
    16: "head_dim swa_head_dim kv_channels dim_head d_head d_kv attention_head_size qk_nope_head_dim mamba_d_state "
        "state_size ssm_state_size mamba_d_head mamba_head_dim mamba_headdim linear_key_head_dim linear_head_dim "
        "block_size",
    48: "moe_intermediate_size expert_ffn_hidden_size q_lora_rank",
    56: "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
        "shared_experts_intermediate_size",
    32: "kv_lora_rank num_buckets relative_attention_num_buckets",
    12: "v_head_dim linear_value_head_dim",
    128: "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx max_target_positions "
         "max_encoder_position_embeddings max_decoder_position_embeddings context_length "
         "original_max_position_embeddings",
    4: "linear_num_key_heads index_n_heads indexer_n_heads",
    6: "index_topk",
    40: "embedding_size",
}
SIZES: dict[str, int | float | bool] = {
    name: value for value, names in _NAMES.items() for name in names.split() if isinstance(value, int)
}
_DROPOUTS = (
    "attention_dropout hidden_dropout_prob attention_probs_dropout_prob dropout hidden_dropout "
    "activation_dropout resid_pdrop embd_pdrop attn_pdrop emb_pdrop residual_dropout embedding_dropout "
    "resid_dropout embed_dropout encoder_layerdrop decoder_layerdrop layerdrop classifier_dropout "
    "router_jitter_noise input_jitter_noise mlp_dropout dropout_rate dropout_p summary_first_dropout "
    "summary_last_dropout local_attention_probs_dropout_prob lsh_attention_probs_dropout_prob drop_path_rate "
    "projector_dropout feat_proj_dropout final_dropout speech_encoder_dropout"
)
SIZES |= dict.fromkeys(_DROPOUTS.split(), 0.0)
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "forced_eos_token_id": 2,
          "topk_group": 1, "num_mtp_layers": 1, "num_nextn_predict_layers": 1, "use_cache": False}

_OFF = (
    "n_inner sliding_window q_lora_rank num_kv_heads kv_lora_rank forced_eos_token_id sep_token_id "
    "moe_intermediate_size window_size moe_shared_expert_intermediate_size num_experts num_local_experts "
    "num_experts_per_tok num_global_key_value_heads embedding_size decoder_vocab_size lru_width top_k_experts "
    "ffn_hidden_size d_head swa_head_dim indexer_head_dim indexer_n_heads classifier_dropout num_blocks "
    "original_max_position_embeddings shared_intermediate_size shared_expert_intermediate_size "
    "encoder_num_key_value_heads n_group topk_group num_buckets"
)
OFF_WHEN_NONE = frozenset(_OFF.split())
"""Fields whose default None means that the feature is off; they stay None."""

IMAGES: dict[str, int] = {"image_size": 32, "patch_size": 8}
AT_MOST: dict[str, int] = {
    "num_position_embeddings": 64, "out_hidden_size": 64, "projection_dim": 48, "num_mel_bins": 16,
    "max_source_positions": 32, "feature_size": 16, "input_feat_size": 16, "n_mel_bins": 16, "posemb_grid_size": 8,
    "text_hidden_size": 64,
}
"""Fields that only towers have; they are made smaller and never larger."""

LAYER_INDICES: dict[str, tuple[int, ...]] = {
    "deepstack_visual_indexes": (0, 1), "fullatt_block_indexes": (1,), "global_attn_indexes": (1,),
}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
# fmt: on
