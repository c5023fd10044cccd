"""vLLM's ``sharded_state``: the tensors of every rank as vLLM's own loaders hold them before post-processing.

``vllm serve OUT --load-format sharded_state --tensor-parallel-size N``. Names are those of ``state_dict()`` of the
class that ``architectures`` names; of several names for one tensor the first in the alphabet is stored, which is why a
tied model has ``lm_head`` alone and a router may lie below the experts. Which of the two it is, is the class's.

Source: vLLM 0.33.0, ``model_loader/sharded_state_loader.py`` and the classes below ``model_executor/models``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from tpshard.errors import UnsupportedError
from tpshard.exporting.enginetable import CUT, OWN, WHOLE, Constant, EngineTable, Entry, Version
from tpshard.exporting.grid import Grid, Rank
from tpshard.exporting.parts import Model, Part
from tpshard.intervals import Bounds

ENGINE = "vllm"
SUMMARY = "serving: sharded_state, loaded with --load-format sharded_state"
VERSIONS = (
    Version("0.33", "names, shapes and bytes against vLLM 0.33.0's own loaders on a CPU"),
    Version("0.32", "names and shapes against vLLM 0.32.0's own loaders on a CPU"),
    Version("0.11", "read in the source of 0.11.0, not run; without pipeline stages"),
)

PATTERN = re.compile(r"model-(?:rank|pp-(?P<pp>\d{1,4})-tp)-(?P<tp>\d{1,4})-part-\d{1,5}\.safetensors")
ONE = struct.pack("<f", 1.0)
SCALES = tuple(f"_{name}_scale" for name in ("k", "v", "q", "prob"))  # buffers of every attention layer since 0.12
SHARED = "{outer}.experts._shared_experts._layer"


def _attention(scales: Sequence[str], form: str = CUT) -> tuple[Entry, ...]:
    beside = tuple(Constant(f"{{parent}}.attn.{name}", "F32", ONE) for name in scales)
    return (
        Entry("q k v", "{parent}.qkv_proj.{kind}", fused="{module}.{kind}", form=form, beside=beside),
        Entry("gate up", "{parent}.gate_up_proj.{kind}", fused="{module}.{kind}"),
    )


def _latent(scales: Sequence[str]) -> tuple[Entry, ...]:
    beside = tuple(Constant(f"{{parent}}.mla_attn.mla_attn.{name}", "F32", ONE) for name in scales)
    return (
        Entry("q_a kv_a", "{parent}.fused_qkv_a_proj.{kind}", form=WHOLE, needs="q_a"),
        Entry("norm q_a_layernorm", "{parent}.mla_attn.q_a_layernorm.{kind}"),
        Entry("q_b", "{parent}.mla_attn.q_b_proj.{kind}"),
        Entry("q", "{parent}.mla_attn.q_proj.{kind}"),
        Entry("o", "{parent}.mla_attn.o_proj.{kind}", beside=beside),
    )


def _mixture(router: str, bank: str) -> tuple[Entry, ...]:
    return (
        Entry("router", f"{{parent}}.{router}.{{kind}}", form=WHOLE),
        Entry("router", f"{{outer}}.{router}.{{leaf}}", kinds=("",), form=WHOLE),  # its correction
        Entry("expert_gate expert_up", f"{{parent}}.{bank}w13_{{kind}}"),
        Entry("expert_down", f"{{parent}}.{bank}w2_{{kind}}"),
        Entry("shared_gate shared_up", f"{SHARED}.gate_up_proj.{{kind}}"),
        Entry("shared_down", f"{SHARED}.down_proj.{{kind}}"),
        Entry("shared_router", "{parent}.experts._shared_experts._layer.expert_gate.{kind}", form=WHOLE),
    )


REST = (Entry("head", "lm_head.{kind}"), Entry("*", "{own}", kinds=("weight", "bias", "")))

GATE_INSIDE, GATE_BESIDE = "experts.gate", "gate"  # where the class registers its router first in the alphabet
ROUTERS = {
    "DeepseekV2ForCausalLM": GATE_INSIDE,
    "DeepseekV3ForCausalLM": GATE_INSIDE,
    "MixtralForCausalLM": GATE_BESIDE,
    "Qwen2MoeForCausalLM": GATE_BESIDE,
    "Qwen3MoeForCausalLM": GATE_INSIDE,
}
"""Of classes with routed experts: the name under which the router is stored, below the module of the feed-forward."""

RENAMED = {
    "GPTNeoXForCausalLM": (("gpt_neox.", "model."),),
    "MixtralForCausalLM": ((".mlp.", ".block_sparse_moe."),),  # files that transformers 5 wrote
}
"""What a class calls otherwise than the checkpoint."""

IN_TRANSFORMERS = frozenset({"GPTNeoXForCausalLM"})
"""Classes that vLLM runs by transformers' own code: a fused matrix stays in the checkpoint's order."""

HEAD_IS_EMBEDDING = frozenset({"Gemma2ForCausalLM", "GemmaForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM"})
"""Classes without a head of their own: they look tokens up backwards in the embedding."""

CHECKED = frozenset(
    {
        *ROUTERS, *RENAMED, "FalconForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "LlamaForCausalLM",
        "MistralForCausalLM", "OPTForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    }
)  # fmt: skip
"""Classes whose names and bytes were compared with the loader's."""


READ = frozenset(
    {
        "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)  # fmt: skip
"""Classes whose names were read in the source of 0.11."""


def table(model: Model, version: str) -> EngineTable:
    """What vLLM stores of a model.

    Raises:
        UnsupportedError: the names that the model's class has are not known.
    """
    name, is_old = model.architecture, version == "0.11"
    known = READ if is_old else CHECKED
    if name not in known:
        raise UnsupportedError(
            f"vLLM {version}'s names for {name or 'a model without architectures in config.json'} are not known; those "
            f"of {', '.join(sorted(known))} are"
        )
    scales = () if is_old else SCALES
    attention = _attention(scales, OWN if name in IN_TRANSFORMERS else CUT)
    entries = [*(_latent(scales) if "kv_a" in model.words else ()), *attention]
    if "router" in model.words:
        entries += _mixture(GATE_BESIDE, "") if is_old else _mixture(ROUTERS[name], "routed_experts.")
    return EngineTable(
        (*entries, *REST),
        file_name,
        vocabulary=rows,
        stages=stages,
        tied=("embed",) if name in HEAD_IS_EMBEDDING else ("head",),
        tied_last="embed" if name in HEAD_IS_EMBEDDING else "head",
        drop=lambda part: _dropped(part, model),
        rename=RENAMED.get(name, ()),
        part_bytes=5 << 30,
        most=(1 if is_old else None, None),
    )


def _dropped(part: Part, model: Model) -> str:
    if part.layer is not None and part.layer >= model.layers:
        return "a prediction layer, which vLLM loads as a model of its own"
    return ""


def file_name(grid: Grid, rank: Rank, part: int, parts: int) -> str:
    """``model-rank-0-part-0.safetensors``, with pipeline stages ``model-pp-0-tp-0-part-0.safetensors``."""
    place = f"rank-{rank.tp}" if grid.pp_size == 1 else f"pp-{rank.pp}-tp-{rank.tp}"
    return f"model-{place}-part-{part}.safetensors"


def rows(vocab: int, tp_size: int) -> int:
    """The vocabulary is padded to a multiple of 64, which the degree must divide.

    Source: ``layers/vocab_parallel_embedding.py``, ``pad_vocab_size`` and ``divide``.
    """
    padded = -(-vocab // 64) * 64
    if padded % tp_size:
        raise UnsupportedError(
            f"vLLM pads the vocabulary of {vocab} to {padded} rows, which {tp_size} ranks cannot share equally; choose "
            "a degree that divides it"
        )
    return padded // tp_size


def stages(layers: int, pp_size: int) -> tuple[Bounds, ...]:
    """Layers left over go one each to the stages before the last, the last but one first.

    Source: ``distributed/utils.py``, ``get_pp_indices``.
    """
    base, extra = divmod(layers, pp_size)
    counts = [base] * pp_size
    for number in range(2, extra + 2):
        counts[-number] += 1
    bounds, at = [], 0
    for count in counts:
        bounds.append((at, at + count))
        at += count
    return tuple(bounds)
