"""Mistral Large 4: latent attention without a latent for queries, an indexer, experts, Pixtral's tower; own names.

In some layers no position is rotated into the keys, and some take over the latent of an earlier layer.
Source: transformers ``models/mistral_large4/modeling_mistral_large4.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.composite import include_respelt, input_norm, projector
from tpshard.blocks.dense import (
    GATED,
    MIXTRAL,
    channels_of,
    expert_channels,
    experts,
    gated_mlp,
    norms,
    vocabulary_of,
)
from tpshard.blocks.experts import mixed_layers, shared_channels
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "mistral_large4"
USUAL = {
    "mistral_large4_text": {
        "vocab_size": 204_800, "hidden_size": 6144, "intermediate_size": 24_576, "moe_intermediate_size": 6144,
        "num_hidden_layers": 72, "num_attention_heads": 64, "n_shared_experts": 1, "n_routed_experts": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128, "index_head_dim": 128,
        "index_n_heads": 32,
    },
}  # fmt: skip
MODEL_TYPES = ("mistral_large4", *USUAL)
CHOICE = "every rank chooses the same tokens"
TOWER = {"attention.q_proj": "attention.wq", "attention.k_proj": "attention.wk", "attention.v_proj": "attention.wv",
         "attention.o_proj": "attention.wo", "feed_forward.gate_proj": "feed_forward.w1",
         "feed_forward.up_proj": "feed_forward.w3", "feed_forward.down_proj": "feed_forward.w2"}  # fmt: skip


def table(c: Config) -> Table:
    if c.model_type != "mistral_large4":
        return _text(c, "embed_tokens", GATED, "o_proj")
    text = part_of(c, "text_config", model_type="mistral_large4_text")
    tower = part_of(c, "vision_config", model_type="pixtral")
    hidden, width = text.count("hidden_size"), tower.count("hidden_size")

    t = Table(0)
    t.include(_text(text, "tok_embeddings", MIXTRAL, "wo"), ("", ""))
    t.linear("output", vocabulary_of(text), hidden, role="head")
    include_respelt(t, table_of(tower), TOWER, ("vision_encoder.", "vision_encoder."), axes="vision_", or_whole=True)
    input_norm(t, "pre_mm_projector_norm", width, bias=False)
    joined = c.count("spatial_merge_size", default=2) ** 2 * width
    t.whole("patch_merger.merging_layer.weight", width, joined, why="all it makes goes into the next matrix")
    bias = c.flag("multimodal_projector_bias", default=False)
    projector(t, "vision_language_adapter", width, hidden, hidden, bias=bias, names=("w_in", "w_out"))
    return t


def _text(c: Config, words: str, mlp: tuple[str, str, str], out: str) -> Table:
    """The language model; ``mlp`` names the matrices of dense and shared MLPs, ``out`` attention's last."""
    hidden, count, layer = c.count("hidden_size"), c.count("n_routed_experts", "num_local_experts"), "@layers.{layer}"
    mixed = mixed_layers(c, first_dense=1)

    t = Table(c.count("num_hidden_layers"), count)
    t.embedding(f"@{words}", vocabulary_of(c), hidden)
    t.norm("@norm", hidden)
    for name in ("lerope.alpha", "rotary_emb.alpha"):  # in the whole model, and where this is saved alone
        t.whole(f"@{name}", None, why="one number for a few frequencies of the positions", optional=True)
    _attention(t, c, f"{layer}.attention", out)
    with t.only(mixed.dense):
        gated_mlp(t, f"{layer}.feed_forward", channels_of(c), hidden, names=mlp)
    with t.only(mixed.sparse):
        t.linear(f"{layer}.gate", count, hidden, role="router")
        t.tensor(f"{layer}.gate.e_score_correction_bias", count, role="router_bias", optional=True)
        experts(t, f"{layer}.experts", count, expert_channels(c, "moe_intermediate_size"), hidden, names=MIXTRAL)
        t.one_of("experts", "stacked experts")
        shared = shared_channels(c.number("n_shared_experts", default=1) * c.count("moe_intermediate_size"))
        if shared is not None:
            gated_mlp(t, f"{layer}.shared_experts", shared, hidden, names=mlp, part="shared_")
    norms(t, layer, ("attention_norm", "ffn_norm"), hidden)
    return t


def _attention(t: Table, c: Config, at: str, out: str) -> None:
    hidden, layers, latent = c.count("hidden_size"), c.count("num_hidden_layers"), c.count("kv_lora_rank")
    heads = Units("heads", c.count("num_attention_heads"), noun="attention heads")
    nope, rope, value = c.count("qk_nope_head_dim"), c.count("qk_rope_head_dim"), c.count("v_head_dim")
    bias = c.flag("attention_bias", default=False)
    rotates = c.get("no_rope_layers", default=[(at + 1) % 4 for at in range(layers)])
    rotated = frozenset(at for at in range(layers) if rotates[at])
    own = frozenset(at for at, of in enumerate(c.get("kv_source_layers", default=range(layers))) if at == of)

    t.linear(f"{at}.wq", heads.each(nope + rope), hidden, role="q")
    t.linear(f"{at}.{out}", hidden, heads.each(value), role="o", bias=bias)
    for name in "sb":
        t.tensor(f"{at}.ssmax_scaling.{name}", heads.each(), role="attn_head")
    for of, beside, inside in ((rotated, rope, nope), (frozenset(range(layers)) - rotated, 0, nope + rope)):
        with t.only(of & own):
            t.linear(f"{at}.wkv_a_with_mqa", latent + beside, hidden, role="kv_a", bias=bias)
        with t.only(of):
            t.linear(f"{at}.wkv_b", heads.each(inside + value), latent, role="kv_b")
    with t.only(own):
        t.norm(f"{at}.kv_a_norm", latent)
    with t.only(_choosing(c, layers)):
        _indexer(t, c, f"{at}.indexer", hidden)


def _choosing(c: Config, layers: int) -> list[int]:
    kinds = c.get("indexer_types", default=["full"] * layers)
    return [at for at in range(layers) if kinds[at] == "full"]


def _indexer(t: Table, c: Config, at: str, hidden: int) -> None:
    heads, size = c.count("index_n_heads"), c.count("index_head_dim")
    for name, rows in (("wq_b", heads * size), ("wk", size), ("weights_proj", heads)):
        t.whole(f"{at}.{name}.weight", rows, hidden, why=CHOICE)
    for name in "sb":
        t.whole(f"{at}.ssmax_scaling.{name}", heads, why=CHOICE)
    t.norm(f"{at}.k_norm", size, bias=True)
    t.norm(f"{at}.q_input_norm", hidden, bias=True)
