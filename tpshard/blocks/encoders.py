"""What BERT and its descendants share: embeddings, the layer, and the head that fills in masked words.

Files that came from TensorFlow call a norm's weight ``gamma`` and its bias ``beta``; a checkpoint has one spelling.
A checkpoint of the bare encoder has no head; one of a head's class has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tpshard.axes import AnyDim, Dim, Units
from tpshard.config import Config
from tpshard.table import BEHIND_PADDING, Prefix, Table

from .dense import attention, heads_of, mlp

_NEW, _OLD = "norms", "norms with gamma and beta"


class Encoder(NamedTuple):
    """The dimensions of a BERT-like encoder: residual stream, heads, channels, vocabulary."""

    hidden: int
    q: Dim
    kv: Dim
    ffn: Dim
    vocab: Dim


def encoder_of(c: Config, vocab: Dim) -> Encoder:
    """Read them by the keys that transformers uses throughout."""
    heads = heads_of(c)
    size = c.head_dim(heads.query_heads)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    return Encoder(c.count("hidden_size"), heads.query(size), heads.kv(size), ffn, vocab)


def layer_norms(t: Table, names: Sequence[str], width: AnyDim, *, optional: bool = False, note: str = "") -> None:
    """Norms with a bias, in the one spelling or the other."""
    with t.block(_NEW):
        for name in names:
            t.tensor(f"{name}.weight", width, role="norm", optional=optional, note=note)
            t.tensor(f"{name}.bias", width, role="norm_bias", optional=optional, note=note)
    with t.block(_OLD):
        for name in names:
            t.tensor(f"{name}.gamma", width, role="norm", optional=optional, note=note)
            t.tensor(f"{name}.beta", width, role="norm_bias", optional=optional, note=note)
    t.one_of(_NEW, _OLD)


def embeddings(
    t: Table,
    c: Config,
    vocab: Dim,
    width: int,
    *,
    at: str = "@embeddings",
    offset: int = 0,
    positions: bool = True,
    types: bool = True,
    norm: str | None = "LayerNorm",
    behind_padding: bool = False,
) -> None:
    """Words, positions and types of tokens, and the norm over their sum, below the module ``at``.

    ``offset`` is how many more positions the table has than the config says; without ``positions`` the model
    has no table of them, without ``types`` none of types, with ``norm`` None no norm; ``behind_padding`` says that
    the first token's position is not 0 but that behind the padding token's id.
    """
    t.embedding(f"{at}.word_embeddings", vocab, width)
    if positions:
        count = c.count("max_position_embeddings", default=512) + offset
        note = BEHIND_PADDING if behind_padding else ""
        t.embedding(f"{at}.position_embeddings", count, width, role="position", note=note)
        t.tensor(f"{at}.position_ids", 1, None, role="buffer", optional=True)  # files before 2023
    if types and c.number("type_vocab_size", default=2):
        t.embedding(f"{at}.token_type_embeddings", c.count("type_vocab_size", default=2), width, role="position")
    if norm is not None:
        layer_norms(t, [f"{at}.{norm}"], width)


def encoder_layer(
    t: Table,
    e: Encoder,
    layer: str = "@encoder.layer.{layer}",
    *,
    norms: Sequence[str] = ("attention.output.LayerNorm", "output.LayerNorm"),
    cross: bool = False,
    bias: bool = True,
) -> None:
    """BERT's layer: ``attention.self``, ``attention.output``, ``intermediate``, ``output``, and its ``norms``.

    With ``cross`` the layer has attention to an encoder's output as well; ``bias`` is that of q, k and v.
    """
    for at in ("attention", "crossattention") if cross else ("attention",):
        names = ("self.query", "self.key", "self.value", "output.dense")
        attention(t, f"{layer}.{at}", e.q, e.kv, e.hidden, bias=bias, out_bias=True, names=names)
    mlp(t, layer, e.ffn, e.hidden, names=("intermediate.dense", "output.dense"))
    more = [norm.replace("attention", "crossattention", 1) for norm in norms if "attention" in norm] if cross else []
    layer_norms(t, [f"{layer}.{norm}" for norm in (*norms, *more)], e.hidden)


def pooler(t: Table, hidden: int, *, at: str = "@pooler.dense") -> None:
    """The matrix that makes a sentence's vector of its first token's; bare encoders may lack it."""
    t.linear(at, hidden, hidden, role="pooler", bias=None, optional=True)


def task_heads(t: Table, hidden: int) -> None:
    """Small matrices of the classes that judge sentences or words (rerankers, tagging, answers in a text)."""
    for name in ("classifier", "qa_outputs", "classifier.out_proj"):
        t.linear(name, None, hidden, role="pooler", bias=None, optional=True)
    t.linear("classifier.dense", hidden, hidden, role="pooler", bias=None, optional=True)


def masked_head(
    t: Table,
    hidden: int,
    width: int,
    vocab: Dim,
    *,
    at: str = "cls.predictions",
    dense: str = "transform.dense",
    norm: str = "transform.LayerNorm",
    decoder: str = "decoder",
    tied_to: str | None,
    bias_after: bool = False,
    prefixes: Sequence[Prefix] = ("",),
) -> None:
    """A matrix to the width of the embedding, a norm, and the decoder to the vocabulary, with a bias.

    The decoder's bias has two names in memory, ``AT.decoder.bias`` and ``AT.bias``; files hold either or both.
    With ``bias_after`` the model itself adds ``AT.bias``, to the logits of all ranks. ``tied_to`` is the embedding,
    where the decoder is that.
    """
    with t.stack(optional=True, prefixes=prefixes):
        t.linear(f"{at}.{dense}", width, hidden, role="head_projection", bias=True)
        layer_norms(t, [f"{at}.{norm}"], width)
        t.tensor(f"{at}.{decoder}.weight", vocab, width, role="head", optional=tied_to is not None)
        t.tensor(f"{at}.{decoder}.bias", vocab, role="head_bias", optional=True)
        if bias_after:
            t.whole(f"{at}.bias", vocab.extent, why="added to the gathered logits")
        else:
            t.tensor(f"{at}.bias", vocab, role="head_bias", optional=True)
    if tied_to is not None:
        t.tie(f"{at}.{decoder}.weight", tied_to)


def roberta_head(t: Table, c: Config, hidden: int, vocab: Dim, *, bias_after: bool = False) -> None:
    """RoBERTa's ``lm_head``: a matrix, a norm, and the decoder, tied to the embedding unless the config unties it."""
    tied = c.flag("tie_word_embeddings", default=True)
    masked_head(
        t, hidden, hidden, vocab, at="lm_head", dense="dense", norm="layer_norm", bias_after=bias_after,
        tied_to="@embeddings.word_embeddings.weight" if tied else None,
    )  # fmt: skip
