"""TensorRT-LLM's checkpoints of its TensorRT back-end (legacy): ``rank{n}.safetensors`` and a config of its own.

``trtllm-build --checkpoint_dir OUT``. Ranks are counted stage after stage, layers from 0 in every stage. The names of
the two matrices of the MLP are the other way round than one would think: ``fc`` is the gate projection and ``gate`` the
up projection, and in mixtures of experts, which have both in one, up comes first.

Source: TensorRT-LLM 0.17 to 1.0, ``models/llama/convert.py`` and ``config.py``, ``mapping.py``; read and not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tpshard.errors import DamagedError, UnsupportedError
from tpshard.exporting.enginetable import WHOLE, EngineTable, Entry, Version
from tpshard.exporting.grid import Grid, Rank, left_over_first
from tpshard.exporting.parts import Model

ENGINE = "trtllm"
SUMMARY = "TensorRT-LLM's legacy checkpoint, for trtllm-build (bf16, fp16)"
VERSIONS = (Version("0.17-1.0", "written from its source, not loaded by it: it does not run without a GPU"),)

PATTERN = re.compile(r"rank(?P<rank>\d+)\.safetensors")
NUMBERS = re.compile(r"transformer\.layers\.(?P<layer>\d+)\..*")

_LAYER = "transformer.layers.{layer}"
ENTRIES = (
    Entry("embed", "transformer.vocab_embedding.{kind}", form=WHOLE, kinds=("weight",)),
    Entry("head", "lm_head.{kind}", kinds=("weight",)),
    Entry("norm norm", "transformer.ln_f.{kind}", kinds=("weight",)),
    Entry("norm input_layernorm", f"{_LAYER}.input_layernorm.{{kind}}", kinds=("weight",)),
    Entry("norm post_attention_layernorm", f"{_LAYER}.post_layernorm.{{kind}}", kinds=("weight",)),
    Entry("q k v", f"{_LAYER}.attention.qkv.{{kind}}", kinds=("weight",)),
    Entry("o", f"{_LAYER}.attention.dense.{{kind}}", kinds=("weight",)),
    Entry("gate", f"{_LAYER}.mlp.fc.{{kind}}", kinds=("weight",)),
    Entry("up", f"{_LAYER}.mlp.gate.{{kind}}", kinds=("weight",)),
    Entry("down", f"{_LAYER}.mlp.proj.{{kind}}", kinds=("weight",)),
    Entry("router", f"{_LAYER}.mlp.router.{{kind}}", form=WHOLE, kinds=("weight",)),
    Entry("expert_up expert_gate", f"{_LAYER}.mlp.fc.{{kind}}", kinds=("weight",)),
    Entry("expert_down", f"{_LAYER}.mlp.proj.{{kind}}", kinds=("weight",)),
)

CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"})
"""Classes that TensorRT-LLM runs as its Llama."""

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
RENORMALIZE = 1


def table(model: Model, version: str) -> EngineTable:
    """What TensorRT-LLM stores of a model.

    Raises:
        UnsupportedError: the class is none that it runs as its Llama, or a router is not stored in float32.
    """
    if model.architecture not in CLASSES:
        raise UnsupportedError(
            f"TensorRT-LLM's names for {model.architecture or 'a model without architectures in config.json'} are not "
            f"known; those of {', '.join(sorted(CLASSES))} are"
        )
    router = next((part.tensor for part in model.parts if part.word == "router"), None)
    if router is not None and router.dtype not in ("F32", ""):
        raise UnsupportedError(
            f"TensorRT-LLM wants routers in F32, and {router.name} is {router.dtype}: exports move bytes and do not "
            "cast; save the checkpoint with its routers in float32, or convert it with TensorRT-LLM"
        )
    return EngineTable(
        ENTRIES,
        file_name,
        vocabulary=lambda vocab, tp_size: -(-vocab // tp_size),
        stages=left_over_first,
        local_layers=True,
        tied=("embed", "head"),
        sides=lambda model, grid: {"config.json": json.dumps(settings(model, grid), indent=4).encode() + b"\n"},
    )


def file_name(grid: Grid, rank: Rank, part: int, parts: int) -> str:
    """``rank0.safetensors``.

    Raises:
        UnsupportedError: a rank's tensors in several files, which it does not look for.
    """
    if parts > 1:
        raise UnsupportedError(
            f"TensorRT-LLM loads one file a rank; the size limit makes {parts} of one: leave the limit out"
        )
    return f"rank{rank.pp * grid.tp_size + rank.tp}.safetensors"


def place_of(number: int, found: Mapping[str, Any]) -> dict[str, int]:
    """The place of the rank of a number, by the ``mapping`` of the config beside the files.

    Raises:
        DamagedError: it has none.
    """
    mapping = found.get("mapping")
    tp_size = mapping.get("tp_size") if isinstance(mapping, dict) else None
    if not isinstance(tp_size, int) or tp_size < 1:
        raise DamagedError(
            "config.json beside rank0.safetensors has no mapping with a tp_size, as TensorRT-LLM's has; copy it again"
        )
    return {"tp": number % tp_size, "pp": number // tp_size, "ep": 0}


def settings(model: Model, grid: Grid) -> dict[str, Any]:
    """TensorRT-LLM's config.json.

    Source: ``models/modeling_utils.py``, ``PretrainedConfig``; ``models/llama/config.py``.
    """
    c = model.config
    heads = c.count("num_attention_heads")
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    dtype = next(part.tensor.dtype for part in model.parts if part.word == "embed")
    whole_experts = grid.ep_size > 1
    return {
        "architecture": model.architecture,
        "dtype": DTYPES.get(dtype, dtype),
        "logits_dtype": "float32",
        "vocab_size": c.count("vocab_size"),
        "max_position_embeddings": c.count("max_position_embeddings", default=2048),
        "hidden_size": c.count("hidden_size"),
        "intermediate_size": c.count("intermediate_size"),
        "num_hidden_layers": model.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": c.count("num_key_value_heads", default=heads),
        "head_size": c.head_dim(heads),
        "hidden_act": "swiglu" if model.experts else c.get("hidden_act") or "silu",
        "norm_epsilon": c.get("rms_norm_eps") or 1e-6,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rope.get("rope_theta") or c.get("rope_theta") or 10000.0,
        "rotary_scaling": None if kind == "default" else {key: rope[key] for key in rope if key != "rope_theta"},
        "qk_layernorm": False,
        "attn_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {
            "world_size": len(grid.ranks),
            "gpus_per_node": 8,
            "cp_size": 1,
            "tp_size": grid.tp_size,
            "pp_size": grid.pp_size,
            "moe_tp_size": 1 if whole_experts else grid.tp_size,
            "moe_ep_size": grid.ep_size,
        },
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "moe": {
            "num_experts": model.experts,
            "top_k": c.count("num_experts_per_tok") if model.experts else 0,
            "normalization_mode": RENORMALIZE if model.experts else None,
        },
    }
