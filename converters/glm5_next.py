"""GLM-5.3: Kimi's delta attention and latent attention with an indexer over pools of keys, several residual streams.

No position is rotated into queries or keys. Source: transformers ``models/glm5_next/modeling_glm5_next.py``, names on
disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config
from tpshard.blocks.dense import channels_of, decoder, expert_channels, gated_mlp, norms, query_latent, token_indexer
from tpshard.blocks.experts import CORRECTION, mixed_layers, mixture, shared_channels
from tpshard.blocks.mixers import kimi_delta_attention, layers_of
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "glm5_next"
USUAL = {
    "glm5_next_text": {
        "vocab_size": 154_880, "hidden_size": 4096, "intermediate_size": 12_288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 45, "num_attention_heads": 64, "n_shared_experts": 1, "n_routed_experts": 288,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 256, "qk_nope_head_dim": 256, "index_head_dim": 128,
        "index_n_heads": 32, "linear_head_dim": 128, "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "hc_mult": 4,
        "index_kpool": 16,
    },
}  # fmt: skip
MODEL_TYPES = ("glm5_next", *USUAL)
STREAMS = "every rank has all residual streams"
POOLS = "every rank chooses the same pools of keys"


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return _text(c)
    t = Table(0, prefixes=MODEL)
    include_language(t, language_config(c, "text_config", model_type="glm5_next_text"))
    include_tower(t, part_of(c, "vision_config", model_type="glm5_next_vision"), "visual")
    return t


def _text(c: Config) -> Table:
    hidden, count, layer = c.count("hidden_size"), c.count("n_routed_experts", "num_local_experts"), "@layers.{layer}"
    mixed = mixed_layers(c, first_dense=1)

    t = decoder(c, experts=count)
    types, at = c.listed("layer_types", t.layers), f"{layer}.self_attn"
    with t.only(layers_of(types, "linear_attention")):
        heads = Units("linear_heads", c.count("linear_num_heads"), noun="delta heads")
        kernel = c.count("linear_conv_kernel_dim")
        kimi_delta_attention(
            t, at, heads, c.count("linear_head_dim"), hidden, a_log=(heads.each(),), low_rank=True, kernel=kernel
        )
    with t.only(layers_of(types, "indexed_attention")):
        _latent(c, t, at, hidden)
    kinds = c.get("indexer_types", default=["full"] * t.layers)
    with t.only(layers_of(types, "indexed_attention") & layers_of(kinds, "full")):
        token_indexer(c, t, f"{at}.indexer")
        size = c.count("index_head_dim")
        t.whole(f"{at}.indexer.index_kpool_compress_ape", c.count("index_kpool"), size, why=POOLS)
        t.whole(f"{at}.indexer.index_kpool_compress_gate", size, hidden, why=POOLS)
    _streams(t, c, layer, hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.only(mixed.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    with t.only(mixed.sparse):
        shared = shared_channels(c.number("n_shared_experts", default=1) * c.count("moe_intermediate_size"))
        ffn = expert_channels(c, "moe_intermediate_size")
        mixture(t, f"{layer}.mlp", count, ffn, hidden, correction=CORRECTION, shared=shared)
    return t


def _latent(c: Config, t: Table, at: str, hidden: int) -> None:
    """Latent attention whose heads may have no rotated part."""
    heads = Units("heads", c.count("num_attention_heads"), noun="attention heads")
    nope, rope, value = c.count("qk_nope_head_dim"), c.number("qk_rope_head_dim"), c.count("v_head_dim")
    latent, bias = c.count("kv_lora_rank"), c.flag("attention_bias", default=False)
    t.linear(f"{at}.q_b_proj", heads.each(nope + rope), query_latent(c, t, at, bias=bias), role="q_b")
    t.linear(f"{at}.kv_a_proj_with_mqa", latent + rope, hidden, role="kv_a", bias=bias)
    t.norm(f"{at}.kv_a_layernorm", latent)
    t.linear(f"{at}.kv_b_proj", heads.each(nope + value), latent, role="kv_b")
    t.linear(f"{at}.o_proj", hidden, heads.each(value), role="o", bias=bias)


def _streams(t: Table, c: Config, layer: str, hidden: int) -> None:
    """What mixes the residual streams around attention and feed-forward."""
    count = c.count("hc_mult")
    mixed = count * (count + 2)
    for what in ("attn", "ffn"):
        t.whole(f"{layer}.hc_{what}_fn", mixed, count * hidden, why=STREAMS)
        t.whole(f"{layer}.hc_{what}_base", mixed, why=STREAMS)
        t.whole(f"{layer}.hc_{what}_scale", 3, why=STREAMS)
