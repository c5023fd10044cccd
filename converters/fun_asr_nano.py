"""Fun-ASR-Nano: SenseVoice's encoder, two matrices and a few layers of the same kind, and a Qwen3.

A memory along time runs over the values of all heads at once and is added behind the output matrix, so every rank
holds the values' matrix whole and takes its heads from what it makes; queries, keys and outputs are cut by head.
Source: transformers ``models/fun_asr_nano/modeling_fun_asr_nano.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector
from tpshard.blocks.dense import attention, channels_of, mlp, norms
from tpshard.blocks.speech import encoder_heads
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "fun_asr_nano"
USUAL = {
    "fun_asr_nano_encoder": {"num_mel_bins": 80, "hidden_size": 512, "num_attention_heads": 4,
                             "intermediate_size": 2048, "num_hidden_layers": 70, "num_stacked_frames": 7,
                             "num_timestamp_prediction_layers": 20, "fsmn_kernel_size": 11},
}  # fmt: skip
MODEL_TYPES = ("fun_asr_nano", *USUAL)
ADAPTOR = {"hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 256, "num_hidden_layers": 2,
           "projector_hidden_size": 2048}  # fmt: skip
MEMORY = "a memory along time sees the values of all heads"


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return _encoder(c)
    tower = part_of(c, "audio_config", model_type="fun_asr_nano_encoder")
    adaptor = c.with_usual(adaptor_config={}).nested("adaptor_config", **ADAPTOR)
    width, hidden = adaptor.count("projector_hidden_size"), adaptor.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, language_config(c, "text_config", model_type="qwen3", tied=True))
    include_tower(t, tower, "audio_tower", axes="audio_")
    projector(t, "@multi_modal_projector", tower.count("hidden_size"), width, hidden)
    t.include(_adaptor(adaptor), *(f"{at}multi_modal_projector." for at in MODEL), axes="adaptor_", or_whole=True)
    return t


def _adaptor(c: Config) -> Table:
    hidden, layer = c.count("hidden_size"), "@layers.{layer}"
    heads, size = encoder_heads(c, width=hidden)
    t = Table(c.count("num_hidden_layers"))
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
    return t


def _encoder(c: Config) -> Table:
    hidden, layers, layer = c.count("hidden_size"), c.count("num_hidden_layers"), "@layers.{layer}"
    heads, size = encoder_heads(c, width=hidden)
    frames = c.count("num_mel_bins") * c.count("num_stacked_frames")  # that the first layer sees at once

    t = Table(layers)
    at = f"{layer}.self_attn"
    for of, into in ((range(1), frames), (range(1, layers), hidden)):
        with t.only(of):
            t.linear(f"{at}.q_proj", heads.query(size), into, role="q", bias=True)
            t.linear(f"{at}.k_proj", heads.kv(size), into, role="k", bias=True)
            t.whole(f"{at}.v_proj.weight", hidden, into, why=MEMORY)
            t.whole(f"{at}.v_proj.bias", hidden, why=MEMORY)
            t.norm(f"{layer}.input_layernorm", into, bias=True)
    t.linear(f"{at}.o_proj", hidden, heads.query(size), role="o", bias=True)
    t.whole(f"{at}.fsmn.conv.weight", hidden, 1, c.count("fsmn_kernel_size"), why=MEMORY)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    t.norm(f"{layer}.post_attention_layernorm", hidden, bias=True)
    last = layers - c.count("num_timestamp_prediction_layers") - 1  # of those that make text
    with t.only({last % layers, layers - 1}):
        t.norm(f"{layer}.final_layernorm", hidden, bias=True)
    return t
