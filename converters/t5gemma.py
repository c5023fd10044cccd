"""T5Gemma: an encoder and a decoder of Gemma 2's layers, of which either may have its own size.

Source: transformers ``models/t5gemma/modeling_t5gemma.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded, Units
from tpshard.blocks.dense import attention, gated_mlp, heads_of, norms
from tpshard.blocks.encdec import is_bare, lacks
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "t5gemma"
MODEL_TYPES = ("t5gemma",)
USUAL = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip


def table(c: Config) -> Table:
    t = Table(0)
    widths = {side: c.nested(side, **USUAL).count("hidden_size") for side in ("encoder", "decoder")}
    for side in ("encoder", "decoder"):
        with t.stack(
            c.nested(side, **USUAL).count("num_hidden_layers"),
            prefixes=(f"model.{side}.", f"{side}."), optional=lacks(c, side),
        ):  # fmt: skip
            _side(c.nested(side, **USUAL), t, side, widths["encoder"])
    vocab = Padded("vocab", c.nested("decoder", **USUAL).count("vocab_size")).each()
    with t.stack(prefixes=("model.decoder.", "decoder."), optional=lacks(c, "decoder")):
        tied = c.flag("tie_word_embeddings", default=True)
        heads = ("lm_head.out_proj.weight",) if tied else ()
        t.shared("@embed_tokens.weight", heads=heads, vocab=vocab, width=widths["decoder"])
        if not tied:
            t.tensor("lm_head.out_proj.weight", vocab, widths["decoder"], role="head", optional=is_bare(c))
    return t


def _side(own: Config, t: Table, side: str, encoder_width: int) -> None:
    hidden = own.count("hidden_size")
    heads = heads_of(own).renamed(f"{side}_heads", False)
    size = own.head_dim(own.count("num_attention_heads"))
    q, kv = heads.query(size), heads.kv(size)
    bias = own.flag("attention_bias", default=False)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", q, kv, hidden, bias=bias, out_bias=bias)
    around = ["self_attn", "feedforward"]
    if side == "decoder":
        attention(t, f"{layer}.cross_attn", q, kv, hidden, bias=bias, out_bias=bias, kv_from=encoder_width)
        around.append("cross_attn")
    else:
        t.embedding("@embed_tokens", Padded("encoder_vocab", own.count("vocab_size")).each(), hidden)
    ffn = Units(f"{side}_ffn", own.count("intermediate_size"), noun=f"{side} feed-forward channels").each()
    gated_mlp(t, f"{layer}.mlp", ffn, hidden)
    norms(t, layer, [f"{when}_{what}_layernorm" for what in around for when in ("pre", "post")], hidden)
    t.norm("@norm", hidden)
