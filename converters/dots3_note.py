"""dots3-note: latent attention with a gate a head, in two sizes (indexed and sliding layers), and DeepSeek's experts.

The indexer is whole: every rank chooses the same tokens.
Source: transformers ``models/dots3_note/{modeling,configuration}_dots3_note.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpshard.blocks.dense import (
    channels_of,
    decoder,
    expert_channels,
    gated_mlp,
    latent_attention,
    norms,
    token_indexer,
)
from tpshard.blocks.experts import CORRECTION, mixed_layers, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "dots3_note"
MODEL_TYPES = ("dots3_note_text",)
SLIDING = {"num_attention_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "head_dim": 256,
           "qk_nope_head_dim": 192, "v_head_dim": 128}  # fmt: skip
_FULL = {"num_attention_heads": 128, "q_lora_rank": 1024, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
USUAL = {"dots3_note_text": {**_FULL, "vocab_size": 152_064, "hidden_size": 5120, "intermediate_size": 13_824,
                             "moe_intermediate_size": 1536, "num_hidden_layers": 46, "n_routed_experts": 256,
                             "index_head_dim": 128, "index_n_heads": 64}}  # fmt: skip


def table(c: Config) -> Table:
    hidden, experts = c.count("hidden_size"), c.count("n_routed_experts", "num_local_experts")
    mixed, layer = mixed_layers(c, first_dense=1), "@layers.{layer}"
    shared = c.number("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size", default=1536)
    kinds = _kinds(c)

    t = decoder(c, experts=experts)
    for of, axis, full in ((c, "heads", True), (_sliding(c, kinds), "sliding_heads", False)):
        layers = [at for at, kind in enumerate(kinds) if (kind != "sliding_attention") == full]
        if layers:
            with t.only(layers):
                _attention(t, of, f"{layer}.self_attn", axis)
    with t.only(at for at, kind in enumerate(kinds) if kind == "indexed_attention"):
        token_indexer(c, t, f"{layer}.self_attn.indexer")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    bias = c.flag("mlp_bias", default=False)
    with t.only(mixed.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=bias)
    with t.only(mixed.sparse):
        mixture(
            t, f"{layer}.mlp", experts, expert_channels(c, "moe_intermediate_size"), hidden, correction=CORRECTION,
            shared=shared_channels(shared), bias=bias,
        )  # fmt: skip
    return t


def _attention(t: Table, c: Config, at: str, axis: str) -> None:
    heads = latent_attention(c, t, at, bias=c.flag("attention_bias", default=False), axis=axis)
    t.norm(f"{at}.k_rope_only_layernorm", c.count("qk_rope_head_dim"))
    t.linear(f"{at}.g_proj", heads.each(), c.count("hidden_size"), role="attn_gate")


def _kinds(c: Config) -> list[str]:
    """What attention every layer has; configs of the first releases call the indexed ones full."""
    count, sliding = c.count("num_hidden_layers"), c.flag("use_sliding_window", default=True)
    full = "indexed_attention" if c.flag("use_dsa", default=True) else "full_attention"
    if c.get("layer_types") is None:
        return [full if not sliding or at < 2 or at % 4 == 1 else "sliding_attention" for at in range(count)]
    renamed = c.get("use_dsa") is not None or c.get("per_layer_config") is None
    return [
        full if renamed and kind in ("full_attention", "indexed_attention") else kind
        for kind in c.listed("layer_types", count)
    ]


def _sliding(c: Config, kinds: list[str]) -> Config:
    """The config of the sliding layers: ``per_layer_config``, or keys that start with ``swa_``."""
    by_layer = c.get("per_layer_config")
    own = next((by_layer[key] for key in by_layer or () if kinds[int(key)] == "sliding_attention"), None)
    if not isinstance(own, Mapping):
        own = {key: c.get(f"swa_{key}", default=usual) for key, usual in SLIDING.items()}
        rope = own["head_dim"] - own["qk_nope_head_dim"]
        own["qk_rope_head_dim"] = c.get("swa_qk_rope_head_dim", default=rope)
    return Config({**c.values, **own})
