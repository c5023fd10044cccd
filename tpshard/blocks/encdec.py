"""The layers of encoder-decoders as fairseq names them, which BART and most after it kept.

An encoder layer is ``self_attn``, ``fc1`` and ``fc2``; a decoder layer has ``encoder_attn`` as well, whose keys
and values are made from what the encoder gives. Encoder and decoder are cut along axes of their own, for they
may have other numbers of heads. A checkpoint of one of the two holds no tensor of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tpshard.axes import Dim, Heads, Padded, Units
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.table import Prefix, Table

from .dense import attention, mlp

OUT = ("q_proj", "k_proj", "v_proj", "out_proj")


def head_size(width: int, heads: int) -> int:
    """Indices of one head of attention that is as wide as the model; raises DamagedError where heads do not divide."""
    if width % heads:
        raise DamagedError(f"config.json: {heads} attention heads do not divide the width {width}; correct the counts")
    return width // heads


def side_axes(c: Config, side: str, width: int) -> tuple[Heads, int, Dim]:
    """Heads, head size and feed-forward channels of the ``encoder`` or the ``decoder``."""
    query = c.count(f"{side}_attention_heads", f"num_{side}_attention_heads")
    heads = Heads(f"{side}_heads", query, query, noun=f"{side} heads", group_noun=f"{side} kv heads")
    ffn = Units(f"{side}_ffn", c.count(f"{side}_ffn_dim"), noun=f"{side} feed-forward channels").each()
    return heads, head_size(width, query), ffn


def lacks(c: Config, side: str) -> bool:
    """Whether checkpoints of the config's class may be without the ``encoder`` or the ``decoder``.

    The class is the first of ``architectures``: ``BartForCausalLM`` has no encoder, ``T5EncoderModel`` no decoder.
    Where the config does not name one, either may be missing.
    """
    named = c.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if not name:
        return True
    return "CausalLM" in name or "Decoder" in name if side == "encoder" else "Encoder" in name


def is_bare(c: Config) -> bool:
    """Whether the config's class is a model without an output head (``BartModel``), or is not named."""
    named = c.get("architectures")
    return not (isinstance(named, list) and named) or str(named[0]).endswith("Model")


@contextmanager
def side(c: Config, t: Table, name: str, layers: int, prefixes: Sequence[Prefix] = ("model.", "")) -> Iterator[str]:
    """A stack for the ``encoder`` or the ``decoder``; gives the name of one of its layers."""
    with t.stack(layers, prefixes=prefixes, optional=lacks(c, name)):
        yield f"@{name}.layers.{{layer}}"


def attend(
    t: Table,
    at: str,
    heads: Heads,
    size: int,
    width: int,
    *,
    kv_from: int | None = None,
    bias: bool = True,
    key_bias: bool | None = None,
    names: tuple[str, str, str, str] = OUT,
) -> None:
    """Attention below the module ``at`` and the norm beside it; ``key_bias`` where the key's differs (Whisper)."""
    q, kv = heads.query(size), heads.kv(size)
    if key_bias is None or key_bias == bias:
        attention(t, at, q, kv, width, bias=bias, out_bias=bias, names=names, kv_from=kv_from)
    else:
        source = width if kv_from is None else kv_from
        t.linear(f"{at}.{names[0]}", q, width, role="q", bias=bias)
        t.linear(f"{at}.{names[1]}", kv, source, role="k", bias=key_bias)
        t.linear(f"{at}.{names[2]}", kv, source, role="v", bias=bias)
        t.linear(f"{at}.{names[3]}", width, q, role="o", bias=bias)
    t.norm(f"{at}_layer_norm", width, bias=True)


def layer_of(
    t: Table,
    at: str,
    axes: tuple[Heads, int, Dim],
    width: int,
    *,
    cross: int | None = None,
    bias: bool = True,
    key_bias: bool | None = None,
    mlp_bias: bool = True,
) -> None:
    """One layer of BART: self attention, attention to what is ``cross`` wide (a decoder's), two matrices, norms."""
    heads, size, ffn = axes
    attend(t, f"{at}.self_attn", heads, size, width, bias=bias, key_bias=key_bias)
    if cross is not None:
        attend(t, f"{at}.encoder_attn", heads, size, width, kv_from=cross, bias=bias, key_bias=key_bias)
    mlp(t, at, ffn, width, bias=mlp_bias)
    t.norm(f"{at}.final_layer_norm", width, bias=True)


def vocabulary(c: Config, t: Table, width: int) -> None:
    """The embedding under its names and the head tied to it; Marian may have one for each language.

    ``t``'s own stack has the prefixes of ``shared``. The bias of the logits that most of BART's kin store is whole.
    """
    vocab = target = Padded("vocab", c.count("vocab_size")).each()
    tied = c.flag("tie_word_embeddings", default=True)
    heads = ("lm_head.weight",) if tied else ()
    names = ("@shared.weight", "@encoder.embed_tokens.weight", "@decoder.embed_tokens.weight")
    if c.flag("share_encoder_decoder_embeddings", default=True):
        t.shared(*names, heads=heads, vocab=vocab, width=width)
    else:
        count = c.count("decoder_vocab_size", default=c.count("vocab_size"))
        target = Padded("decoder_vocab", count, noun="target vocabulary rows").each()
        t.embedding("@encoder.embed_tokens", vocab, width)
        t.shared("@decoder.embed_tokens.weight", heads=heads, vocab=target, width=width)
    if not tied:
        t.tensor("lm_head.weight", target, width, role="head", optional=is_bare(c))
    why = "one value a word, which the model adds to the gathered logits"
    t.whole("final_logits_bias", 1, target.extent, why=why, optional=True)
