"""Keyword arguments with which a config class of transformers gives a tiny model of the same structure."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

from .recipes import RECIPES
from .sizes import AT_MOST, IMAGES, LAYER_COUNTS, LAYER_INDICES, OFF_WHEN_NONE, SIZES, VOCABULARY

_TOKEN = re.compile(
    r"^(?!pad_|bos_|eos_|sep_|decoder_start_|forced_).*_token_(id|index)$|^mask_index$|^unk_index$"
)
Lists = dict[str, list[Any]]


class _Class:
    """What a config class says of itself: fields, defaults, configs inside."""

    def __init__(self, config_class: Any) -> None:
        self.type = config_class
        self.fields = {field.name: field for field in dataclasses.fields(config_class)}
        try:
            self.defaults = config_class()
        except Exception:  # a class that is made of arguments only
            self.defaults = None

    def raw(self, name: str) -> Any:
        """The default as the class writes it."""
        default = self.fields[name].default
        return None if default is dataclasses.MISSING else default

    def default(self, name: str) -> Any:
        """The value that a config made without arguments has."""
        if self.defaults is None:
            return self.raw(name)
        try:
            return getattr(self.defaults, name, self.raw(name))
        except Exception:  # one that differs from layer to layer, and is not to be asked for
            return self.raw(name)

    def nested(self) -> dict[str, Any]:
        """Classes of the configs inside by field."""
        found = dict(getattr(self.type, "sub_configs", None) or {})
        return found | dict(getattr(self.type, "sub_configs_defaults", None) or {})


def nested_names(config_class: Any) -> list[str]:
    """The fields of a config class that hold configs."""
    return list(_Class(config_class).nested())


def shrunk(
    config_class: Any, overrides: Mapping[str, Any] | None = None, *, tied: bool | None = None, kv: int | None = None
) -> dict[str, Any]:
    """Arguments for a tiny instance.

    Args:
        overrides: values that take precedence, nested configs as mappings.
        tied: whether embedding and head are one tensor; None: as the class has it.
        kv: the number of KV heads wherever the overrides do not say.
    """
    cls, given = _Class(config_class), dict(overrides or {})
    values = _generic(cls)
    if kv is not None:
        names = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
        values |= {name: kv for name in names if name in values}
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]  # of latent attention: the query heads again
    _sections(cls, values)
    values |= {
        name: type(cls.default(name))(indices)
        for name, indices in LAYER_INDICES.items()
        if name in cls.fields and name not in given and isinstance(cls.default(name), list | tuple)
    }
    _tokens(cls, values)
    _layers(cls, values, given)
    for name, nested in cls.nested().items():
        inner = _inside(cls, name, nested, given.pop(name, None), tied, kv)
        if inner is not None:
            values[name] = inner
    if tied is not None and "tie_word_embeddings" in cls.fields:
        values["tie_word_embeddings"] = tied
    values |= {name: value for name, value in given.items() if not name.startswith("__")}
    for alias, real in (getattr(config_class, "attribute_map", {}) or {}).items():
        if alias in values and real in values and alias not in cls.fields:
            values.pop(alias)
    return values


def _generic(cls: _Class) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in cls.fields:
        tiny, default = SIZES.get(name), cls.default(name)
        if tiny is None or (cls.raw(name) is None and name in OFF_WHEN_NONE):
            continue
        if name in ("n_group", "topk_group") and not (isinstance(default, int) and default > 1):
            continue
        if isinstance(default, list | tuple):
            continue
        if isinstance(default, str) and (default != "auto" or isinstance(tiny, float)):
            continue
        values[name] = tiny
    if IMAGES.keys() & cls.fields.keys() and {"num_channels", "in_channels", "in_chans"} & cls.fields.keys():
        for name, tiny in IMAGES.items():
            default = cls.default(name) if name in cls.fields else None
            if isinstance(default, int) and not isinstance(default, bool):
                values[name] = tiny
            elif isinstance(default, list | tuple) and len(default) == 2 and all(isinstance(x, int) for x in default):
                values[name] = type(default)((tiny, tiny))
    for name, most in AT_MOST.items():
        default = cls.default(name) if name in cls.fields else None
        if isinstance(default, int) and not isinstance(default, bool) and default > most:
            values[name] = most
    return values


def _sections(cls: _Class, values: dict[str, Any]) -> None:
    """Rotary sections by axis (``mrope_section``) that fit the tiny head."""
    rope = cls.default("rope_parameters") if "rope_parameters" in cls.fields else None
    if not isinstance(rope, dict) or not {"num_attention_heads", "hidden_size"} <= values.keys():
        return
    rope = copy.deepcopy(rope)
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    if not any("mrope_section" in part for part in parts):
        return
    had = cls.default("head_dim") if "head_dim" in cls.fields else None
    if "head_dim" not in values and "head_dim" not in cls.fields:
        values["num_attention_heads"] = 4
        if "num_key_value_heads" in values:
            values["num_key_value_heads"] = 2
    size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    had = had or cls.defaults.hidden_size // cls.defaults.num_attention_heads
    for part in parts:
        sections = part.get("mrope_section")
        if sections:
            total, count = max(1, round(sum(sections) * size / had)), len(sections)
            new = [total // count] * count
            for at in range(total - sum(new)):
                new[-1 - at % count] += 1
            part["mrope_section"] = new
    values["rope_parameters"] = rope


def _tokens(cls: _Class, values: dict[str, Any]) -> None:
    """Special tokens, each another one of the tiny vocabulary's last."""
    count = 0
    for name in sorted(name for name in cls.fields if _TOKEN.match(name)):
        default = cls.default(name)
        if isinstance(default, int) and not isinstance(default, bool):
            count += 1
            values[name] = VOCABULARY - count


def _layers(cls: _Class, values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """As few layers as have every kind of layer, and the lists with an entry a layer cut to those."""
    counted = next((name for name in LAYER_COUNTS if name in cls.fields), None)
    if cls.defaults is None or counted is None:
        return
    layers = getattr(cls.defaults, counted)
    lists: Lists = {}
    for name in cls.fields:
        value = cls.default(name)
        is_list = isinstance(value, list | tuple) and len(value) == layers and layers > 1
        if is_list and name not in given and not any(isinstance(x, dict) for x in value):
            lists[name] = list(value)
    if not lists:
        return
    if counted not in given:
        kept = _picked(lists, layers, 2)
        values[counted] = len(kept)
    elif given[counted] > layers:
        return
    else:
        kept = _picked(lists, layers, given[counted])
        kept = sorted((kept + [n for n in range(layers) if n not in kept])[: given[counted]])
    values |= {name: [value[n] for n in kept] for name, value in lists.items()}


def _picked(lists: Lists, layers: int, least: int) -> list[int]:
    """The fewest layers, at least ``least``, that have every value of every list."""
    of = [{(name, repr(value[n])) for name, value in lists.items()} for n in range(layers)]
    missing: set[tuple[str, str]] = set().union(*of)
    kept: list[int] = []
    while missing:
        best = max(range(layers), key=lambda n: (len(of[n] & missing), -n))
        missing -= of[best]
        kept.append(best)
    kept += [n for n in range(layers) if n not in kept][: max(0, least - len(kept))]
    return sorted(kept)


def _inside(
    cls: _Class, name: str, nested: Any, given: Any, tied: bool | None, kv: int | None
) -> dict[str, Any] | None:
    """Arguments of a config inside, with its model type; None where the class has none by default."""
    if isinstance(given, dict) and given.get("__raw__"):
        return {key: value for key, value in given.items() if key != "__raw__"}
    default = cls.default(name) if name in cls.fields else None
    if default is None and given is None:
        return None
    model_type = given.get("model_type") if isinstance(given, dict) else None
    if isinstance(nested, type) and "Auto" not in nested.__name__ and model_type is None:
        inner: Any = nested
    else:
        in_default = default.get("model_type") if isinstance(default, dict) else getattr(default, "model_type", None)
        model_type = model_type or in_default or getattr(nested, "model_type", None)
        if model_type is None:
            return None
        plain = type(default) if default is not None and not isinstance(default, dict) else None
        known = model_type in CONFIG_MAPPING
        inner = CONFIG_MAPPING[model_type] if known else plain or nested.config_class
    overrides = dict(RECIPES.get(inner.model_type, {}))
    if not isinstance(nested, type):  # a specification with values of its own; sizes among them are made small
        for key, value in (getattr(nested, "init_kwargs", None) or {}).items():
            if isinstance(value, bool | str | float) or key == "video_temporal_patch_size":
                overrides.setdefault(key, value)
    overrides |= given or {}
    overrides.pop("model_type", None)
    return shrunk(inner, overrides, tied=tied, kv=kv) | {"model_type": inner.model_type}
