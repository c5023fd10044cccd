"""Aria: an Idefics3 tower, whose patches a set of learned queries reads by cross attention, and Aria's language model.

The queries of the projector pass two matrices each, of which the second is cut by head; those before stay whole,
for what they make is seen by all heads.
Source: transformers ``models/aria/modeling_aria.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "aria"
MODEL_TYPES = ("aria",)
SEEN_BY_ALL = "what it makes is seen by all heads of the attention behind it"


def table(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="aria_text")
    tower = part_of(c, "vision_config", model_type="idefics3_vision")
    width, hidden = tower.count("hidden_size"), text.count("hidden_size")
    count = tower.count("num_attention_heads")
    heads, size = Heads("projector_heads", count, count, or_whole=True), width // count
    queries = c.count("max_value_projector_patch_to_query_dict", default=256)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    at = "@multi_modal_projector"
    t.tensor(f"{at}.query", queries, width, role="vision")
    for name in ("q_proj", "k_proj", "v_proj"):
        t.whole(f"{at}.cross_attn.{name}.weight", width, width, why=SEEN_BY_ALL)
    own = f"{at}.cross_attn.multihead_attn"
    t.tensor(f"{own}.in_proj_weight", heads.query(size) + heads.kv(size) * 2, width, role="qkv")
    t.tensor(f"{own}.in_proj_bias", heads.query(size) + heads.kv(size) * 2, role="qkv_bias")
    t.linear(f"{own}.out_proj", width, heads.query(size), role="o", bias=True)
    t.linear(f"{at}.cross_attn.linear", width, width, role="embed_projection", bias=True)
    for norm in ("cross_attn.layer_norm", "cross_attn.layer_norm_kv", "layer_norm"):
        t.norm(f"{at}.{norm}", width, bias=True)
    projector(
        t, f"{at}.feed_forward", width, hidden, hidden, bias=False, names=("linear_in", "linear_out")
    )
    return t
