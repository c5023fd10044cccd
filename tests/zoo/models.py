"""Tiny deterministic checkpoints of nearly every architecture of transformers, as released files hold them.

Every float parameter is drawn from a generator that its name seeds, norms, biases and per-head values too: fresh
ones (1 and 0) hide what is cut wrongly. Files are written by ``save_pretrained``, so under the hub's names.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from .recipes import ALTERNATIVES, BY_TASK, RECIPES
from .shrinking import nested_names, shrunk

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vlm": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
"""What a model is for, with the name of transformers' mapping from model types to classes."""

KV_HEADS = {"mqa": 1, "gqa4": 4, "mha": 8}
ODD = {"vocab_size": 323, "intermediate_size": 150, "moe_intermediate_size": 46}  # no degree divides them


def architectures(task: str = "causal") -> list[str]:
    """The model types that transformers has a class for."""
    return list(getattr(modeling_auto, TASKS[task]))


def class_of(model_type: str, task: str = "causal") -> Any:
    """The class that serves a model type."""
    name = getattr(modeling_auto, TASKS[task])[model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def variants(model_type: str) -> list[str]:
    """The other structures that released checkpoints of the type have."""
    return list(ALTERNATIVES.get(model_type, {}))


def tiny_config(model_type: str, task: str = "causal", variant: str = "", tied: bool | None = None) -> Any:
    """The tiny config; ``variant`` is one of :func:`variants`, ``mqa``, ``gqa4``, ``mha`` or ``odd``."""
    cls = CONFIG_MAPPING[model_type]
    overrides = RECIPES.get(model_type, {}) | BY_TASK.get((model_type, task), {})
    if variant == "odd":
        default = cls()
        overrides = overrides | {name: size for name, size in ODD.items() if getattr(default, name, None) is not None}
    elif variant and variant not in KV_HEADS:
        overrides = overrides | ALTERNATIVES[model_type][variant]
    config = cls(**shrunk(cls, overrides, tied=tied, kv=KV_HEADS.get(variant)))
    text = getattr(config, "text_config", None)
    if tied is not None and hasattr(text, "tie_word_embeddings"):
        text.tie_word_embeddings = tied
    config._attn_implementation = "eager"
    return config


def build(model_type: str, task: str = "causal", variant: str = "", seed: int = 0, tied: bool | None = None) -> Any:
    """The tiny model in float32."""
    config, cls = tiny_config(model_type, task, variant, tied), class_of(model_type, task)
    torch.manual_seed(seed)
    model = cls(_own(cls, config)).eval()
    randomise(model, seed)
    model.tie_weights()
    return model


def _own(cls: Any, config: Any) -> Any:
    """The config that the class wants: its own, or the one inside (``text_config``)."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    for name in nested_names(type(config)):
        inner = getattr(config, name, None)
        if isinstance(inner, wanted):
            inner._attn_implementation = "eager"
            return inner
    return config


def write(
    model_type: str,
    directory: Path,
    task: str = "causal",
    variant: str = "",
    seed: int = 0,
    tied: bool | None = None,
    max_shard_size: str = "5GB",
) -> Any:
    """Write the checkpoint; equal arguments give equal bytes. Returns the model's class."""
    model = build(model_type, task, variant, seed, tied)
    model.save_pretrained(str(directory), max_shard_size=max_shard_size)
    if model_type in _JOINED:
        _take_apart(model_type, directory, model.config)
    return type(model)


# -- random weights ---------------------------------------------------------------------------------

_NEAR_INITIAL = re.compile(
    r"(A_log|dt_bias|\.D$|^D$|time_decay|time_first|time_mix|recurrent_param|a_param|igate|fgate|dt_proj\.bias|"
    r"correct_output_scale|router_scale|xielu|alpha_p|alpha_n|\bbeta\b|\beps\b|rotary|inv_freq|running_|num_batches|"
    r"logit_scale|lambda_|slopes)"
)
_RANDOM_BUFFER = re.compile(
    r"(e_score_correction_bias|expert_bias|router_bias|balancing_biases|correction_bias|bias)$"
)


def _noise(shape: Any, seed: int, name: str) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator, dtype=torch.float32)


@torch.no_grad()
def randomise(model: Any, seed: int = 0) -> None:
    """Give every float parameter, and stored buffers that training moves, values that its name decides."""
    modules = dict(model.named_modules())
    unsaved = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    for name, value in model.named_parameters():
        if not value.is_floating_point() or not value.numel() or any(p.search(name) for p in unsaved):
            continue
        value.copy_(_drawn(name, value.detach().float(), modules[name.rpartition(".")[0]], seed).to(value.dtype))
    stored = set(model.state_dict())
    for name, value in model.named_buffers():
        if name in stored and value.device.type != "meta":
            _draw_buffer(model, name, value, seed)


def _drawn(name: str, initial: torch.Tensor, module: Any, seed: int) -> torch.Tensor:
    noise = _noise(initial.shape, seed, name)
    constant = bool((initial == initial.flatten()[0]).all())
    if _NEAR_INITIAL.search(name):
        return initial + 0.1 * initial.abs().mean().clamp_min(0.1) * noise
    if initial.dim() <= 1 or initial.numel() == max(initial.shape):
        return initial + 0.2 * noise * (1.0 if constant else initial.abs().mean().clamp_min(0.05))
    if isinstance(module, torch.nn.Embedding):
        return 0.5 * noise
    if type(module).__name__ == "Conv1D":
        inputs = initial.shape[0]
    elif initial.dim() == 3 and not isinstance(module, torch.nn.modules.conv._ConvNd):
        inputs = max(initial.shape[1:])
    else:
        inputs = math.prod(initial.shape[1:])
    if constant:
        return initial + (1.0 / math.sqrt(inputs) if name.endswith("weight") else 0.2) * noise
    return noise / math.sqrt(inputs)


def _draw_buffer(model: Any, name: str, value: torch.Tensor, seed: int) -> None:
    if name.endswith("tid2eid"):  # DeepSeek-V4's table from tokens to experts
        experts = int(model.config.get_text_config().n_routed_experts)
        rows = [_noise((experts,), seed, f"{name}|{row}").argsort()[: value.shape[-1]] for row in range(value.shape[0])]
        value.copy_(torch.stack(rows).to(value.dtype))
    if not value.is_floating_point():
        return
    noise = _noise(value.shape, seed, f"buffer {name}")
    if name.endswith("running_var"):
        value.copy_(1 + 0.3 * noise.abs())
    elif name.endswith("running_mean") or _RANDOM_BUFFER.search(name):
        value.copy_(0.2 * noise)
        if name.endswith("balancing_biases"):
            value[-1] = -1.0  # transformers 5.24 sets it so on every load


# -- released names ----------------------------------------------------------------------------------


def _convolutions(config: Any) -> list[int]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]


def _embeddings(config: Any) -> list[int]:
    return [config.text_config.vocab_size, config.text_config.additional_vocab_size]


_JOINED: dict[str, tuple[re.Pattern[str], tuple[str, ...], Callable[[Any], list[int]]]] = {
    "olmo_hybrid": (re.compile(r"(.*linear_attn\.)(q|k|v)(_conv1d\.weight)"), ("q", "k", "v"), _convolutions),
    "molmo2": (re.compile(r"(.*wte\.)(embedding|new_embedding)()"), ("embedding", "new_embedding"), _embeddings),
}
"""Tensors that transformers 5.24 joins on load and takes apart into equal pieces on save, where they are not equal."""


def _take_apart(model_type: str, directory: Path, config: Any) -> None:
    pattern, order, sizes = _JOINED[model_type]
    for path, metadata, tensors in _files(directory):
        groups: dict[tuple[str, str], dict[str, str]] = {}
        for name in tensors:
            if found := pattern.fullmatch(name):
                groups.setdefault((found[1], found[3]), {})[found[2]] = name
        for names in groups.values():
            whole = torch.cat([tensors[names[part]] for part in order])
            for part, piece in zip(order, whole.split(sizes(config)), strict=True):
                tensors[names[part]] = piece.contiguous()
        save_file(tensors, path, metadata)


def taken_apart(model_type: str, shapes: Mapping[str, tuple[int, ...]], config: Any) -> dict[str, tuple[int, ...]]:
    """The true shapes of tensors that transformers takes apart into equal pieces, from those of the pieces."""
    pattern, order, sizes = _JOINED[model_type]
    found = {name: match[2] for name in shapes if (match := pattern.fullmatch(name))}
    return {name: (sizes(config)[order.index(part)], *shapes[name][1:]) for name, part in found.items()}


def _files(directory: Path) -> Iterator[tuple[Path, dict[str, str], dict[str, torch.Tensor]]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield path, file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
