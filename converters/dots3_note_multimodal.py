"""dots3-note with images and sounds: a ViT with experts, more of them in later layers, and an encoder of sounds.

Source: transformers ``models/dots3_note/{modeling,configuration}_dots3_note.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import LANGUAGE, language_config, projector
from tpshard.blocks.dense import channels_of, gated_mlp, norms
from tpshard.config import Config
from tpshard.registry import table_of
from tpshard.table import Table

FAMILY = "dots3_note_multimodal"
MODEL_TYPES = ("dots3_note",)
VISION = {"hidden_size": 1536, "intermediate_size": 4224, "num_hidden_layers": 42, "num_attention_heads": 24,
          "num_channels": 3, "patch_size": 14, "moe_intermediate_size": 2112, "spatial_merge_size": 2,
          "num_local_experts": 64, "adapter_out_dim": 5120}  # fmt: skip
AUDIO = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
         "feature_size": 128, "downsample_hidden_size": 480, "adapter_out_dim": 5120}  # fmt: skip
GATE_UP_DOWN = ("fc1", "fc3", "fc2")


def table(c: Config) -> Table:
    """The table; published configs have the language model's numbers at the top."""
    t = Table(0)
    t.include(table_of(language_config(c, "text_config", model_type="dots3_note_text")), *LANGUAGE)
    vision, audio = c.nested("vision_config", **VISION), c.nested("audio_config", **AUDIO)
    t.include(_vision(vision), ("vision_encoder.", "vision_encoder."), axes="vision_", or_whole=True)
    t.include(_audio(audio), "audio_encoder.", axes="audio_", or_whole=True)
    return t


def _vision(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    heads, size, layer = Heads("heads", count, count), hidden // count, "@blocks.{layer}"
    bias, depth, held = c.flag("attention_bias", default=False), c.count("num_hidden_layers"), _experts(c)

    t = Table(depth)
    t.tensor("@patch_embed.proj.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor("@patch_embed.proj.bias", hidden, role="vision_bias")
    t.norm("@patch_embed.norm", hidden)
    t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv", bias=bias)
    t.linear(f"{layer}.attn.proj", hidden, heads.query(size), role="o", bias=bias)
    norms(t, f"{layer}.attn", ("q_norm", "k_norm"), size)
    norms(t, layer, ("norm_1", "norm_2"), hidden)
    with t.only(at for at, experts in enumerate(held) if not experts):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False), names=GATE_UP_DOWN)
    own = Units("expert_ffn", c.count("moe_intermediate_size"), noun="channels of every expert").each()
    for experts in sorted(set(held) - {0}):
        with t.stack(depth, experts=experts), t.only(at for at, number in enumerate(held) if number == experts):
            t.tensor(f"{layer}.mlp.gate_weight", experts, hidden, role="router")
            t.tensor(f"{layer}.mlp.router_bias", experts, role="router_bias")
            at = f"{layer}.mlp.experts.{{expert}}"
            t.linear(f"{at}.fc1", own, hidden, role="expert_gate")
            t.linear(f"{at}.fc3", own, hidden, role="expert_up")
            t.linear(f"{at}.fc2", hidden, own, role="expert_down")
    t.norm("@post_trunk_norm", hidden)
    t.norm("@adapter.ln_q", hidden, bias=True)
    joined = hidden * c.count("spatial_merge_size") ** 2
    projector(t, "@adapter.mlp", joined, joined, c.count("adapter_out_dim"), names=("0", "2"))
    return t


def _experts(c: Config) -> list[int]:
    """How many experts every layer has, 0 where it has one MLP: one in four more from layer 25 on, unless told."""
    depth = c.count("num_hidden_layers")
    if c.get("mlp_layer_types") is None or c.get("pyramid_num_routed") is not None:
        usual = [-1] * 25 + list(range(4, 65, 4)) + [64]
        return [max(0, number) for number in c.with_usual(pyramid_num_routed=usual).listed("pyramid_num_routed", depth)]
    by_layer, kinds = c.by_layer("per_layer_config") or {}, c.listed("mlp_layer_types", depth)
    own = [Config({**c.values, **by_layer.get(at, {})}).count("num_local_experts") for at in range(depth)]
    return [number if kind == "sparse" else 0 for number, kind in zip(own, kinds, strict=True)]


def _audio(c: Config) -> Table:
    hidden, count, channels = c.count("hidden_size"), c.count("num_attention_heads"), c.count("downsample_hidden_size")
    heads, size, layer = Heads("heads", count, count), hidden // count, "@dots_encoder.speech_encoder.layers.{layer}"
    bias, out = c.flag("attention_bias", default=True), c.count("adapter_out_dim")

    t = Table(c.count("num_hidden_layers"))
    before = "@dots_encoder.speech_encoder"
    for number, into in ((1, 1), (2, channels), (3, channels)):
        t.tensor(f"{before}.conv2d{number}.weight", channels, into, 3, 3, role="audio")
        t.tensor(f"{before}.conv2d{number}.bias", channels, role="audio_bias")
    t.linear(f"{before}.conv_out", hidden, channels * ((c.count("feature_size") + 7) // 8), role="audio")
    for name in "qkv":
        t.linear(f"{layer}.self_attn.{name}_proj", heads.query(size), hidden, role=name, bias=bias and name != "k")
    t.linear(f"{layer}.self_attn.out_proj", hidden, heads.query(size), role="o", bias=bias)
    ffn = channels_of(c)
    t.linear(f"{layer}.fc1", ffn * 2, hidden, role="gate_up", bias=True)
    t.linear(f"{layer}.fc2", hidden, ffn, role="down", bias=True)
    norms(t, layer, ("self_attn_layer_norm", "final_layer_norm"), hidden)
    t.norm(f"{before}.layer_norm", hidden)
    for name in ("weight", "bias"):
        t.whole(f"@audio_adapter.proj.0.{name}", hidden, why="a norm of what comes in, before the matrices")
    projector(t, "@audio_adapter", hidden, out, out, names=("proj.1", "proj.3"))
    return t
