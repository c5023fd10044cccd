"""Checkpoints of released sizes with nothing in them: true names and shapes in sparse files.

The config is the one that the class of transformers has by default, which for most types is that of a released
model (its docstring says which); where that makes no model, a released one's numbers (:mod:`.releases`). Names and
shapes are the model's own, on the meta device, under the hub's names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import revert_weight_conversion

from .models import _JOINED, _own, class_of, taken_apart
from .releases import RELEASES

Shapes = dict[str, tuple[int, ...]]


def released(model_type: str, task: str = "causal") -> tuple[dict[str, Any], Shapes]:
    """The default config, and the shape of every tensor in a file by its name; tied tensors once."""
    cls = class_of(model_type, task)
    config = _own(cls, CONFIG_MAPPING[model_type](**RELEASES.get(model_type, {})))
    with torch.device("meta"):
        model = cls(config)
    state, seen = {}, set()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen and name not in tied and name not in unsaved:
            seen.add(id(value))
            state[name] = value.detach()
    shapes = {name: tuple(value.shape) for name, value in revert_weight_conversion(model, state).items()}
    if model_type in _JOINED:
        shapes |= taken_apart(model_type, shapes, model.config)
    values = json.loads(model.config.to_json_string(use_diff=False))
    return values | {"architectures": [cls.__name__]}, shapes


def write_sparse(directory: Path, config: Mapping[str, Any], shapes: Shapes) -> Path:
    """A bfloat16 checkpoint whose one file is a header and a hole."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    at, header = 0, {}
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return directory
