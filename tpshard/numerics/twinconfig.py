"""The config of a model's twin: the same class and the same structure, at the smallest size that keeps both.

What decides how a model is cut is kept: query heads for each KV head, how units fall on the ranks (even or
not), the order of fused tensors, biases, ties, norms, one layer of every kind, partial rotation, and a head
size that is (or is not) the hidden size over the heads. What only makes a model big is not: widths, layers,
vocabulary, experts. The names are those of transformers' config classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD_DIM = 8
ROTARY_HEAD_DIM = 16  # a part of a head that is rotated must be an even number of indices
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
POSITIONS = 128
MOST_EXPERTS = 12  # beyond ten, numbers in order are not names in order
LAYERS = 2

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_QUERY = ("num_attention_heads", "n_head", "num_heads")
_KV = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_groups")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_WIDTHS = (
    "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "intermediate_size_mlp", "dense_intermediate_size",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
_WINDOWS = ("sliding_window", "attention_window", "sliding_window_size")
_TOKENS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "image_token_id", "image_token_index",
    "boi_token_index", "eoi_token_index",
)  # fmt: skip
_DROPPED = (
    "quantization_config", "compression_config", "torch_dtype", "dtype", "_name_or_path", "transformers_version",
    "num_nextn_predict_layers",
)  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def shrunk(values: Mapping[str, Any], tp_size: int) -> dict[str, Any]:
    """The twin's ``config.json`` for the degree ``tp_size``; ``values`` is the model's, and is left alone."""
    config = {key: value for key, value in values.items() if key not in _DROPPED}
    for name in ("text_config", "llm_config"):
        if isinstance(config.get(name), Mapping):
            config[name] = shrunk(config[name], tp_size)
    if isinstance(config.get("vision_config"), Mapping):
        config["vision_config"] = {**config["vision_config"], **_VISION}
        config["mm_tokens_per_image"] = 4
    kept = _chosen_layers(config)
    _cut_layers(config, kept)
    _cut_heads(config, tp_size)
    widened = _widened(config, tp_size)
    for name in _WIDTHS:
        if _count(config.get(name)) and name not in widened:
            config[name] = _units(config[name], tp_size)
    config.update(widened)
    _cut_experts(config)
    vocabulary = config.get("vocab_size")
    if _count(vocabulary):
        assert isinstance(vocabulary, int)
        config["vocab_size"] = -(-64 // tp_size) * tp_size + vocabulary % tp_size
    for name in _TOKENS:
        _cut_tokens(config, name)
    if any(_count(config.get(name)) for name in ("max_position_embeddings", "n_positions")):
        _cut_positions(config)
    for name in _WINDOWS:
        if _count(config.get(name)):
            config[name] = min(config[name], 8)
    return config


def layer_count(values: Mapping[str, Any]) -> int:
    """How many layers a config says that the model has; 0 where it says none."""
    name = _first(values, _LAYER_COUNTS)
    return 0 if name is None else int(values[name])


def first_layers(values: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The config of the first ``count`` layers of a model."""
    config = dict(values)
    _cut_layers(config, list(range(count)))
    return config


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _first(config: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if _count(config.get(name))), None)


def _units(units: int, tp_size: int) -> int:
    """A small number of units that falls on ``tp_size`` ranks as evenly, or unevenly, as ``units`` does."""
    least = 4 * tp_size
    return units if units <= 2 * least else least + units % tp_size


def _widened(config: Mapping[str, Any], tp_size: int) -> dict[str, int]:
    """A hidden size and the channels of a state space that are ``expand`` times as many, made small together.

    Classes work the one out of the other (Mamba 1), whatever the config says. A hidden size that is as far from a
    multiple of the degree gives channels that fall on the ranks as evenly, or unevenly, as the model's.
    """
    hidden, expand = _first(config, _HIDDEN), config.get("expand")
    if hidden is None or not isinstance(expand, int) or config.get("intermediate_size") != expand * config[hidden]:
        return {}
    if _first(config, _QUERY) is not None:
        return {}  # heads decide the widths
    small = _units(config[hidden], tp_size)
    return {hidden: small, "intermediate_size": expand * small}


def _chosen_layers(config: Mapping[str, Any]) -> list[int]:
    """Indices of the layers to keep: the first of every kind, and at least two."""
    name = _first(config, _LAYER_COUNTS)
    if name is None:
        return []
    layers = config[name]
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == layers and layers > 1]
    dense = config.get("mlp_only_layers") or []
    first_moe = config.get("first_k_dense_replace") or 0
    step = config.get("decoder_sparse_step") or 1
    seen: dict[str, int] = {}
    for layer in range(layers):
        kind = repr([value[layer] for value in lists] + [layer in dense, layer < first_moe, (layer + 1) % step == 0])
        seen.setdefault(kind, layer)
    kept = sorted(seen.values())
    kept += [layer for layer in range(layers) if layer not in kept][: max(0, LAYERS - len(kept))]
    return sorted(kept)


def _cut_layers(config: dict[str, Any], kept: list[int]) -> None:
    name = _first(config, _LAYER_COUNTS)
    if name is None:
        return
    layers = config[name]
    for key, value in config.items():
        if isinstance(value, list) and len(value) == layers and layers > 1:
            config[key] = [value[layer] for layer in kept]
    config[name] = len(kept)
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list):
        config["mlp_only_layers"] = [at for at, layer in enumerate(kept) if layer in dense]
    first = config.get("first_k_dense_replace")
    if _count(first):
        config["first_k_dense_replace"] = sum(layer < first for layer in kept)  # type: ignore[operator]
    step = config.get("decoder_sparse_step")
    if _count(step) and step != 1:
        config["decoder_sparse_step"] = 2 if len(kept) >= 2 else 1
    window = config.get("max_window_layers")
    if _count(window):
        config["max_window_layers"] = sum(layer < window for layer in kept)  # type: ignore[operator]


def _cut_heads(config: dict[str, Any], tp_size: int) -> None:
    query, hidden = _first(config, _QUERY), _first(config, _HIDDEN)
    if query is None or hidden is None:
        return
    heads, width = config[query], config[hidden]
    kv = _first(config, _KV)
    groups = config[kv] if kv is not None else heads
    size = config.get("head_dim")
    natural = not _count(size) or heads * size == width
    fewer = groups if groups <= 2 * tp_size else 2 * tp_size + groups % tp_size
    each = heads // groups if heads % groups == 0 else 1
    if kv is not None and heads % groups == 0:
        config[kv] = fewer
    config[query] = fewer * each
    rotates_part = any(
        isinstance(value, float) and 0 < value < 1
        for value in (
            config.get("partial_rotary_factor"), config.get("rotary_pct"),
            (config.get("rope_parameters") or {}).get("partial_rotary_factor"),
        )
    )  # fmt: skip
    small = ROTARY_HEAD_DIM if rotates_part else HEAD_DIM
    if _count(config.get("kv_lora_rank")):
        for name, value in LATENT.items():
            if _count(config.get(name)):
                config[name] = value
        for name in ("head_dim", "qk_head_dim"):
            if _count(config.get(name)):
                config[name] = LATENT["qk_rope_head_dim"] if name == "head_dim" else 12
        config[hidden] = 32
        return
    if _count(size):
        config["head_dim"] = small
    if _count(config.get("rotary_dim")):
        config["rotary_dim"] = small
    if _count(config.get("global_head_dim")):
        config["global_head_dim"] = small
    expand = config.get("expand")
    if _count(expand) and _count(config.get("state_size")):
        config["state_size"], config["chunk_size"] = 8, 8
        config[hidden] = config[query] * small // int(expand or 1)
        return
    config[hidden] = config[query] * (small if natural else small + 2)  # some classes want a multiple of the heads
    if _count(config.get("word_embed_proj_dim")):
        config["word_embed_proj_dim"] = config[hidden] if config["word_embed_proj_dim"] == width else 16
    scalar = config.get("query_pre_attn_scalar")
    if isinstance(scalar, int | float):
        config["query_pre_attn_scalar"] = small
    _cut_factors(config, small)


def _cut_factors(config: dict[str, Any], head_dim: int) -> None:
    """Rope factors that are given for every pair of rotated indices."""
    share = (
        config.get("partial_rotary_factor") or (config.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    )
    pairs = int(head_dim * share) // 2
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            config[name] = {k: v[:pairs] if isinstance(v, list) and len(v) > pairs else v for k, v in rope.items()}


def _cut_experts(config: dict[str, Any]) -> None:
    name = _first(config, _EXPERTS)
    if name is None:
        return
    experts = min(config[name], MOST_EXPERTS)
    if _count(config.get("n_group")):
        groups = min(config["n_group"], 2)
        config["n_group"] = groups
        config["topk_group"] = min(config.get("topk_group") or 1, max(1, groups - 1))
        experts = max(2, experts // groups) * groups
    for key in _EXPERTS:
        if _count(config.get(key)):
            config[key] = experts
    for key in _PER_TOKEN:
        if _count(config.get(key)):
            config[key] = min(config[key], 2, experts)


def _cut_tokens(config: dict[str, Any], name: str) -> None:
    most = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size", 64)) - 1
    value = config.get(name)
    if isinstance(value, int):
        config[name] = min(value, most)
    elif isinstance(value, list):
        config[name] = [min(token, most) for token in value if isinstance(token, int)]


def _cut_positions(config: dict[str, Any]) -> None:
    """Few positions, with what was trained as large a part of them as it is of the model's."""
    name = _first(config, ("max_position_embeddings", "n_positions"))
    assert name is not None
    longest = config[name]
    config[name] = min(longest, POSITIONS)
    share = config[name] / longest
    for holder in ("rope_scaling", "rope_parameters"):
        rope = config.get(holder)
        if isinstance(rope, Mapping) and _count(rope.get("original_max_position_embeddings")):
            trained = max(1, int(rope["original_max_position_embeddings"] * share))
            config[holder] = {**rope, "original_max_position_embeddings": trained}
    if _count(config.get("original_max_position_embeddings")):
        config["original_max_position_embeddings"] = max(1, int(config["original_max_position_embeddings"] * share))
