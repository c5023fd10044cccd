"""torchao: tensor subclasses laid flat, ``_weight_qdata`` beside ``_weight_scale`` and ``_weight_zero_point``.

int8, FP8 and integers of fewer bits in a byte each: ``qdata [out, in]``, scales and zero points of the matrix, of every
output, or ``[out, in / group]``. int4 in the plain layout: ``qdata [out, in / 2]`` I8, ``scale`` and ``zero_point [in /
group, out]``. The header of the file describes every tensor as it is whole; a rank's part has sizes of its own.
Source: pytorch/ao ``prototype/safetensors/safetensors_support.py`` (``flatten_tensor_state_dict``),
``quantization/quantize_/workflows``; transformers ``quantizers/quantizer_torchao.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tpshard.config import Config
from tpshard.errors import UnsupportedError

from .formats import FLOATS8, IN, ONE, OUT, Form, Format, Member, Of
from .fp8 import VALUES

METHODS = ("torchao",)
DESCRIBED = "the header of the source's file describes the whole matrix: a rank's part has its own shape and block size"
IN_BYTES = frozenset(
    {
        "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Int8StaticActivationInt8WeightConfig",
        "Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig",
        "Float8StaticActivationFloat8WeightConfig", "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig",
    }
)  # fmt: skip
INT4 = frozenset({"Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig"})
AROUND = frozenset({"FqnToConfig", "ModuleFqnToConfig", "AOPerModuleConfig"})  # of which other configs are a part
_OWN = "and its layout is woven for one kernel, or unknown here"


def formats(c: Config) -> list[Format]:
    kind = c.get("quant_type", default=None)
    if not isinstance(kind, Mapping):
        raise UnsupportedError(
            f"config.json: torchao of the kind {kind!r:.80}, which is stored as pickled classes; use a checkpoint in "
            "safetensors of torchao 0.15 or newer, or in its original precision"
        )
    groups: set[int] = set()
    for name, values in _configs(kind):
        packing = values.get("int4_packing_format", values.get("intx_packing_format", "plain"))
        plain = str(packing.get("_data") if isinstance(packing, Mapping) else packing).lower() in _PLAIN
        if name not in IN_BYTES | INT4 | AROUND or not plain:
            raise UnsupportedError(
                f"config.json: torchao with {name}{'' if plain else f' packed as {packing!r:.60}'}, {_OWN}; use a "
                "checkpoint with int8, FP8 or integers in a byte each, or in its original precision"
            )
        groups |= set(_group_sizes(values))
    grouped: tuple[Form, ...] = tuple((Of(OUT), Of(IN, 1, size)) for size in sorted(groups, reverse=True))
    forms: tuple[Form, ...] = ((Of(OUT), 1), (Of(OUT),), *grouped, *ONE)
    return [
        _format("int8", frozenset({"I8"}), VALUES, forms), _format("FP8", FLOATS8, VALUES, forms),
        *(_int4(size) for size in sorted(groups, reverse=True)),
    ]  # fmt: skip


_PLAIN = ("plain", "unpacked_to_int8")


def _format(name: str, dtypes: frozenset[str], values: tuple[Form, ...], forms: tuple[Form, ...]) -> Format:
    return Format(
        f"torchao {name}",
        (
            Member("._weight_qdata", "values", values, note=DESCRIBED, noted=(OUT, IN)),
            Member("._weight_scale", "scale", forms),
            Member("._weight_zero_point", "zero", forms, optional=True),
            Member("._weight_act_quant_scale", "state", ONE, optional=True),
            Member("._weight_act_scale", "state", ONE, optional=True),
        ),
        dtypes=dtypes,
    )


def _int4(group: int) -> Format:
    forms: tuple[Form, ...] = ((Of(IN, 1, group), Of(OUT)),)
    return Format(
        f"torchao int4 in groups of {group}",
        (
            Member("._weight_qdata", "packed", ((Of(OUT), Of(IN, 1, 2)),), note=DESCRIBED, noted=(OUT, IN)),
            Member("._weight_scale", "scale", forms),
            Member("._weight_zero_point", "zero", forms),
        ),
        dtypes=frozenset({"I8", "U8"}),
    )


def _configs(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and numbers of every config, those inside others included."""
    name, data = values.get("_type"), values.get("_data")
    if isinstance(name, str) and name.endswith("Config"):
        yield name, data if isinstance(data, Mapping) else {}
        if name not in AROUND:
            return
    for inner in values.values():
        if isinstance(inner, Mapping):
            yield from _configs(inner)


def _group_sizes(values: Mapping[str, Any]) -> Iterator[int]:
    for key, value in values.items():
        if key == "group_size" and type(value) is int and value > 0:
            yield value
        elif isinstance(value, Mapping):
            yield from _group_sizes(value)
    if values.get("int4_packing_format") is not None and "group_size" not in values:
        yield 128
