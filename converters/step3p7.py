"""Step 3.7: layers with a sliding window have query heads of another number, experts are three stacked banks.

A ViT beside the language model ends with two convolutions. Released configs name the parts' types after their own
code, so both parts are read here.
Source: transformers ``models/step3p7/modeling_step3p7.py``, ``configuration_step3p7.py``, ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import whole_projector
from tpshard.blocks.dense import attention, channels_of, decoder, expert_channels, gated_mlp, mlp, norms
from tpshard.blocks.experts import mixed_layers, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "step3p7"
MODEL_TYPES = ("step3p7",)
TEXT = {"vocab_size": 128815, "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1280,
        "n_routed_experts": 288, "share_expert_dim": 1280}  # fmt: skip
VISION = {"num_channels": 3, "image_size": 728, "patch_size": 14}


def table(c: Config) -> Table:
    text, vision = c.nested("text_config", **TEXT), c.nested("vision_config", **VISION)
    t = _text(text)
    t.include(_vision(vision), "model.", "", axes="vision_", or_whole=True)
    into, bias = 4 * vision.count("width", "hidden_size", default=1536), c.flag("projector_bias", default=False)
    whole_projector(t, "vit_large_projector", into, text.count("hidden_size"), bias=bias)
    return t


def _text(c: Config) -> Table:
    hidden, depth, size = c.count("hidden_size"), c.count("num_hidden_layers"), c.count("head_dim")
    count, ffn, layers = c.count("n_routed_experts"), expert_channels(c, "moe_intermediate_size"), _layers(c, depth)
    query_heads, kv_heads = c.count("num_attention_heads"), c.count("num_key_value_heads")
    older = Config(c.get("attention_other_setting", default={}))
    sliding = c.count("num_sliding_attention_heads", default=older.count("num_attention_heads", default=query_heads))
    kinds = c.with_usual(layer_types=["full_attention"] * depth).listed("layer_types", depth)
    bias, mlp_bias = c.flag("attention_bias", default=False), c.flag("mlp_bias", default=False)

    t = decoder(c)
    layer = "@layers.{layer}"
    for kind, heads in (
        ("full_attention", Heads("heads", query_heads, kv_heads)),
        ("sliding_attention", Heads("sliding_heads", sliding, kv_heads)),
    ):
        with t.only(at for at, of_layer in enumerate(kinds) if of_layer == kind):
            attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
            t.linear(f"{layer}.self_attn.g_proj", heads.query(1), hidden, role="attn_gate")
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.only(layers[0]):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=mlp_bias)
    with t.only(layers[1]):
        t.linear(f"{layer}.moe.gate", count, hidden, role="router")
        t.tensor(f"{layer}.moe.router_bias", count, role="router_bias")
        t.tensor(f"{layer}.moe.gate_proj.weight", count, ffn, hidden, role="expert_gate")
        t.tensor(f"{layer}.moe.up_proj.weight", count, ffn, hidden, role="expert_up")
        t.tensor(f"{layer}.moe.down_proj.weight", count, hidden, ffn, role="expert_down")
        if (shared := shared_channels(c.number("share_expert_dim"))) is not None:
            gated_mlp(t, f"{layer}.share_expert", shared, hidden, bias=mlp_bias, part="shared_")
    return t


def _layers(c: Config, depth: int) -> tuple[frozenset[int], frozenset[int]]:
    """Dense layers and those with experts; released configs list the latter as ``"3,4,5"``."""
    listed = c.get("moe_layers_enum")
    if c.get("mlp_layer_types") is not None or listed is None:
        return mixed_layers(c, first_dense=3)
    numbers = listed.split(",") if isinstance(listed, str) else listed
    sparse = frozenset(int(number) for number in numbers if str(number).strip()) & frozenset(range(depth))
    return frozenset(range(depth)) - sparse, sparse


def _vision(c: Config) -> Table:
    width, count = c.count("width", "hidden_size", default=1536), c.count("heads", "num_attention_heads", default=16)
    heads, size, patch = Heads("heads", count, count), width // count, c.count("patch_size")
    ratio = c.get("mlp_ratio", default=8960 / 1536)
    ffn = Units("ffn", int(width * ratio), noun="feed-forward channels").each()
    qkv, places = heads.query(size) + heads.kv(size) * 2, (c.count("image_size") // patch) ** 2

    t = Table(c.count("layers", "num_hidden_layers", default=47))
    t.tensor("@vision_model.conv1.weight", width, c.count("num_channels"), patch, patch, role="vision")
    t.tensor("@vision_model.positional_embedding", places, width, role="position")
    t.norm("@vision_model.ln_pre", width, bias=True)
    block = "@vision_model.transformer.resblocks.{layer}"
    t.tensor(f"{block}.attn.in_proj_weight", qkv, width, role="qkv")
    t.tensor(f"{block}.attn.in_proj_bias", qkv, role="qkv_bias")
    t.linear(f"{block}.attn.out_proj", width, heads.query(size), role="o", bias=True)
    mlp(t, f"{block}.mlp", ffn, width, names=("c_fc", "c_proj"))
    norms(t, block, ("ln_1", "ln_2"), width, bias=True)
    for scale in ("ls_1", "ls_2"):
        t.whole(f"{block}.{scale}.gamma", width, why="scales what is summed over ranks already")
    for number in (1, 2):
        into, out = number * width, 2 * number * width
        t.tensor(f"@vision_model.vit_downsampler{number}.weight", out, into, 3, 3, role="vision")
        t.tensor(f"@vision_model.vit_downsampler{number}.bias", out, role="vision_bias")
    return t
