"""The format of a PEFT LoRA adapter: what adapter_config.json promises, and how its tensors are named.

Every adapted module M of the base model has ``M.lora_A.weight [r, in]`` and ``M.lora_B.weight [out, r]``, whatever
the order in which the base stores its own matrix; their product, scaled, is added to what M makes. Embeddings have
``lora_embedding_A [r, vocab]`` and ``lora_embedding_B [width, r]``. Banks of experts have all experts side by side:
``[experts * r, in]`` and ``[out, r * experts]``. Names begin with ``base_model.model.`` and may hold the adapter's own
name after ``lora_A``; ``base_layer`` stands for the wrapped module. Everything else is a whole copy of a tensor of the
base (``bias``, ``modules_to_save``).

Source: peft 0.21, ``tuners/lora/layer.py`` (``Linear``, ``Embedding``, ``ParamWrapper``), ``tuners/lora/dora.py``,
``utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .config import ADAPTER_CONFIG
from .errors import DamagedError, UnsupportedError

# Variants of LoRA whose tensors or base are others than those of LoRA, by their key in adapter_config.json.
_VARIANTS = {
    "arrow_config": "routes between several adapters",
    "kasa_config": "changes the base weights and adds a diagonal",
    "layer_replication": "repeats layers of the base",
    "monteclora_config": "adds tensors for sampling",
    "use_bdlora": "has block-diagonal matrices of its own cut",
    "use_qalora": "pools the inputs in groups",
}
_PREFIX = "base_model.model."
_OWN = r"(?:\.(?!weight\Z|bias\Z)(?P<own>[^.]+))?"  # the adapter's own name
_FORMS = tuple(
    (kind, re.compile(rf"(?P<module>.+)\.{form.replace('NAME', _OWN)}", re.DOTALL))
    for kind, form in (
        ("A", r"lora_ANAME\.weight"),
        ("B", r"lora_BNAME\.weight"),
        ("bias", r"lora_BNAME\.bias"),
        ("A", "lora_embedding_ANAME"),
        ("B", "lora_embedding_BNAME"),
        ("magnitude", r"lora_magnitude_vectorNAME(?:\.weight)?"),
        ("tokens", r"token_adapter\.trainable_tokens_deltaNAME"),
    )
)
_SAVED = re.compile(r"\.modules_to_save(?:\.[^.]+)?(?=\.[^.]+\Z)")


@dataclass(frozen=True)
class LoraConfig:
    """What adapter_config.json says that bears on shapes.

    Args:
        base: the base model that it names, "" for none.
        ranks: the ranks that its pairs may have.
        parameters: parameters that are adapted by themselves (banks of experts), by the ends of their names.
    """

    base: str
    ranks: frozenset[int]
    parameters: tuple[str, ...]


class Piece(NamedTuple):
    """What a tensor of an adapter is.

    Args:
        kind: ``A`` or ``B`` (one of a pair), ``bias`` (of B), ``magnitude`` (DoRA's, one value an output),
            ``tokens`` (rows of single tokens), ``copy`` (a tensor of the base, whole), or "" for none of these.
        base: the module of the base that is adapted; of a copy the tensor.
        pair: what the tensors of one pair have in common.
        embedding: whether the pair is an embedding's.
    """

    kind: str
    base: str
    pair: str = ""
    embedding: bool = False


def lora_config(values: Mapping[str, Any]) -> LoraConfig:
    """Read adapter_config.json.

    Raises:
        UnsupportedError: an adapter of another kind than LoRA, or of a variant with other tensors.
        DamagedError: a value is not of its kind.
    """
    kind = values.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"{ADAPTER_CONFIG} has the peft_type {kind!r:.80}, and only LORA adapters are cut; merge this one into its "
            "base model (peft's merge_and_unload, where it has that) and split the model"
        )
    for key, why in _VARIANTS.items():
        if values.get(key):
            raise UnsupportedError(
                f"{ADAPTER_CONFIG} sets {key}: that variant of LoRA {why} and is not cut; merge the adapter into its "
                "base model (peft's merge_and_unload) and split the model"
            )
    pattern = values.get("rank_pattern") or {}
    if not isinstance(pattern, Mapping):
        raise _wrong("rank_pattern", pattern, "an object")
    ranks = [values.get("r", 8), *pattern.values()]
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise _wrong("r" if rank is ranks[0] else "rank_pattern", rank, "a positive whole number")
    parameters = values.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise _wrong("target_parameters", parameters, "a list of names")
    base = values.get("base_model_name_or_path")
    return LoraConfig(base if isinstance(base, str) else "", frozenset(ranks), tuple(parameters))


def _wrong(key: str, value: object, kind: str) -> DamagedError:
    return DamagedError(f"{ADAPTER_CONFIG}: '{key}' is {value!r:.80}, not {kind}; copy the file again")


def piece_of(name: str) -> Piece:
    """What a tensor of this name is."""
    bare = name.removeprefix(_PREFIX)
    for kind, form in _FORMS:
        found = form.fullmatch(bare)
        if found is not None:
            module = found["module"]
            pair = f"{module}\0{found['own'] or ''}"
            return Piece(kind, _unwrapped(module), pair, "lora_embedding_" in bare[len(module) :])
    if ".lora_" in bare:
        return Piece("", bare)
    return Piece("copy", _unwrapped(_SAVED.sub("", bare)))


def _unwrapped(name: str) -> str:
    """A name without the wrappers that PEFT puts around modules; those of several parameters lie in each other."""
    return name.replace(".base_layer", "")
