"""Megatron's older checkpoints (``--ckpt-format torch``): a directory for every rank, ``mp_rank_TT[_PPP][_EEE]``.

``--load OUT --ckpt-format torch``; ``tools/checkpoint`` takes them apart by the arguments that every file repeats.
Layers and experts are numbered from 0 in their stage and group. The files are those of a release, which has no
iteration: ``latest_checkpointed_iteration.txt`` says so. Megatron loads them with the pickle that runs what it finds
(``weights_only=False``), which its ``argparse.Namespace`` needs; tpshard reads its tensors without running anything.

Source: Megatron-LM ``megatron/training/checkpointing.py`` (``get_checkpoint_name``, ``check_checkpoint_args``,
``load_args_from_checkpoint``), and :mod:`.megatron_names`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from tpshard.exporting.enginetable import TORCH, EngineTable, Entry, Version
from tpshard.exporting.grid import Grid, Rank
from tpshard.exporting.parts import Model
from tpshard.exporting.torchpickle import Namespace

from .megatron_names import (
    LAYER,
    attention,
    dropped,
    ends,
    gated,
    norms,
    require_equal_experts,
    router,
    rows,
)

ENGINE = "megatron-legacy"
SUMMARY = "Megatron's mp_rank_XX directories, loaded with --ckpt-format torch"
VERSIONS = (
    Version("te", "names of Transformer Engine's layers and grouped experts; read in megatron-core 0.16.1's source"),
    Version("te-sequential", "as te, experts one by one; read in megatron-core 0.16.1's source"),
    Version("local", "files saved by megatron-core 0.16.1's local layers are read, every tensor equal"),
)

PATTERN = re.compile(
    r"(?:(?:release|iter_\d{7})/)?mp_rank_(?P<tp>\d{2,4})(?:_(?P<pp>\d{3}))?(?:_(?P<ep>\d{3}))?/model_optim_rng\.pt"
)
PP_OR_EP = True  # mp_rank_00_001 is of the second stage, or of the second group of experts
CONTAINER = TORCH
WITHIN = "model"
IGNORED = re.compile(r".*\._extra_state\d*")  # what Transformer Engine remembers of FP8
NUMBERS = re.compile(
    r"decoder\.layers\.(?P<layer>\d+)\."
    r"(?:.*(?:local_experts\.(?P<module>\d+)\..*|experts\.linear_fc[12]\.(?:weight|bias)(?P<grouped>\d+))|.*)"
)


def table(model: Model, version: str) -> EngineTable:
    """What a rank's file of Megatron stores of a model.

    Raises:
        UnsupportedError: the layout has no place for one of its tensors.
    """
    entries = (*ends(), *norms(model, fused=version != "local"), *attention(), *router(), *_matrices(model, version))
    beside = lru_cache(lambda grid: around(model, grid))
    return EngineTable(
        entries,
        file_name,
        vocabulary=rows,
        local_layers=True,
        local_experts=True,
        tied=("embed",),
        tied_last="head",
        ep_inside=False,
        drop=lambda part: dropped(part, model),
        container=TORCH,
        within="model",
        around=lambda grid, rank: beside(grid),
        sides=lambda model, grid: {"latest_checkpointed_iteration.txt": b"release"},
    )


def _matrices(model: Model, version: str) -> tuple[Entry, ...]:
    grouped = "{at}.{name}.{{kind}}{{expert}}" if version == "te" else "{at}.local_experts.{{expert}}.{name}.{{kind}}"
    found = []
    for words, at, template in (
        ("", f"{LAYER}.mlp", "{at}.{name}.{{kind}}"),
        ("shared_", f"{LAYER}.mlp.shared_experts", "{at}.{name}.{{kind}}"),
        ("expert_", f"{LAYER}.mlp.experts", grouped),
    ):
        name = {n: template.format(at="@", name=n).replace("@", at) for n in ("linear_fc1", "linear_fc2")}
        first = f"{words}gate {words}up" if gated(model) else f"{words}up"
        found += [Entry(first, name["linear_fc1"]), Entry(f"{words}down", name["linear_fc2"])]
    return tuple(found)


def file_name(grid: Grid, rank: Rank, part: int, parts: int) -> str:
    """The path of a rank's file; a stage and a group are named where there are several."""
    stage = f"_{rank.pp:03d}" if grid.pp_size > 1 else ""
    group = f"_{rank.ep:03d}" if grid.ep_size > 1 else ""
    return f"release/mp_rank_{rank.tp:02d}{stage}{group}/model_optim_rng.pt"


def around(model: Model, grid: Grid) -> Mapping[str, object]:
    """What a file holds beside the tensors."""
    require_equal_experts(model, grid.ep_size)
    return {"args": Namespace(arguments(model, grid)), "checkpoint_version": 3.0, "iteration": 0}


def arguments(model: Model, grid: Grid) -> dict[str, object]:
    """The arguments of Megatron that a config.json and the degrees tell, under Megatron's names."""
    c = model.config
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    groups = c.count("num_key_value_heads", default=heads)
    kinds = {(part.word, part.kind) for part in model.parts}
    layer_norm = any(word.startswith("norm ") and kind == "bias" for word, kind in kinds)
    dtype = next(part.tensor.dtype for part in model.parts if part.word == "embed")
    rope = c.get("rope_parameters") or {}
    longest = c.get("max_position_embeddings")
    values: dict[str, object] = {
        "num_layers": model.layers,
        "hidden_size": hidden,
        "ffn_hidden_size": c.get("intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": c.get("head_dim") or hidden // heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "seq_length": longest,
        "max_position_embeddings": longest,
        "position_embedding_type": "learned_absolute" if "position" in model.words else "rope",
        "add_position_embedding": "position" in model.words,
        "rotary_base": (rope.get("rope_theta") if isinstance(rope, dict) else None) or c.get("rope_theta") or 10000,
        "rotary_percent": 1.0,
        "normalization": "LayerNorm" if layer_norm else "RMSNorm",
        "norm_epsilon": c.get("rms_norm_eps") or c.get("layer_norm_eps") or 1e-5,
        "swiglu": gated(model),
        "add_bias_linear": ("o", "bias") in kinds or ("down", "bias") in kinds,
        "add_qkv_bias": ("q", "bias") in kinds,
        "qk_layernorm": bool(model.words & {"norm q_norm", "norm q_a_layernorm"}),
        "multi_latent_attention": "kv_a" in model.words,
        "untie_embeddings_and_output_weights": not model.tied,
        "vocab_size": c.count("vocab_size"),
        "padded_vocab_size": rows(c.count("vocab_size"), grid.tp_size) * grid.tp_size,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": grid.tp_size,
        "pipeline_model_parallel_size": grid.pp_size,
        "expert_model_parallel_size": grid.ep_size,
        "virtual_pipeline_model_parallel_size": None,
        "bf16": dtype == "BF16",
        "fp16": dtype == "F16",
        "num_experts": model.experts or None,
        "moe_router_topk": c.get("num_experts_per_tok"),
        "moe_ffn_hidden_size": c.get("moe_intermediate_size"),
        "use_distributed_optimizer": False,
        "ckpt_format": "torch",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    if model.experts:
        layers = {part.layer for part in model.parts if part.word == "router"}
        values["moe_layer_freq"] = [int(layer in layers) for layer in range(model.layers)]
    return values
