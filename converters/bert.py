"""BERT, and encoders that differ from it in what they add to the embeddings: layout, tables, glyphs, tasks.

Biases everywhere, the norms after the sums, positions and the pooler whole. The heads of pre-training are cut where
they are there: the decoder along the vocabulary, the rest whole. BigBird's sparse attention has BERT's tensors.
Source: transformers ``models/{bert,ernie,big_bird,layoutlm,roc_bert,tapas}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, masked_head, pooler, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "bert"
MODEL_TYPES = ("bert", "big_bird", "ernie", "layoutlm", "roc_bert", "tapas")


def table(c: Config) -> Table:
    kind, vocab = c.model_type, vocabulary_of(c)
    e = encoder_of(c, vocab)
    prefix = "bert." if kind == "big_bird" else f"{kind}."

    t = Table(c.count("num_hidden_layers"), prefixes=(prefix, ""))
    embeddings(t, c, vocab, e.hidden, types=kind != "tapas")
    _more_embeddings(t, c, e.hidden)
    encoder_layer(
        t, e, bias=c.flag("use_bias", default=True), cross=c.flag("add_cross_attention", default=False)
    )
    pooler(t, e.hidden, at="@pooler" if kind == "big_bird" else "@pooler.dense")
    tied = c.flag("tie_word_embeddings", default=True)
    masked_head(t, e.hidden, e.hidden, vocab, tied_to="@embeddings.word_embeddings.weight" if tied else None)
    t.linear("cls.seq_relationship", 2, e.hidden, role="pooler", bias=None, optional=True)
    task_heads(t, e.hidden)
    return t


def _more_embeddings(t: Table, c: Config, hidden: int) -> None:
    if c.model_type == "layoutlm":
        for side in "xyhw":
            size = c.count("max_2d_position_embeddings", default=1024)
            t.embedding(f"@embeddings.{side}_position_embeddings", size, hidden, role="position")
    if c.model_type == "ernie" and c.flag("use_task_id", default=False):
        tasks = c.count("task_type_vocab_size", default=3)
        t.whole("@embeddings.task_type_embeddings.weight", tasks, hidden, why="a vector for each kind of task")
    if c.model_type == "tapas":
        for number, size in enumerate(c.get("type_vocab_sizes", default=[3, 256, 256, 2, 256, 256, 10])):
            t.embedding(f"@embeddings.token_type_embeddings_{number}", size, hidden, role="position")
    if c.model_type == "roc_bert":
        width = hidden
        for glyph, rows, size in (("pronunciation", 910, 768), ("shape", 24858, 512)):
            if c.flag(f"enable_{glyph}", default=True):
                own = c.count(f"{glyph}_embed_dim", default=size)
                axis = Padded(glyph, c.count(f"{glyph}_vocab_size", default=rows), noun=f"rows of {glyph}")
                t.embedding(f"@embeddings.{glyph}_embed", axis.each(), own)
                width += own
        if c.flag("concat_input", default=True):
            t.linear("@embeddings.map_inputs_layer", hidden, width, role="embed_projection", bias=True)
