"""Gemma 4's towers: a ViT with gated MLPs and grouped heads for images, a conformer for sounds.

Every matrix is a module ``linear`` inside one that may clip what goes in and out, by four numbers beside it. The
conformer's convolutions stay whole: a norm of all their channels stands in the middle.
Source: transformers ``models/gemma4/modeling_gemma4.py``.
"""

from __future__ import annotations

from typing import Any

from tpshard.axes import AnyDim, Heads, Units
from tpshard.blocks.dense import norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "gemma4_towers"
USUAL: dict[str, dict[str, Any]] = {
    "gemma4_vision": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
                      "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16, "position_embedding_size": 10_240,
                      "use_clipped_linears": False},
    "gemma4_audio": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "conv_kernel_size": 5,
                     "subsampling_conv_channels": [128, 32], "output_proj_dims": 1536, "use_clipped_linears": True},
}  # fmt: skip
MODEL_TYPES = tuple(USUAL)
CHANNELS = "a norm of all channels stands between these matrices"


def table(c: Config) -> Table:
    return (_vision if c.model_type == "gemma4_vision" else _audio)(c.with_usual(**USUAL[c.model_type]))


def _vision(c: Config) -> Table:
    hidden, size, layer = c.count("hidden_size"), c.count("head_dim"), "@encoder.layers.{layer}"
    heads = Heads("heads", c.count("num_attention_heads"), c.count("num_key_value_heads"))
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@patch_embedder.position_embedding_table", 2, c.count("position_embedding_size"), hidden, role="position")
    t.linear("@patch_embedder.input_proj", hidden, 3 * c.count("patch_size") ** 2, role="vision")
    at = f"{layer}.self_attn"
    _clipped(t, c, f"{at}.q_proj", heads.query(size), hidden, "q")
    _clipped(t, c, f"{at}.k_proj", heads.kv(size), hidden, "k")
    _clipped(t, c, f"{at}.v_proj", heads.kv(size), hidden, "v")
    _clipped(t, c, f"{at}.o_proj", hidden, heads.query(size), "o")
    norms(t, at, ("q_norm", "k_norm"), size)
    _clipped(t, c, f"{layer}.mlp.gate_proj", ffn, hidden, "gate")
    _clipped(t, c, f"{layer}.mlp.up_proj", ffn, hidden, "up")
    _clipped(t, c, f"{layer}.mlp.down_proj", hidden, ffn, "down")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    norms(t, layer, ("pre_feedforward_layernorm", "post_feedforward_layernorm"), hidden)
    if c.flag("standardize", default=False):
        t.tensor("@std_bias", hidden, role="buffer")
        t.tensor("@std_scale", hidden, role="buffer")
    return t


def _audio(c: Config) -> Table:
    hidden, count, layer = c.count("hidden_size"), c.count("num_attention_heads"), "@layers.{layer}"
    heads, size = Heads("heads", count, count), hidden // count
    first, second = (Config({"channels": n}).count("channels") for n in c.listed("subsampling_conv_channels", 2))

    t = Table(c.count("num_hidden_layers"))
    before = "@subsample_conv_projection"
    for number, (into, out) in enumerate(((1, first), (first, second))):
        t.tensor(f"{before}.layer{number}.conv.weight", out, into, 3, 3, role="audio")
        t.norm(f"{before}.layer{number}.norm", out)
    t.linear(f"{before}.input_proj_linear", hidden, first // 4 * second, role="audio")
    at = f"{layer}.self_attn"
    for name in "qkv":
        _clipped(t, c, f"{at}.{name}_proj", heads.query(size), hidden, name)
    t.linear(f"{at}.relative_k_proj", heads.query(size), hidden, role="attn_head")
    t.tensor(f"{at}.per_dim_scale", size, role="inside")
    _clipped(t, c, f"{at}.post", hidden, heads.query(size), "o")
    for number in (1, 2):
        ffn = Units("ffn", 4 * hidden, noun="feed-forward channels").each()
        _clipped(t, c, f"{layer}.feed_forward{number}.ffw_layer_1", ffn, hidden, "projector_in")
        _clipped(t, c, f"{layer}.feed_forward{number}.ffw_layer_2", hidden, ffn, "projector_out")
        norms(t, f"{layer}.feed_forward{number}", ("pre_layer_norm", "post_layer_norm"), hidden)
    _clipped(t, c, f"{layer}.lconv1d.linear_start", 2 * hidden, hidden, "whole")
    t.whole(f"{layer}.lconv1d.depthwise_conv1d.weight", hidden, 1, c.count("conv_kernel_size"), why=CHANNELS)
    _clipped(t, c, f"{layer}.lconv1d.linear_end", hidden, hidden, "whole")
    norms(t, f"{layer}.lconv1d", ("pre_layer_norm", "conv_norm"), hidden)
    norms(t, layer, ("norm_pre_attn", "norm_post_attn", "norm_out"), hidden)
    t.linear("@output_proj", c.count("output_proj_dims"), hidden, role="audio", bias=True)
    return t


def _clipped(t: Table, c: Config, at: str, out: AnyDim, into: AnyDim, role: str) -> None:
    t.linear(f"{at}.linear", out, into, role=role, note=f"whole: {CHANNELS}" if role == "whole" else "")
    if c.flag("use_clipped_linears", default=False):
        for end in ("input_min", "input_max", "output_min", "output_max"):
            t.tensor(f"{at}.{end}", role="buffer")
