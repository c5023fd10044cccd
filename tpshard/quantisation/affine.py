"""Integers packed along the inputs beside scales and offsets a group of inputs: Metal (MLX) and Gemma's own.

Metal: ``weight [out, in * bits / 32]`` U32, ``scales`` and ``qbiases`` (MLX: ``biases``) ``[out, groups]``. Gemma:
``weight [out, in * bits / 8]`` (embeddings: ``embedding_quantized``), one scale an output (embeddings: or a group),
static scales of activations.
Source: transformers ``integrations/metal_quantization.py``, ``integrations/gemma_quant.py``.
"""

from __future__ import annotations

from tpshard.config import Config

from .formats import IN, ONE, OUT, Form, Format, Member, Of, packed

METHODS = ("metal", "gemma")
BITS = (2, 3, 4, 5, 6, 8)


def formats(c: Config) -> list[Format]:
    return _gemma() if c.get("quant_method") == "gemma" else _metal(c)


def _metal(c: Config) -> list[Format]:
    """By the config's numbers first: MLX has others for some modules, which shapes tell."""
    bits, group = c.count("bits", default=4), c.count("group_size", default=64)
    sizes = dict.fromkeys(((bits, group), *((b, group) for b in BITS)))
    return [_affine(b, g) for b, g in sizes]


def _affine(bits: int, group: int) -> Format:
    per_group: tuple[Form, ...] = ((Of(OUT), Of(IN, 1, group)),)
    return Format(
        f"affine int{bits} in groups of {group}",
        (
            Member(".weight", "packed", ((Of(OUT), packed(IN, bits)),)),
            Member(".scales", "scale", per_group),
            Member(".qbiases", "zero", per_group, optional=True),
            Member(".biases", "zero", per_group, optional=True),
        ),
        dtypes=frozenset({"U32"}),
    )


def _gemma() -> list[Format]:
    out = []
    for bits in (8, 4, 2):
        values, dtypes = (Of(OUT), packed(IN, bits, 8)), frozenset({"I8" if bits == 8 else "U8"})
        kind = "values" if bits == 8 else "packed"
        calibrated = tuple(
            Member(f".{name}_activation_scale", "state", ONE, optional=True) for name in ("input", "output")
        )
        out.append(
            Format(
                f"int{bits} with a scale an output",
                (Member(".weight", kind, (values,)), Member(".weight_scale", "scale", ((Of(OUT), 1),)), *calibrated),
                dtypes=dtypes,
            )
        )
        out.append(
            Format(
                f"an embedding in int{bits}",
                (
                    Member(".embedding_quantized", "packed", (values,)),
                    Member(".embedding_scale", "scale", ((Of(OUT), 1), (Of(OUT), None))),
                ),
                dtypes=dtypes,
            )
        )
    return out
