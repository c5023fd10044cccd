"""Two models put together: an encoder of any family, and a decoder that attends to what it makes.

Source: transformers ``models/{encoder_decoder,vision_encoder_decoder,speech_encoder_decoder}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.registry import table_of
from tpshard.table import Table

FAMILY = "encoder-decoder"
MODEL_TYPES = ("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder")


def table(c: Config) -> Table:
    t = Table(0)
    for side in ("encoder", "decoder"):
        part = table_of(c.nested(side))
        below = [(f"{side}.{inner}", f"{side}.{outer}") for inner, outer in part.stacks[0].pairs]
        t.include(part, *below, axes=f"{side}_")
    for at in ("enc_to_dec_proj", "encoder_outputs_pos_emb"):
        why = "between the two models, from one width to the other"
        t.whole(f"{at}.weight", None, None, why=why, optional=True)
        t.whole(f"{at}.bias", None, why=why, optional=True)
    return t
