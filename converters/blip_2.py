"""BLIP-2 and InstructBLIP: a tower, queries that look at it (Q-Former), one matrix, and a language model of any kind.

The Q-Former is BERT with attention to the patches in every second layer, and feed-forwards of their own for queries and
for words; BLIP-2's sees no words. The language model is OPT, T5 or Llama.
Source: transformers ``models/{blip_2,instructblip,instructblipvideo}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import include_tower, whole_projector
from tpshard.blocks.dense import attention, channels_of, heads_of, mlp, vocabulary_of
from tpshard.blocks.encoders import embeddings, layer_norms
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "blip_2"
VISION = {  # the tower's model type
    "blip-2": "blip_2_vision_model",
    "instructblip": "instructblip_vision_model",
    "instructblipvideo": "instructblipvideo_vision_model",
}
_QFORMER = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "intermediate_size": 3072, "max_position_embeddings": 512, "cross_attention_frequency": 2,
            "encoder_hidden_size": 1408}  # fmt: skip
USUAL = dict.fromkeys(("blip_2_qformer", "instructblip_qformer", "instructblipvideo_qformer"), _QFORMER)
MODEL_TYPES = (*VISION, "blip_2_qformer", "instructblip_qformer", "instructblipvideo_qformer")
LANGUAGE = tuple((f"language_model.{inner}", "language_model.") for inner in ("model.decoder.", "model.", ""))


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return _qformer(c)
    tower = part_of(c, "vision_config", model_type=VISION[c.model_type])
    kind = f"{c.model_type.replace('-', '_')}_qformer"
    released = part_of(c, "qformer_config", model_type=kind)
    qformer = Config({**released.values, "encoder_hidden_size": tower.count("hidden_size")})  # whatever the part says
    text = part_of(c, "text_config", model_type="opt")
    hidden = qformer.count("hidden_size")

    t = Table(0)
    t.include(table_of(text), *LANGUAGE)
    include_tower(t, tower, "vision_model")
    t.include(table_of(qformer), ("qformer.", "qformer."), axes="qformer_", or_whole=True)
    t.tensor("query_tokens", 1, c.count("num_query_tokens", default=32), hidden, role="vision")
    whole_projector(t, "language_projection", hidden, text.count("hidden_size", "d_model"))
    return t


def _qformer(c: Config) -> Table:
    hidden, heads, every = c.count("hidden_size"), heads_of(c), c.count("cross_attention_frequency")
    size, layer, ffn = c.head_dim(heads.query_heads), "@encoder.layer.{layer}", channels_of(c)
    words = c.model_type != "blip_2_qformer" or c.flag("use_qformer_text_input", default=False)

    t = Table(c.count("num_hidden_layers"))
    if c.model_type == "blip_2_qformer":
        layer_norms(t, ["@layernorm"], hidden)
    else:
        embeddings(t, c, vocabulary_of(c), hidden, types=False, norm="layernorm")
    crossing = range(0, t.layers, every)
    for at, layers, source in (
        ("attention", range(t.layers), hidden),
        ("crossattention", crossing, c.count("encoder_hidden_size")),
    ):
        with t.only(layers):
            attention(
                t, f"{layer}.{at}", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
                names=("attention.query", "attention.key", "attention.value", "output.dense"), kv_from=source,
            )  # fmt: skip
            layer_norms(t, [f"{layer}.{at}.output.LayerNorm"], hidden)
    for kind in ("_query", "") if words else ("_query",):
        mlp(t, layer, ffn, hidden, names=(f"intermediate{kind}.dense", f"output{kind}.dense"))
        layer_norms(t, [f"{layer}.output{kind}.LayerNorm"], hidden)
    return t
