"""T5's stacks: attention without scaling or biases, a table of relative positions with a column for every head.

Heads are ``d_kv`` wide, whatever the model's width. The table is held by the first layer and serves all of them (in
UMT5 each layer has its own). Source: transformers ``models/t5/modeling_t5.py``, arXiv 1910.10683.
"""

from __future__ import annotations

from collections.abc import Callable

from tpshard.axes import Dim, Heads, Padded
from tpshard.config import Config
from tpshard.table import Table

from .dense import attention, channels_of, gated_mlp
from .encdec import is_bare, lacks

QKVO = ("q", "k", "v", "o")
RELATIVE = "relative_attention_bias"
MlpRules = Callable[[Table, str, Dim], None]


def is_gated(c: Config, usual: str) -> bool:
    """Whether the feed-forward has a gate; ``usual`` is the family's ``feed_forward_proj``."""
    return str(c.get("feed_forward_proj", default=usual)).startswith("gated-")


def heads_of(c: Config) -> Heads:
    """The attention heads, as many in the encoder as in the decoder."""
    return Heads("heads", c.count("num_heads"), c.count("num_heads"))


def vocabulary(c: Config, t: Table, width: int, *, tied: bool) -> None:
    """The embedding under its three names, and the head; ``tied`` is the family's ``tie_word_embeddings``."""
    vocab = Padded("vocab", c.count("vocab_size")).each()
    is_tied = c.flag("tie_word_embeddings", default=tied)
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    t.shared(*(f"@{name}" for name in names), heads=("lm_head.weight",) if is_tied else (), vocab=vocab, width=width)
    if not is_tied:
        t.tensor("lm_head.weight", vocab, width, role="head", optional=is_bare(c))


def t5_attention(t: Table, at: str, heads: Heads, size: int, width: int) -> None:
    """``q``, ``k``, ``v`` and ``o`` below the module ``at``."""
    attention(t, at, heads.query(size), heads.kv(size), width, names=QKVO)


def t5_mlp(gated: bool, width: int, at: str = "DenseReluDense") -> MlpRules:
    """Rules of a layer's feed-forward: ``wi`` and ``wo``, or ``wi_0``, ``wi_1`` and ``wo``."""

    def rules(t: Table, layer: str, ffn: Dim) -> None:
        if gated:
            gated_mlp(t, f"{layer}.{at}", ffn, width, names=("wi_0", "wi_1", "wo"))
        else:
            t.linear(f"{layer}.{at}.wi", ffn, width, role="up")
            t.linear(f"{layer}.{at}.wo", width, ffn, role="down")

    return rules


def t5_stack(c: Config, t: Table, side: str, mlp: MlpRules, *, every_layer: bool = False, kind: str = "") -> None:
    """The ``encoder`` or the ``decoder``.

    Args:
        every_layer: whether every layer has a table of relative positions, not the first alone.
        kind: what the encoder's attention is called before ``SelfAttention`` (``Local``).
    """
    width, size = c.count("d_model"), c.count("d_kv")
    heads, ffn = heads_of(c), channels_of(c, "d_ff")
    layers = c.count("num_layers")
    if side == "decoder":
        layers = c.count("num_decoder_layers", default=layers)
    block = f"@{side}.block.{{layer}}.layer"
    with t.stack(layers, prefixes=("", "transformer."), optional=lacks(c, side)):
        own = f"{block}.0.{kind}SelfAttention"
        t5_attention(t, own, heads, size, width)
        buckets = c.count("relative_attention_num_buckets", default=32)
        with t.only(range(layers if every_layer else 1)):
            tables = [RELATIVE, f"global_{RELATIVE}"] if kind == "TransientGlobal" else [RELATIVE]
            for table in tables:
                t.tensor(f"{own}.{table}.weight", buckets, heads.query(1), role="attn_head")
        if kind == "TransientGlobal":
            t.norm(f"{own}.global_input_layer_norm", width)
        last = 1
        if side == "decoder":
            last = 2
            cross = f"{block}.1.EncDecAttention"
            t5_attention(t, cross, heads, size, width)
            t.tensor(  # in files from before 2020, read by nothing
                f"{cross}.{RELATIVE}.weight", buckets, heads.query(1), role="attn_head", optional=True
            )
        mlp(t, f"{block}.{last}", ffn)
        for number in range(last + 1):
            t.norm(f"{block}.{number}.layer_norm", width)
        t.norm(f"@{side}.final_layer_norm", width)
