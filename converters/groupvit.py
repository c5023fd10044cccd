"""GroupViT: a tower in stages that gathers patches into fewer and fewer groups, beside CLIP's text encoder.

A stage's attention and feed-forwards are CLIP's and are cut; what assigns patches to groups compares whole vectors, and
mixes groups rather than channels, so it is whole, as are the projections with batch norms to the shared width.
Source: transformers ``models/groupvit/modeling_groupvit.py``.
"""

from __future__ import annotations

from tpshard.axes import Dim, Heads, Units
from tpshard.blocks.dense import attention, channels_of, mlp, norms
from tpshard.blocks.encdec import OUT
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "groupvit"
USUAL = {
    "groupvit_text_model": {"vocab_size": 49408, "hidden_size": 256, "intermediate_size": 1024,
                            "num_hidden_layers": 12, "num_attention_heads": 4, "max_position_embeddings": 77},
    "groupvit_vision_model": {"hidden_size": 384, "intermediate_size": 1536, "depths": [6, 3, 3],
                              "num_group_tokens": [64, 8, 0], "num_output_groups": [64, 8, 8],
                              "num_attention_heads": 6, "image_size": 224, "patch_size": 16, "num_channels": 3,
                              "assign_mlp_ratio": [0.5, 4]},
}  # fmt: skip
MODEL_TYPES = ("groupvit", *USUAL)
GROUPS = "compares whole vectors of patches and groups, or mixes groups"
BATCH_NORM = "a batch norm over pairs of texts and images stands between"


def table(c: Config) -> Table:
    if c.model_type == "groupvit_text_model":
        return table_of(Config({**c.values, "model_type": "clip_text_model"}))
    if c.model_type == "groupvit_vision_model":
        return _tower(c)
    t = Table(0)
    for side in ("text", "vision"):
        part = part_of(c, f"{side}_config", model_type=f"groupvit_{side}_model")
        place = f"{side}_model."
        t.include(table_of(part), (place, place), axes=f"{side}_", or_whole=side == "vision")
    t.whole_module("text_projection", why=BATCH_NORM)
    t.whole_module("visual_projection", why=BATCH_NORM)
    t.whole("logit_scale", why="one number for all pairs of texts and images")
    return t


def _tower(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    heads, size, ffn = Heads("heads", count, count), c.head_dim(count), channels_of(c)
    tokens = c.get("num_group_tokens")

    t = Table(0, prefixes=("vision_model.", ""))
    at = "@embeddings.patch_embeddings.projection"
    t.tensor(f"{at}.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor(f"{at}.bias", hidden, role="vision_bias")
    t.tensor("@embeddings.position_embeddings", 1, (c.count("image_size") // patch) ** 2, hidden, role="position")
    t.norm("@embeddings.layernorm", hidden, bias=True)
    for number, depth in enumerate(c.get("depths")):
        stage = f"@encoder.stages.{number}"
        for layer in range(Config({"depths": depth}).count("depths")):
            at = f"{stage}.layers.{layer}"
            _attention(t, f"{at}.self_attn", heads, size, hidden)
            mlp(t, f"{at}.mlp", ffn, hidden)
            norms(t, at, ("layer_norm1", "layer_norm2"), hidden, bias=True)
        if tokens[number]:
            t.tensor(f"{stage}.group_token", 1, tokens[number], hidden, role="vision")
            _assign(t, c, f"{stage}.downsample", heads, size, ffn, hidden)
            if number and c.get("num_output_groups")[number - 1]:
                t.whole_module(f"{stage}.group_projector", why=GROUPS)
    t.norm("@layernorm", hidden, bias=True)
    return t


def _attention(t: Table, at: str, heads: Heads, size: int, hidden: int) -> None:
    attention(t, at, heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True, names=OUT)


def _assign(t: Table, c: Config, at: str, heads: Heads, size: int, ffn: Dim, hidden: int) -> None:
    _attention(t, f"{at}.pre_assign_attn.attn", heads, size, hidden)
    mlp(t, f"{at}.pre_assign_attn.mlp", ffn, hidden)
    norms(t, f"{at}.pre_assign_attn", ("norm2", "norm_post"), hidden, bias=True)
    t.whole_module(f"{at}.assign", why=GROUPS)
    t.whole_module(f"{at}.mlp_inter", why=GROUPS)
    ratio = c.get("assign_mlp_ratio")
    width = int((ratio[1] if isinstance(ratio, list) else ratio) * hidden)
    mlp(t, f"{at}.mlp_channels", Units("group_ffn", width, noun="channels after groups are made").each(), hidden)
    norms(t, at, ("norm_tokens", "norm_post_tokens", "norm_x", "norm_new_x"), hidden, bias=True)
