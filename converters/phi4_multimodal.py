"""Phi-4-multimodal: Phi-3's language model, a SigLIP tower for images, a conformer for speech.

The towers' attention and feed-forward are cut; the conformer's convolutions and what joins the towers to the
language model are whole, about 2 % of the model.
Source: transformers ``models/phi4_multimodal/modeling_phi4_multimodal.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import attention, fused_mlp, norms
from tpshard.config import Config
from tpshard.registry import table_of
from tpshard.table import Table

FAMILY = "phi4_multimodal"
MODEL_TYPES = ("phi4_multimodal",)
_VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
           "num_channels": 3, "image_size": 448, "patch_size": 14}  # fmt: skip
_AUDIO = {"hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24, "num_attention_heads": 16, "kernel_size": 3,
          "ext_pw_out_channel": 1024, "depthwise_separable_out_channel": 1024, "depthwise_multiplier": 1,
          "input_size": 80, "time_reduction": 8, "bias_max_distance": 1000, "bias_symmetric": False,
          "nemo_conv_channels": 1024}  # fmt: skip
_TOWERS = ("model.embed_tokens_extend.", "embed_tokens_extend.")
_USUAL = {"vision_config": _VISION, "audio_config": _AUDIO}


def table(c: Config) -> Table:
    c = c.with_usual(**_USUAL)
    vision, audio = c.nested("vision_config", **_VISION), c.nested("audio_config", **_AUDIO)
    hidden = c.count("hidden_size")

    t = Table(0, prefixes=_TOWERS)
    t.include(table_of(Config({**c.values, "model_type": "phi3"})), "model.", "")
    _vision(t, vision, hidden)
    _audio(t, audio, hidden)
    return t


def _vision(t: Table, c: Config, into: int) -> None:
    hidden = c.count("hidden_size")
    tower = Config({**c.values, "model_type": "siglip_vision_model"})
    places = [f"{outer}image_embed.img_processor." for outer in _TOWERS]
    t.include(table_of(tower), *((place, place) for place in places), axes="vision_", or_whole=True)
    t.linear("@image_embed.img_projection_up", into, hidden, role="vision", bias=True)
    t.linear("@image_embed.img_projection_down", into, into, role="vision", bias=True)
    t.tensor("@image_embed.global_img_feature_extensor", 1, 1, hidden, role="vision")
    t.tensor("@image_embed.sub_img_feature_extensor", 1, 1, 1, hidden, role="vision")


def _audio(t: Table, c: Config, into: int) -> None:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads = Heads("audio_heads", count, count, or_whole=True)
    size = c.head_dim(count)
    ffn = Units("audio_ffn", c.count("intermediate_size"), noun="feed-forward channels", or_whole=True).each()
    why = "a small convolution along the sequence"
    with t.stack(c.count("num_blocks"), prefixes=[f"{outer}audio_embed." for outer in _TOWERS]):
        layer = "@encoder.encoders.{layer}"
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        attention(
            t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True, names=names
        )
        for half in ("feed_forward_in", "feed_forward_out"):
            t.norm(f"{layer}.{half}.layer_norm", hidden, bias=True)
            fused_mlp(t, f"{layer}.{half}", ffn, hidden, bias=True)
        norms(t, layer, ("layer_norm_att", "layer_norm", "conv.layer_norm"), hidden, bias=True)
        _convolutions(t, c, f"{layer}.conv", hidden, why)
        _speech_input(t, c, hidden, why)
        buckets = c.count("bias_max_distance") * (1 if c.flag("bias_symmetric", default=False) else 2)
        table = "@encoder.relative_attention_bias_layer.bias_values.weight"
        t.tensor(table, buckets, heads.query(1), role="attn_head")
        for mode in ("speech", "vision_speech"):
            t.linear(f"@up_proj_for_{mode}", into, hidden, role="vision", bias=True)
            t.linear(f"@down_proj_for_{mode}", into, into, role="vision", bias=True)


def _convolutions(t: Table, c: Config, at: str, hidden: int, why: str) -> None:
    out, wide = c.count("ext_pw_out_channel"), c.count("depthwise_separable_out_channel")
    depth = hidden * c.count("depthwise_multiplier")
    shapes = {
        "glu.ext_pw_conv_1d": (2 * out, hidden, 1),
        "dw_sep_conv_1d.dw_conv": (depth, 1, c.count("kernel_size")),
        "dw_sep_conv_1d.pw_conv": (wide, depth, 1),
        "ext_pw_conv_1d": (out, hidden, 1),
    }
    for name, shape in shapes.items():
        t.whole(f"{at}.{name}.weight", *shape, why=why)
        t.whole(f"{at}.{name}.bias", shape[0], why=why)
    for bias in ("b1", "b2"):
        t.whole(f"{at}.glu.{bias}", 1, out, 1, why=why)


def _speech_input(t: Table, c: Config, hidden: int, why: str) -> None:
    """Frames of sound, normalised, and four times less of them after convolutions with strides."""
    for statistic in ("global_mean", "global_invstd"):
        t.whole(f"@encoder.encoder_embedding.{statistic}", c.count("input_size"), why="of the frames of sound")
    channels, steps = c.count("nemo_conv_channels"), c.count("time_reduction").bit_length() - 1
    at = "@encoder.embed.conv"
    shapes = {0: (channels, 1, 3, 3)}
    for step in range(1, steps):
        shapes |= {3 * step - 1: (channels, 1, 3, 3), 3 * step: (channels, channels, 1, 1)}
    for number, shape in shapes.items():
        t.whole(f"{at}.{number}.weight", *shape, why=why)
        t.whole(f"{at}.{number}.bias", channels, why=why)
    t.linear("@encoder.embed.out", hidden, None, role="vision", bias=True)
