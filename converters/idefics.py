"""IDEFICS: Llama's layers, layers between them that look at the images, CLIP's tower, perhaps a resampler.

A few tokens that were added later have an embedding and rows of the head beside the others', which every rank holds.
What an image layer makes is multiplied with the tanh of a learned number before it is added.
Source: transformers ``models/idefics/{modeling_idefics,perceiver,vision}.py``.
"""

from __future__ import annotations

from tpshard.axes import Dim, Heads, Units
from tpshard.blocks.composite import MODEL, include_tower
from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "idefics"
MODEL_TYPES = ("idefics",)
RESAMPLER = {"resampler_n_latents": 64, "resampler_depth": 6, "resampler_n_heads": 16, "resampler_head_dim": 96,
             "qk_layer_norms_perceiver": False}  # fmt: skip
ADDED = "rows for the few tokens that were added later"
GATE = "scales what is summed over ranks already"
NORMS = ("input_layernorm", "post_attention_layernorm")


def table(c: Config) -> Table:
    hidden, heads, layer = c.count("hidden_size"), heads_of(c), "@layers.{layer}"
    size, ffn, added = c.head_dim(heads.query_heads), channels_of(c), c.number("additional_vocab_size")
    q, kv = heads.query(size), heads.kv(size)
    released = c.nested("vision_config").values
    width = Config(released).count("embed_dim", "hidden_size", default=768)
    vision = {"num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120, "patch_size": 14,
              **released, "hidden_size": width, "model_type": "clip_vision_model"}  # fmt: skip

    t = decoder(c)
    if added:
        t.whole("@embed_tokens.additional_embedding.weight", added, hidden, why=ADDED)
        t.whole("lm_head.additional_fc.weight", added, hidden, why=ADDED)
    attention(t, f"{layer}.self_attn", q, kv, hidden)
    t.tensor(f"{layer}.self_attn.rotary_emb.inv_freq", None, role="buffer", optional=True)  # files of 2023
    gated_mlp(t, f"{layer}.mlp", ffn, hidden)
    norms(t, layer, NORMS, hidden)
    layers = t.layers // c.count("cross_layer_interval", default=1)
    with t.stack(layers, prefixes=tuple(f"{outer}gated_cross_attn_layers." for outer in MODEL)):
        _image_layer(t, c, q, kv, hidden, size, width)
        gated_mlp(t, "@{layer}.mlp", ffn, hidden)
        norms(t, "@{layer}", NORMS, hidden)
    tower = part_of(Config({"vision_config": vision}), "vision_config", model_type="clip_vision_model")
    include_tower(t, tower, "vision_model")
    if c.flag("use_resampler", default=False):
        _resampler(t, c.with_usual(perceiver_config={}).nested("perceiver_config", **RESAMPLER), width)
    return t


def _image_layer(t: Table, c: Config, q: Dim, kv: Dim, hidden: int, size: int, width: int) -> None:
    at = "@{layer}.cross_attn"
    attention(t, at, q, kv, hidden, kv_from=width)
    t.tensor(f"{at}.rotary_emb.inv_freq", None, role="buffer", optional=True)  # files of 2023
    if c.flag("qk_layer_norms", default=False):
        norms(t, at, ("q_layer_norm", "k_layer_norm"), size)
    shape = (1, 1, hidden) if c.get("alpha_type", default="float") == "vector" else (1,)
    for gate in ("alpha_cross_attn", "alpha_dense"):
        t.whole(f"@{{layer}}.{gate}", *shape, why=GATE)


def _resampler(t: Table, c: Config, width: int) -> None:
    count, size = c.count("resampler_n_heads"), c.count("resampler_head_dim")
    heads = Heads("resampler_heads", count, count, or_whole=True)
    ffn = Units("resampler_ffn", 4 * width, noun="feed-forward channels", or_whole=True).each()
    with t.stack(c.count("resampler_depth"), prefixes=tuple(f"{outer}perceiver_resampler." for outer in MODEL)):
        t.tensor("@latents", c.count("resampler_n_latents"), width, role="vision")
        at = "@blocks.{layer}.0"
        attention(
            t, at, heads.query(size), heads.kv(size), width, names=("q_proj", "k_proj", "v_proj", "output_proj")
        )
        norms(t, at, ("context_layer_norm", "latents_layer_norm"), width, bias=True)
        if c.flag("qk_layer_norms_perceiver", default=False):
            norms(t, at, ("q_layer_norm", "k_layer_norm"), size, bias=True)
        mlp(t, "@blocks.{layer}.1", ffn, width, bias=False, names=("fc", "c_proj"))
        t.norm("@blocks.{layer}.1.ln", width, bias=True)
        t.norm("@layer_norm", width, bias=True)
