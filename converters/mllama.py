"""Llama 3.2 Vision: some layers of the language model attend to the image instead of the text.

The embedding has eight rows more than the head. A layer of cross attention has gates of its own, one number each.
Source: transformers ``models/mllama/modeling_mllama.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, whole_projector
from tpshard.blocks.dense import attention, channels_of, gated_mlp, heads_of, norms, vocabulary_of
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "mllama"
MODEL_TYPES = ("mllama", "mllama_text_model")
USUAL = {
    "mllama_text_model": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
                          "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
CROSS = [3, 8, 13, 18, 23, 28, 33, 38]


def table(c: Config) -> Table:
    if c.model_type == "mllama_text_model":
        return _language(c)
    text = language_config(c, "text_config", model_type="mllama_text_model")
    tower = part_of(c, "vision_config", model_type="mllama_vision_model")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_model")
    whole_projector(t, "@multi_modal_projector", tower.count("vision_output_dim"), text.count("hidden_size"))
    return t


def _language(c: Config) -> Table:
    hidden, heads, layers = c.count("hidden_size"), heads_of(c), c.count("num_hidden_layers")
    size = c.head_dim(heads.query_heads)
    cross = c.get("cross_attention_layers", default=CROSS)
    if not isinstance(cross, list) or not all(isinstance(layer, int) for layer in cross):
        raise DamagedError(f"config.json: 'cross_attention_layers' is {cross!r:.80}, not whole numbers; restore it")

    t = Table(layers, prefixes=("model.", "language_model.model.", ""))
    embedded = Padded("embed_vocab", c.count("vocab_size") + 8)
    t.embedding("@embed_tokens", embedded.each(), hidden)
    layer = "@layers.{layer}"
    with t.only(set(range(layers)) - set(cross)):
        attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden)
    with t.only(set(range(layers)) & set(cross)):
        attention(t, f"{layer}.cross_attn", heads.query(size), heads.kv(size), hidden)
        norms(t, f"{layer}.cross_attn", ("q_norm", "k_norm"), size)
        for gate in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
            t.whole(f"{layer}.{gate}", 1, why="a scale of the summed output")
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    t.norm("@norm", hidden)
    t.head("lm_head", vocabulary_of(c), hidden, tied_to=None)
    return t
