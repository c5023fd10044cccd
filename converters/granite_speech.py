"""Granite Speech: a conformer with attention in blocks, a small Q-former over windows of it, and a Granite.

The encoder is cut by heads and channels; the Q-former between the two stays whole, as do the encoder's two small
matrices in the middle, which make text of it in training and feed that back.
Source: transformers ``models/{granite_speech,granite_speech_plus}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config
from tpshard.blocks.mixers import convolution
from tpshard.blocks.speech import norm_inside, pointwise
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "granite_speech"
_ENCODER = {"input_dim": 160, "num_layers": 10, "hidden_dim": 1024, "feedforward_mult": 4, "num_heads": 8,
            "output_dim": 42, "max_pos_emb": 512, "conv_kernel_size": 15, "conv_expansion_factor": 2}  # fmt: skip
USUAL = {"granite_speech_encoder": _ENCODER, "granite_speech_plus_encoder": _ENCODER}
MODEL_TYPES = ("granite_speech", "granite_speech_plus", *USUAL)


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return _encoder(c)
    t = Table(0, prefixes=MODEL)
    include_language(t, language_config(c, "text_config", model_type="granite", tied=True))
    include_tower(t, part_of(c, "encoder_config", model_type=f"{c.model_type}_encoder"), "encoder", axes="audio_")
    t.whole_module("@projector", why="a Q-former of two layers over windows of a few frames")
    return t


def _encoder(c: Config) -> Table:
    hidden, count = c.count("hidden_dim"), c.count("num_heads")
    heads, size = Heads("heads", count, count), c.count("dim_head", default=hidden // count)
    ffn = Units("ffn", c.count("feedforward_mult") * hidden, noun="feed-forward channels").each()
    channels = Units("conv_channels", c.count("conv_expansion_factor") * hidden, noun="convolution channels").each()
    why = "all channels at once, in small matrices"

    t = Table(c.count("num_layers"))
    for name, out, into in (("input_linear", hidden, c.count("input_dim")), ("out", c.count("output_dim"), hidden),
                            ("out_mid", hidden, c.count("output_dim"))):  # fmt: skip
        t.whole(f"@{name}.weight", out, into, why=why)
        t.whole(f"@{name}.bias", out, why=why)
    layer = "@layers.{layer}"
    for half in ("ff1", "ff2"):
        norm_inside(t, f"{layer}.{half}.pre_norm", hidden)
        t.linear(f"{layer}.{half}.up_proj", ffn, hidden, role="up", bias=True)
        t.linear(f"{layer}.{half}.down_proj", hidden, ffn, role="down", bias=True)
    at = f"{layer}.attn"
    norm_inside(t, f"{at}.pre_norm", hidden)
    t.linear(f"{at}.to_q", heads.query(size), hidden, role="q")
    t.linear(f"{at}.to_kv", heads.kv(size) * 2, hidden, role="kv")
    t.linear(f"{at}.to_out", hidden, heads.query(size), role="o", bias=True)
    t.whole(f"{at}.rel_pos_emb.weight", 2 * c.count("max_pos_emb") + 1, size, why="distances, which all heads share")
    at = f"{layer}.conv"
    norm_inside(t, f"{at}.norm", hidden)
    pointwise(t, f"{at}.up_conv", channels * 2, hidden, role="linear_in", bias=True)
    convolution(t, f"{at}.depth_conv.conv", channels, c.count("conv_kernel_size"))
    for part in ("weight", "bias", "running_mean", "running_var"):
        t.tensor(f"{at}.batch_norm.{part}", channels, role="linear_head")
    t.tensor(f"{at}.batch_norm.num_batches_tracked", role="buffer", optional=True)
    pointwise(t, f"{at}.down_conv", hidden, channels, role="linear_out", bias=True)
    t.norm(f"{layer}.post_norm", hidden, bias=True)
    return t
