"""RWKV-4: a recurrence channel by channel, and a feed-forward whose sum is gated by all channels.

That gate (``receptance``) is cut and put together, since what it is multiplied with is whole after the sum.
Source: transformers ``models/rwkv/modeling_rwkv.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import vocabulary_of
from tpshard.config import Config
from tpshard.table import NEEDS_GATHER, Table

FAMILY = "rwkv"
MODEL_TYPES = ("rwkv",)


def table(c: Config) -> Table:
    hidden, vocab = c.count("hidden_size"), vocabulary_of(c)
    channels = Units("linear_channels", c.count("attention_hidden_size", default=hidden), noun="channels").each()
    ffn = Units("ffn", c.count("intermediate_size", default=4 * hidden), noun="feed-forward channels").each()
    gate = Units("gate_channels", hidden, noun="channels of the feed-forward's gate", or_whole=True).each()

    t = Table(c.count("num_hidden_layers"), prefixes=("rwkv.", ""))
    t.embedding("@embeddings", vocab, hidden)
    layer, why = "@blocks.{layer}", "how tokens mix before everything is made of them"
    with t.only([0]):
        t.norm(f"{layer}.pre_ln", hidden, bias=True)
    for name in ("ln1", "ln2"):
        t.norm(f"{layer}.{name}", hidden, bias=True)
    at = f"{layer}.attention"
    for name in ("key", "value", "receptance"):
        t.whole(f"{at}.time_mix_{name}", 1, 1, hidden, why=why)
        t.linear(f"{at}.{name}", channels, hidden, role="linear_in")
    for name in ("time_decay", "time_first"):
        t.tensor(f"{at}.{name}", channels, role="linear_head")
    t.linear(f"{at}.output", hidden, channels, role="linear_out")
    at = f"{layer}.feed_forward"
    for name in ("key", "receptance"):
        t.whole(f"{at}.time_mix_{name}", 1, 1, hidden, why=why)
    t.linear(f"{at}.key", ffn, hidden, role="up")
    t.linear(f"{at}.value", hidden, ffn, role="down")
    t.linear(f"{at}.receptance", gate, hidden, role="gathered", note=NEEDS_GATHER)
    t.norm("@ln_out", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("head", vocab, hidden, tied_to="@embeddings.weight" if tied else None)
    return t
