"""Pix2Struct: T5's decoder over a vision encoder that takes flattened patches.

Source: transformers ``models/pix2struct/modeling_pix2struct.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import attention, gated_mlp, norms
from tpshard.blocks.t5 import RELATIVE
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "pix2struct"
MODEL_TYPES = ("pix2struct",)
TEXT = {
    "vocab_size": 50244, "hidden_size": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12,
    "relative_attention_num_buckets": 32,
}  # fmt: skip
VISION = {
    "hidden_size": 768, "patch_embed_hidden_size": 768, "d_ff": 2048, "d_kv": 64, "num_hidden_layers": 12,
    "num_attention_heads": 12, "seq_len": 4096,
}  # fmt: skip
NAMES = ("query", "key", "value", "output")
GATED = ("wi_0", "wi_1", "wo")


def table(c: Config) -> Table:
    t = Table(0)
    _decoder(c.nested("text_config", **TEXT), t, c)
    _encoder(c.nested("vision_config", **VISION), t)
    return t


def _decoder(c: Config, t: Table, whole: Config) -> None:
    width, count, size = c.count("hidden_size"), c.count("num_heads"), c.count("d_kv")
    heads, vocab = Heads("heads", count, count), Padded("vocab", c.count("vocab_size")).each()
    ffn = Units("ffn", c.count("d_ff"), noun="feed-forward channels").each()
    tied = whole.flag("tie_word_embeddings", default=False)
    with t.stack(c.count("num_layers"), prefixes=("decoder.", "")):
        t.shared("@embed_tokens.weight", heads=("@lm_head.weight",) if tied else (), vocab=vocab, width=width)
        if not tied:
            t.tensor("@lm_head.weight", vocab, width, role="head")
        layer = "@layer.{layer}"
        for at in ("self_attention", "encoder_decoder_attention"):
            attention(t, f"{layer}.{at}.attention", heads.query(size), heads.kv(size), width, names=NAMES)
            t.norm(f"{layer}.{at}.layer_norm", width)
        with t.only(range(1)):
            buckets = c.count("relative_attention_num_buckets")
            t.tensor(f"{layer}.self_attention.attention.{RELATIVE}.weight", buckets, heads.query(1), role="attn_head")
        gated_mlp(t, f"{layer}.mlp.DenseReluDense", ffn, width, names=GATED)
        t.norm(f"{layer}.mlp.layer_norm", width)
        t.norm("@final_layer_norm", width)


def _encoder(c: Config, t: Table) -> None:
    width, count, size = c.count("hidden_size"), c.count("num_attention_heads"), c.count("d_kv")
    heads = Heads("vision_heads", count, count)
    ffn = Units("vision_ffn", c.count("d_ff"), noun="vision feed-forward channels").each()
    with t.stack(c.count("num_hidden_layers"), prefixes=("encoder.",), optional=True):
        layer = "@encoder.layer.{layer}"
        attention(t, f"{layer}.attention", heads.query(size), heads.kv(size), width, names=NAMES)
        gated_mlp(t, f"{layer}.mlp", ffn, width, names=GATED)
        norms(t, layer, ("pre_attention_layer_norm", "pre_mlp_layer_norm"), width)
        why = "makes vectors of patches, which every rank needs whole"
        t.whole("@embeddings.patch_projection.weight", width, c.count("patch_embed_hidden_size"), why=why)
        t.whole("@embeddings.patch_projection.bias", width, why=why)
        for side in ("row", "column"):
            t.whole(f"@embeddings.{side}_embedder.weight", c.count("seq_len"), width, why="places of patches")
        t.norm("@layernorm", width)
