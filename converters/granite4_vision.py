"""Granite 4 Vision: a tower, and querying transformers that bring what it sees into several layers of its model.

There is one for every pair of a tower's and a language model's layer, and one for each corner of two by two patches.
Source: transformers ``models/granite4_vision/modeling_granite4_vision.py``, ``models/blip_2`` (``Blip2QFormerModel``).
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config
from tpshard.blocks.dense import attention, mlp
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "granite4_vision"
MODEL_TYPES = ("granite4_vision",)
QFORMER = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 1, "num_attention_heads": 12,
           "cross_attention_frequency": 1, "encoder_hidden_size": 1408}  # fmt: skip
CORNERS = 4


def table(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="granite4_vision_text")
    tower = part_of(c, "vision_config", model_type="clip_vision_model")
    pairs = c.get("deepstack_layer_map")
    if not isinstance(pairs, list):
        raise DamagedError(f"config.json: 'deepstack_layer_map' is {pairs!r:.80}, not a list of pairs; restore it")
    qformer = c.nested("qformer_config", **QFORMER)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    t.tensor("@image_newline", text.count("hidden_size"), role="vision")
    count = qformer.count("num_attention_heads")
    heads = Heads("qformer_heads", count, count, or_whole=True)
    ffn = Units("qformer_ffn", qformer.count("intermediate_size"), noun="feed-forward channels", or_whole=True)
    for name, number in (("layerwise_projectors", len(pairs)), ("spatial_projectors", CORNERS)):
        with t.stack(number, prefixes=MODEL):
            _projector(t, f"@{name}.{{layer}}", qformer, heads, ffn, tower.count("hidden_size"), text)
    return t


def _projector(t: Table, at: str, c: Config, heads: Heads, ffn: Units, width: int, text: Config) -> None:
    hidden = c.count("hidden_size")
    size, source = hidden // heads.query_heads, c.count("encoder_hidden_size")
    for name in ("query", "image_positions"):
        t.tensor(f"{at}.{name}", 1, None, width, role="position")
    t.norm(f"{at}.norm", width, bias=True)
    t.linear(f"{at}.out_linear", text.count("hidden_size"), width, role="vision", bias=True)
    t.norm(f"{at}.qformer.layernorm", hidden, bias=True)
    for number in range(c.count("num_hidden_layers")):
        layer = f"{at}.qformer.encoder.layer.{number}"
        crosses = number % c.count("cross_attention_frequency") == 0
        for block, of in (("attention", hidden), ("crossattention", source))[: 1 + crosses]:
            attention(
                t, f"{layer}.{block}", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
                names=("attention.query", "attention.key", "attention.value", "output.dense"), kv_from=of,
            )  # fmt: skip
            t.norm(f"{layer}.{block}.output.LayerNorm", hidden, bias=True)
        mlp(t, layer, ffn.each(), hidden, names=("intermediate_query.dense", "output_query.dense"))
        t.norm(f"{layer}.output_query.LayerNorm", hidden, bias=True)
