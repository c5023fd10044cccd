"""BART and its kin: encoder and decoder of fairseq, one vocabulary, learned or sinusoidal positions.

Source: transformers ``models/bart``, ``mbart``, ``plbart``, ``mvp``, ``blenderbot``, ``blenderbot_small``,
``pegasus``, ``marian``, ``m2m_100`` (``modeling_*.py``).
"""

from __future__ import annotations

from typing import NamedTuple

from tpshard.config import Config
from tpshard.encdec import layer_of, side, side_axes
from tpshard.partition import Dim, Padded
from tpshard.table import Table

FAMILY = "bart"


class Build(NamedTuple):
    """What a model type has. ``offset``: rows of the position table before position 0; None: sinusoids, seldom saved."""

    offset: int | None = 0
    norm_first: bool = False  # ``layernorm_embedding``
    norm_last: bool = False  # ``layer_norm``


BUILDS = {
    "bart": Build(2, norm_first=True),
    "plbart": Build(2, norm_first=True),
    "mvp": Build(2, norm_first=True),
    "mbart": Build(2, norm_first=True, norm_last=True),
    "blenderbot": Build(norm_last=True),
    "blenderbot-small": Build(norm_first=True),
    "pegasus": Build(None, norm_last=True),
    "m2m_100": Build(None, norm_last=True),
    "marian": Build(None),
}
MODEL_TYPES = tuple(BUILDS)


def table(c: Config) -> Table:
    build, width = BUILDS[c.model_type], c.count("d_model")
    t = Table(0, prefixes=("model.", ""))
    _vocabulary(c, t, width)
    for name in ("encoder", "decoder"):
        axes = side_axes(c, name, width)
        with side(c, t, name, c.count(f"{name}_layers")) as layer:
            layer_of(t, layer, axes, width, cross=width if name == "decoder" else None)
            positions = None if build.offset is None else c.count("max_position_embeddings") + build.offset
            sinusoids = build.offset is None
            t.tensor(f"@{name}.embed_positions.weight", positions, width, role="position", optional=sinusoids)
            t.tensor(f"@{name}.version", None, role="buffer", optional=True)  # files from before 2021
            if build.norm_first:
                t.norm(f"@{name}.layernorm_embedding", width, bias=True)
            if build.norm_last:
                t.norm(f"@{name}.layer_norm", width, bias=True)
            if c.flag("use_prompt", default=False):
                _prompts(c, t, name, width)
    return t


def _vocabulary(c: Config, t: Table, width: int) -> None:
    """The embedding under its names and the heads tied to it; Marian may have one for each language."""
    vocab = target = Padded("vocab", c.count("vocab_size")).each()
    one, tied = c.flag("share_encoder_decoder_embeddings", default=True), c.flag("tie_word_embeddings", default=True)
    heads = ("lm_head.weight",) if tied else ()
    if one:
        t.shared(
            "@shared.weight", "@encoder.embed_tokens.weight", "@decoder.embed_tokens.weight",
            heads=heads, vocab=vocab, width=width,
        )  # fmt: skip
    else:
        count = c.count("decoder_vocab_size", default=c.count("vocab_size"))
        target = Padded("decoder_vocab", count, noun="target vocabulary rows").each()
        t.embedding("@encoder.embed_tokens", vocab, width)
        t.shared("@decoder.embed_tokens.weight", heads=heads, vocab=target, width=width)
    if not tied:
        t.tensor("lm_head.weight", target, width, role="head", optional=True)
    _final_bias(t, target)


def _final_bias(t: Table, vocab: Dim) -> None:
    why = "one value a word, which the model adds to the gathered logits"
    t.whole("final_logits_bias", 1, vocab.extent, why=why, optional=True)


def _prompts(c: Config, t: Table, name: str, width: int) -> None:
    """MVP's prompts: keys and values of every layer out of two small matrices."""
    length, middle = c.count("prompt_length", default=100), c.count("prompt_mid_dim", default=800)
    why = "makes the prompts of all layers at once, before the first"
    for kind in ("self_attn_prompt", "cross_attn_prompt")[: 2 if name == "decoder" else 1]:
        at = f"@{name}.{kind}"
        t.whole(f"{at}.prompt_embedding.weight", length, width, why=why)
        for number, out, into in (("0", middle, width), ("2", c.count(f"{name}_layers") * 2 * width, middle)):
            t.whole(f"{at}.prompt_trans.{number}.weight", out, into, why=why)
            t.whole(f"{at}.prompt_trans.{number}.bias", out, why=why)
