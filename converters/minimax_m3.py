"""MiniMax-M3: sparse layers choose blocks of keys by an indexer, experts are Mixtral's or stacked; CLIP's tower.

The hub's names (``block_sparse_moe``, ``index_q_proj``) and those of transformers, which joins gate and up, both stand.
Source: transformers ``models/minimax_m3_vl/modeling_minimax_m3_vl.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpshard.axes import Dim, Heads
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector
from tpshard.blocks.dense import (
    MIXTRAL,
    attention,
    channels_of,
    decoder,
    expert_channels,
    experts,
    fused_mlp,
    gated_mlp,
    heads_of,
    mlp,
    norms,
)  # fmt: skip
from tpshard.blocks.experts import layers_where, shared_channels
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "minimax_m3"
USUAL = {
    "minimax_m3_vl_text": {"vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 3072, "head_dim": 128,
                           "num_hidden_layers": 60, "num_attention_heads": 64, "num_key_value_heads": 4,
                           "num_local_experts": 128, "dense_intermediate_size": 12288,
                           "shared_intermediate_size": 3072},
    "minimax_m3_vl_vision": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
                             "num_attention_heads": 16, "num_channels": 3, "patch_size": 14, "temporal_patch_size": 2,
                             "spatial_merge_size": 2},
}  # fmt: skip
MODEL_TYPES = ("minimax_m3_vl", *USUAL)
CHOOSES = "every rank chooses the blocks of keys that its heads see, by index heads that are few"


def table(c: Config) -> Table:
    return {"minimax_m3_vl": _whole, "minimax_m3_vl_text": _text, "minimax_m3_vl_vision": _vision}[c.model_type](c)


def _whole(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="minimax_m3_vl_text")
    tower = part_of(c, "vision_config", model_type="minimax_m3_vl_vision")
    hidden, width = text.count("hidden_size"), c.count("projector_hidden_size", default=6144)
    seen = tower.count("hidden_size")
    merged = tower.count("spatial_merge_size") ** 2 * hidden
    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    projector(t, "@multi_modal_projector", seen, width, hidden)
    with t.block("merge"):
        projector(t, "@patch_merge_mlp", merged, width, hidden)
    with t.block("merge, as transformers names it"):
        names = ("merge_linear_1", "merge_linear_2")
        projector(t, "@multi_modal_projector", merged, width, hidden, names=names)
    t.one_of("merge", "merge, as transformers names it")
    return t


def _vision(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    heads, size, channels = Heads("heads", count, count), hidden // count, c.count("num_channels")
    frames = c.count("temporal_patch_size")

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@embeddings.patch_embedding.weight", hidden, channels, frames, patch, patch, role="vision")
    t.norm("@pre_layrnorm", hidden, bias=True)  # spelt so
    layer = "@encoder.layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )  # fmt: skip
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("layer_norm1", "layer_norm2"), hidden, bias=True)
    return t


def _text(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=4)
    size, count = c.head_dim(heads.query_heads, default=128), c.count("num_local_experts", "num_experts")
    layers = layers_where(c, _marked(c, "mlp_layer_types", "sparse", c.get("moe_layer_freq"), usual=True))

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden)
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    _indexer(t, c, f"{layer}.self_attn", hidden)
    if layers.dense:
        with t.only(layers.dense):
            _dense(t, f"{layer}.mlp", channels_of(c, "dense_intermediate_size"), hidden)
    with t.only(layers.sparse):
        hub, stacked = f"{layer}.block_sparse_moe", f"{layer}.mlp"
        for block, at, correction in (("experts", hub, ""), ("stacked experts", stacked, "gate.")):
            with t.block(block):
                t.linear(f"{at}.gate", count, hidden, role="router")
                t.tensor(f"{at}.{correction}e_score_correction_bias", count, role="router_bias")
        experts(
            t, f"{hub}.experts", count, expert_channels(c, "intermediate_size"), hidden,
            names=MIXTRAL, bank=f"{stacked}.experts",
        )  # fmt: skip
        if (shared := shared_channels(c.number("shared_intermediate_size", default=3072))) is not None:
            with t.block("experts"):
                gated_mlp(t, f"{hub}.shared_experts", shared, hidden, part="shared_")
            with t.block("stacked experts"):
                fused_mlp(t, f"{stacked}.shared_experts", shared, hidden, part="shared_")
        t.one_of("experts", "stacked experts")
    return t


def _marked(c: Config, key: str, word: str, older: Sequence[int] | None, *, usual: bool) -> list[bool]:
    """For which layers ``key`` has ``word``, or the ``older`` list of numbers a 1."""
    depth = c.count("num_hidden_layers")
    if c.get(key) is not None:
        return [kind == word for kind in c.listed(key, depth)]
    return [usual] * depth if older is None else [bool(mark) for mark in Config({key: older}).listed(key, depth)]


def _indexer(t: Table, c: Config, at: str, hidden: int) -> None:
    """What chooses blocks of keys, in layers with sparse attention."""
    older = c.nested("sparse_attention_config") if c.get("sparse_attention_config") is not None else Config({})
    sparse = _marked(c, "layer_types", "minimax_m3_sparse", older.get("sparse_attention_freq"), usual=False)
    index_heads = older.count("sparse_num_index_heads", default=c.count("index_n_heads", default=4))
    size = older.count("sparse_index_dim", default=c.count("index_head_dim", default=128))
    with t.only(layers_where(c, sparse).sparse):
        for block, names in (("index", f"{at}.index_"), ("indexer", f"{at}.indexer.")):
            with t.block(block):
                t.whole(f"{names}q_proj.weight", index_heads * size, hidden, why=CHOOSES)
                t.whole(f"{names}k_proj.weight", size, hidden, why=CHOOSES)
                t.norm(f"{names}q_norm", size)
                t.norm(f"{names}k_norm", size)
        t.one_of("index", "indexer")


def _dense(t: Table, at: str, ffn: Dim, hidden: int) -> None:
    """An MLP with gate and up apart, as on the hub, or joined."""
    with t.block("dense"):
        t.linear(f"{at}.gate_proj", ffn, hidden, role="gate")
        t.linear(f"{at}.up_proj", ffn, hidden, role="up")
    with t.block("dense, joined"):
        t.linear(f"{at}.gate_up_proj", ffn * 2, hidden, role="gate_up")
    t.linear(f"{at}.down_proj", hidden, ffn, role="down")
    t.one_of("dense", "dense, joined")
