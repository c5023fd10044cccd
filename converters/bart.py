"""BART and its kin: encoder and decoder of fairseq, one vocabulary, learned or sinusoidal positions.

Source: transformers ``models/bart``, ``mbart``, ``plbart``, ``mvp``, ``blenderbot``, ``blenderbot_small``,
``pegasus``, ``marian``, ``m2m_100`` (``modeling_*.py``).
"""

from __future__ import annotations

from typing import NamedTuple

from tpshard.blocks.encdec import layer_of, side, side_axes, vocabulary
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "bart"


class Build(NamedTuple):
    """What a model type has. ``offset``: rows of the table before position 0; None: sinusoids, seldom saved."""

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
    vocabulary(c, t, width)
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
