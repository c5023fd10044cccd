"""compressed-tensors: integers or floats, packed or not, with scales by tensor, channel, group or block.

Every config group may have a format of its own, and which modules it is for only regular expressions say; so all are
tried, and the shapes and dtypes of a matrix's tensors tell which it is. ``pack-quantized``: ``weight_packed [out,
words]`` int32 along the inputs, ``weight_scale [out, groups]``, ``weight_zero_point [words of outputs, groups]`` packed
along the outputs, ``weight_g_idx [in]``, ``weight_shape [2]`` with the whole matrix's. ``int-``, ``float-`` and
``mxfp8-quantized``: ``weight`` in its own shape. ``nvfp4-`` and ``mxfp4-pack-quantized``: two values a byte along the
inputs.
Source: vllm-project/compressed-tensors ``compressors/quantized_compressors/*.py``, ``quantization/quant_args.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tpshard.config import Config
from tpshard.errors import DamagedError, UnsupportedError

from .formats import FLOATS8, IN, ONE, OUT, Form, Format, Member, Of, Parts, packed
from .fp8 import PER_OUT, VALUES, activations, scaled
from .gptq import FROM_ZERO, WHOLE

METHODS = ("compressed-tensors", "compressed_tensors")
SHAPE = "the whole matrix's shape: a rank's part has its own"
_SPARSE = "keeps two of every four values and says in a bit mask which, so that no column lies at a fixed place"
REFUSED = {
    "sparse-24-bitmask": f"it {_SPARSE}",
    "sparse-bitmask": "it keeps the values that are not zero one after the other, so that no row lies at a fixed place",
    "marlin-24": "it is permuted for one kernel, and keeps two of every four values",
}
PLAIN = ("dense", "mixed-precision")
BYTES = frozenset({"U8", "I8", "F4"})


def formats(c: Config) -> list[Format]:
    values = c.get("quantization_config", default=c.values)  # files of 2024 nest it
    c = Config(values if isinstance(values, Mapping) else c.values)
    default = str(c.get("format", default="dense"))
    sparsity = c.get("sparsity_config", default={})
    for name in (default, sparsity.get("format") if isinstance(sparsity, Mapping) else None):
        _require(name)
    out: list[Format] = []
    for group in _groups(c):
        name = str(group.get("format") or default)
        _require(name)
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            out += _of_group(name, Config(weights))
    return list(dict.fromkeys(out))


def _require(name: object) -> None:
    if name in REFUSED:
        raise UnsupportedError(
            f"config.json: compressed-tensors in the format {name!r} cannot be cut: {REFUSED[str(name)]}; use a "
            "checkpoint that is quantised and not sparse, or the original one"
        )


def _groups(c: Config) -> Iterator[Mapping[str, Any]]:
    groups = c.get("config_groups", default={})
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise DamagedError(f"config.json: 'config_groups' is {groups!r:.80}, not an object of objects; restore it")
    yield from groups.values()


def _of_group(name: str, weights: Config) -> list[Format]:
    """The formats of a config group by its ``format`` and the arguments of its weights."""
    forms = _scales(weights)
    bits = weights.count("num_bits", default=8)
    if name == "pack-quantized":
        return _packed(weights, bits, forms)
    if name == "nvfp4-pack-quantized":
        return [nvfp4(group=weights.count("group_size", default=16))]
    if name == "mxfp4-pack-quantized":
        return [fp4("MXFP4", weights.count("group_size", default=32))]
    if name == "mxfp8-quantized":
        forms = ((Of(OUT), Of(IN, 1, weights.count("group_size", default=32))),)
        return [scaled("MXFP8", FLOATS8, forms)]
    if name in ("int-quantized", "float-quantized", "naive-quantized", *PLAIN):
        dtypes = FLOATS8 if weights.get("type", default="int") == "float" else frozenset({"I8"})
        return [scaled(f"{weights.get('type', default='int')}{bits}", dtypes, forms, zero=".weight_zero_point")]
    raise UnsupportedError(f"config.json: compressed-tensors in the format {name!r}, which is not known here")


def _scales(weights: Config) -> tuple[Form, ...]:
    """The shapes that scales may have, by the strategy of the weights."""
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy == "block":
        sizes = weights.get("block_structure")
        if isinstance(sizes, str):  # as "128x128"
            sizes = [int(part) if part.isdigit() else 0 for part in sizes.split("x")]
        if not isinstance(sizes, list | tuple) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
            raise DamagedError(f"config.json: 'block_structure' is {sizes!r:.80}, not two numbers; restore it")
        return ((Of(OUT, 1, sizes[0]), Of(IN, 1, sizes[1])),)
    if strategy in ("group", "tensor_group") and weights.get("group_size") not in (None, -1):
        by_order = weights.get("actorder") in ("group", True)
        return ((Of(OUT), Of(IN, 1, weights.count("group_size"), cut=not by_order)),)
    return (*PER_OUT, *ONE)


def _packed(weights: Config, bits: int, forms: tuple[Form, ...]) -> list[Format]:
    """Words along the inputs; of bits that do not divide a word, older files leave the rest of every word empty."""
    by_order = weights.get("actorder") in ("group", True)
    grouped = [entry for form in forms for entry in form[1:] if isinstance(entry, Of)]
    out = []
    for words in dict.fromkeys((packed(IN, bits), Of(IN, 1, 32 // bits))):
        zeros = [(packed(OUT, bits), *form[1:]) for form in forms if form and form[0] == Of(OUT)]
        sparse = [(Of(OUT, 1, 32 // bits), *form[1:]) for form in forms if form and form[0] == Of(OUT)]
        members = (
            Member(".weight_packed", "packed", ((Of(OUT), words),)),
            Member(".weight_scale", "scale", forms, note=WHOLE if by_order else ""),
            Member(".weight_zero_point", "zero", (*zeros, *sparse, *ONE), optional=True,
                   note=WHOLE if by_order else ""),
            Member(".weight_g_idx", "order", ((Of(IN),),), optional=True,
                   note=FROM_ZERO if grouped and not by_order else ""),
            Member(".weight_shape", "state", ((2,),), optional=True, note=SHAPE, noted=(OUT, IN)),
            *activations(),
        )  # fmt: skip
        group = f" in groups of {grouped[0].per}" if grouped else ""
        out.append(Format(f"int{bits}, packed,{group}".rstrip(","), members))
    return out


def fp4(name: str, group: int, *more: Member, weight: str = ".weight_packed") -> Format:
    """Two four-bit floats a byte along the inputs (or in a dtype of four bits), a scale a group of inputs."""
    members = (
        Member(weight, "packed", ((Of(OUT), Of(IN, 1, 2)), *VALUES)),
        Member(".weight_scale", "scale", ((Of(OUT), Of(IN, 1, group)),)),
        *more,
        *activations(),
    )
    return Format(f"{name} in groups of {group}", members, dtypes=BYTES)


def nvfp4(*, group: int = 16) -> Format:
    """NVFP4 as compressed-tensors names it: FP8 scales a group, one FP32 scale for all of them."""
    one = (*ONE, (Parts(OUT),))
    return fp4(
        "NVFP4", group, Member(".weight_global_scale", "state", one),
        Member(".input_global_scale", "state", one, optional=True),
    )  # fmt: skip
