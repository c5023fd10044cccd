"""FSMT: fairseq's translators, with a vocabulary for each language.

The target embedding, the head (``output_projection``) and, where both languages share a vocabulary, the source
embedding are often one tensor. Source: transformers ``models/fsmt/modeling_fsmt.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.encdec import layer_of, side, side_axes
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "fsmt"
MODEL_TYPES = ("fsmt",)


def table(c: Config) -> Table:
    width = c.count("d_model")
    source = Padded("source_vocab", c.count("src_vocab_size"), noun="source vocabulary rows").each()
    target = Padded("vocab", c.count("tgt_vocab_size")).each()
    t = Table(0, prefixes=("model.", ""))
    names, head = ("@decoder.embed_tokens.weight", "@encoder.embed_tokens.weight"), "@decoder.output_projection.weight"
    if c.flag("tie_word_embeddings", default=True):  # the source's embedding too, where both have as many words
        same = source.extent == target.extent
        t.shared(*names[: 2 if same else 1], heads=(head,), vocab=target, width=width)
        if not same:
            t.tensor(names[1], source, width, role="embed")
    else:
        t.tensor(names[0], target, width, role="embed")
        t.tensor(names[1], source, width, role="embed")
        t.tensor(head, target, width, role="head")
    for name in ("encoder", "decoder"):
        axes = side_axes(c, name, width)
        with side(c, t, name, c.count(f"{name}_layers")) as layer:
            layer_of(t, layer, axes, width, cross=width if name == "decoder" else None)
            t.tensor(f"@{name}.embed_positions.weight", None, width, role="position", optional=True)  # sinusoids
    return t
