"""Moshi's language model: projections in a module of their own (``q_proj.linear``), gate and up as ``fc1``.

The embedding has one row more than the head: the word before the first. Moshi as a whole has embeddings of the codes,
a codec, and a small decoder that writes a step's codes one by one, with a matrix for every one in one tensor.
Source: transformers ``models/moshi/modeling_moshi.py`` (``MoshiLinear``, ``MoshiFlexibleLinear``, ``MoshiGatingMLP``).
"""

from __future__ import annotations

from tpshard.axes import Padded, Units
from tpshard.blocks.dense import attention, fused_mlp, heads_of, norms, vocabulary_of
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "moshi"
MODEL_TYPES = ("moshi",)
DEPTH = {"vocab_size": 32000, "hidden_size": 1024, "input_size": 4096, "num_hidden_layers": 6, "ffn_dim": 5632,
         "num_attention_heads": 16, "audio_vocab_size": 2048, "num_codebooks": 8}  # fmt: skip
FIRST = "one row for every word and the one before the first, which the small decoder starts from"
NORMS = ("input_layernorm", "post_attention_layernorm")


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads)
    ffn = Units("ffn", c.count("ffn_dim") // 2, noun="feed-forward channels").each()
    rows = Padded("embedding rows", c.count("vocab_size") + 1, noun="rows of words and the first").each()

    t = Table(c.count("num_hidden_layers"), prefixes=("model.", ("decoder.model.", "decoder."), ""))
    t.embedding("@embed_tokens", rows, hidden)
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        names=("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"),
    )  # fmt: skip
    fused_mlp(t, f"{layer}.mlp", ffn, hidden, names=("fc1", "fc2"))
    norms(t, layer, NORMS, hidden)
    t.norm("@norm", hidden)
    t.head("lm_head", vocabulary_of(c), hidden, tied_to=None)
    if c.get("depth_decoder_config") is not None and c.get("audio_encoder_config") is not None:
        _beside(t, c, hidden)
    return t


def _beside(t: Table, c: Config, hidden: int) -> None:
    """What Moshi as a whole has beside the language model; files of the latter alone have none of it."""
    alone = not any("Conditional" in str(name) for name in c.get("architectures", default=()))
    depth = c.nested("depth_decoder_config", **DEPTH)
    codes = Padded("codes", c.count("audio_vocab_size", default=2048) + 1, noun="codes and the first").each()
    with t.stack(2 * c.count("num_codebooks", default=8), optional=alone):
        t.embedding("embed_tokens.{layer}", codes, hidden)
    t.include(_depth(depth), ("depth_decoder.", "depth_decoder."), axes="depth_", or_whole=True, optional=alone)
    codec = part_of(c, "audio_encoder_config", model_type="mimi")
    t.include(table_of(codec), ("audio_encoder.", "audio_encoder."), axes="codec_", or_whole=True, optional=alone)


def _depth(c: Config) -> Table:
    """The small decoder: every matrix ``[codebooks, out, in]``, cut like a layer's own."""
    hidden, heads, books = c.count("hidden_size"), heads_of(c), c.count("num_codebooks")
    size, layer = c.head_dim(heads.query_heads), "@layers.{layer}"
    ffn = Units("ffn", c.count("ffn_dim") // 2, noun="feed-forward channels").each()
    codes = c.count("audio_vocab_size")

    t = Table(c.count("num_hidden_layers"))
    words = Padded("words", c.count("vocab_size") + 1, noun="rows of words and the first").each()
    t.embedding("@text_embed_tokens", words, hidden)
    with t.stack(books - 1):
        rows = Padded("codes", codes + 1, noun="codes and the first").each()
        t.embedding("embed_tokens.{layer}", rows, hidden)
    why = "one small matrix for every code: a cut would need a gather of all it makes"
    t.whole("@input_projections.weight", books, hidden, c.count("input_size"), why=why)
    at = f"{layer}.self_attn"
    for name, rows_of, role in (("q", heads.query(size), "q"), ("k", heads.kv(size), "k"), ("v", heads.kv(size), "v")):
        t.tensor(f"{at}.{name}_proj.linear.weight", books, rows_of, hidden, role=role)
    t.tensor(f"{at}.o_proj.linear.weight", books, hidden, heads.query(size), role="o")
    t.tensor(f"{layer}.mlp.fc1.weight", books, ffn * 2, hidden, role="gate_up")
    t.tensor(f"{layer}.mlp.fc2.weight", books, hidden, ffn, role="down")
    norms(t, layer, NORMS, hidden)
    t.tensor("@lm_heads.weight", books, Padded("vocab", codes, noun="codes").each(), hidden, role="head")
    return t
