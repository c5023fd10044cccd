"""Muse Glimmer and Muse Spark: a ViT, an MLP on what it makes, one matrix, and a decoder with gated heads' outputs.

Muse Spark's experts work in a latent, and what every one makes is normed by itself: ranks share them out whole.
Source: transformers ``models/{muse_glimmer,muse_spark}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector, whole_projector
from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, mlp, norms
from tpshard.blocks.experts import CORRECTION
from tpshard.blocks.speech import WAVE
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "muse_glimmer"
USUAL = {
    "muse_glimmer_text": {"vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19968,
                          "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
                          "head_dim": 128},
    "muse_glimmer_vision": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 50,
                            "num_attention_heads": 16, "patch_size": 14, "patch_temporal": 2, "pos_emb_height": 32,
                            "pos_emb_width": 32},
    "muse_spark_text": {"vocab_size": 202_048, "hidden_size": 8192, "num_hidden_layers": 62,
                        "num_attention_heads": 128, "num_key_value_heads": 16, "head_dim": 64,
                        "moe_intermediate_size": 4096, "num_local_experts": 256, "moe_hidden_size": 4096},
    "muse_spark_audio": {},
}  # fmt: skip
USUAL["muse_spark_vision"] = USUAL["muse_glimmer_vision"]
MODEL_TYPES = ("muse_glimmer", "muse_spark", *USUAL)
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def table(c: Config) -> Table:
    kind = c.model_type
    if kind in USUAL:
        part = _audio if kind.endswith("_audio") else _tower if kind.endswith("_vision") else _text
        return part(c)
    text = language_config(c, "text_config", model_type=f"{kind}_text")
    tower = part_of(c, "vision_config", model_type=f"{kind}_vision")
    joined, width = c.count("out_hidden_size", default=6144), c.count("projector_hidden_size", default=4096)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    projector(t, "@vision_adapter", joined, width, width, bias=False, names=("fc1", "fc2"))
    whole_projector(t, "@vision_projection", width, text.count("hidden_size"), bias=False)
    if kind == "muse_spark":
        include_tower(t, part_of(c, "audio_config", model_type="muse_spark_audio"), "audio_tower", axes="audio_")
    return t


def _text(c: Config) -> Table:
    hidden, heads, size, layer = c.count("hidden_size"), heads_of(c), c.count("head_dim"), "@layers.{layer}"
    bias, q = c.flag("attention_bias", default=False), heads.query(size)

    t = decoder(c)
    attention(t, f"{layer}.self_attn", q, heads.kv(size), hidden, bias=bias, out_bias=bias)
    t.linear(f"{layer}.self_attn.gate_proj", q, hidden, role="attn_gate")
    if c.model_type == "muse_spark_text":
        _experts(t, c, f"{layer}.mlp", hidden)
        norms(t, layer, ("input_layernorm", *NORMS[2:]), hidden)
        for name in ("post_attention_residual_gate", "post_feedforward_residual_gate"):
            t.whole(f"{layer}.{name}.gate", hidden, why="weighs the channels of the residual stream")
    else:
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
        norms(t, layer, NORMS, hidden)
    return t


def _experts(t: Table, c: Config, at: str, hidden: int) -> None:
    """A latent of all channels, and experts in it that a rank holds whole or not at all: each has a norm behind it."""
    count, latent, width = c.count("num_local_experts"), c.count("moe_hidden_size"), c.count("moe_intermediate_size")
    shared_out = Units("experts", count, noun="experts", or_whole=True).each()
    t.linear(f"{at}.gate", count, hidden, role="router")
    t.tensor(f"{at}.{CORRECTION}", count, role="router_bias")
    t.whole(f"{at}.pre_expert_proj.weight", latent, hidden, why="all experts read the latent, which is normed")
    t.whole(f"{at}.post_expert_proj.weight", hidden, latent, why="it takes the sum over ranks")
    t.norm(f"{at}.pre_expert_norm", latent)
    t.norm(f"{at}.experts.post_expert_norm", latent)
    t.tensor(f"{at}.experts.gate_up_proj", shared_out, 2 * width, latent, role="expert_gate_up")
    t.tensor(f"{at}.experts.down_proj", shared_out, latent, width, role="expert_down")


def _audio(c: Config) -> Table:
    """Convolutions along time with feed-forwards between, which widen from stage to stage."""
    sizes, depths = c.layer_numbers("hidden_sizes", default=(256, 512, 1024, 2048)), c.layer_numbers(
        "depths", default=(2, 2, 2, 2)
    )
    patches, kernel = c.layer_numbers("patch_sizes", default=(16, 6, 5, 4)), c.count("conv_kernel_size", default=7)
    if not len(sizes) == len(depths) == len(patches):
        raise DamagedError(
            f"config.json: {len(sizes)} 'hidden_sizes', {len(depths)} 'depths' and {len(patches)} 'patch_sizes', where "
            "every stage has one of each; correct them"
        )
    ratio, out, into = int(c.get("mlp_ratio", default=4.0)), c.count("out_hidden_size", default=8192), 1

    t = Table(0)
    for stage, (width, patch) in enumerate(zip(sizes, patches, strict=True)):
        at, ffn = f"@layers.{stage}.patch_embedder", Units(f"ffn{stage}", ratio * width, noun="feed-forward channels")
        t.whole(f"{at}.proj.weight", width, into * patch, why=WAVE)
        t.whole(f"{at}.proj.bias", width, why=WAVE)
        t.norm(f"{at}.norm", width)
        for block in (f"@layers.{stage}.conv_blocks.{number}" for number in range(depths[stage])):
            t.whole(f"{block}.conv.weight", width, 1, kernel, why=WAVE)
            t.whole(f"{block}.conv.bias", width, why=WAVE)
            t.norm(f"{block}.norm", width)
            mlp(t, f"{block}.mlp", ffn.each(), width)
        into = width
    t.norm("@norm", into)
    whole_projector(t, "@proj", into, out)
    t.norm("@post_proj_norm", out)
    return t


def _tower(c: Config) -> Table:
    hidden, count, layer = c.count("hidden_size"), c.count("num_attention_heads"), "@layers.{layer}"
    heads, size = Heads("heads", count, count), c.head_dim(count)
    values, places = 3 * c.count("patch_temporal") * c.count("patch_size") ** 2, c.count("pos_emb_height")

    t = Table(c.count("num_hidden_layers"))
    at = "@patch_embedder"
    t.tensor(f"{at}.patch_embedding.weight", hidden, values, role="vision")
    t.embedding(f"{at}.position_embedding_table", places * c.count("pos_emb_width"), hidden, role="position")
    attention(
        t, f"{layer}.attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "proj"),
    )  # fmt: skip
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("norm1", "norm2"), hidden, bias=True)
    for name in ("ln_pre", "ln_post"):
        t.norm(f"@{name}", hidden, bias=True)
    return t
