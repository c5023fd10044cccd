"""vLLM's ``sharded_state``: the tensors of every rank as vLLM's own loaders hold them before post-processing.

``vllm serve OUT --load-format sharded_state --tensor-parallel-size N``. Names are those of ``state_dict()`` of the
class that ``architectures`` names; of several names for one tensor the first in the alphabet is stored, which is why a
tied model has ``lm_head`` alone and a router may lie below the experts. Which of the two it is, is the class's.

Source: vLLM 0.33.0, ``model_loader/sharded_state_loader.py`` and the classes below ``model_executor/models``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpshard.errors import UnsupportedError
from tpshard.exporting.enginetable import OWN, WHOLE, Constant, EngineTable, Entry, Version
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
GATE_UP = Entry("gate up", "{parent}.gate_up_proj.{kind}", fused="{module}.{kind}")


def _scaled(name: str, scales: Sequence[str]) -> tuple[Constant, ...]:
    return tuple(Constant(f"{{parent}}.{name}.{scale}", "F32", ONE) for scale in scales)


def _attention(scales: Sequence[str]) -> tuple[Entry, ...]:
    beside = _scaled("attn", scales)
    return (Entry("q k v", "{parent}.qkv_proj.{kind}", fused="{module}.{kind}", beside=beside), GATE_UP)


def _apart(model: Model, scales: Sequence[str]) -> tuple[Entry, ...]:
    """Of a class that runs transformers' modules: attention as in the checkpoint, norms over all heads whole."""
    beside = _scaled("attn", scales)
    fused = Entry("q k v", "{own}", form=OWN, beside=beside)
    norms = [Entry(f"norm {at}_norm", "{own}", form=WHOLE) for at in "qk"]
    is_fused = any(part.word == "q" and part.strand is not None for part in model.parts)
    return (fused if is_fused else Entry("q", "{own}", beside=beside), *norms, GATE_UP)


def _latent(scales: Sequence[str]) -> tuple[Entry, ...]:
    return (
        Entry("q_a kv_a", "{parent}.fused_qkv_a_proj.{kind}", form=WHOLE, needs="q_a"),
        Entry("norm q_a_layernorm", "{parent}.mla_attn.q_a_layernorm.{kind}"),
        Entry("q_b", "{parent}.mla_attn.q_b_proj.{kind}"),
        Entry("q", "{parent}.mla_attn.q_proj.{kind}"),
        Entry("o", "{parent}.mla_attn.o_proj.{kind}", beside=_scaled("mla_attn.mla_attn", scales)),
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

GATE_INSIDE, GATE_BESIDE = "experts.gate", "gate"  # where a class registers its router first in the alphabet


class Class(NamedTuple):
    """How one of vLLM's classes goes another way than most.

    Args:
        router: of a class with routed experts the name of its router, below the module of the feed-forward.
        own_attention: whether queries, keys and values stay apart, or fused in the checkpoint's order. So it is where
            vLLM has no class of its own and runs transformers' modules; a norm over all heads is then whole, too.
        head: whether there is one; a class without looks tokens up backwards in the embedding.
        rename: what it calls otherwise than the checkpoint.
        since: the first version whose names are known.
    """

    router: str = ""
    own_attention: bool = False
    head: bool = True
    rename: tuple[tuple[str, str], ...] = ()
    since: str = "0.32"


CLASSES: Mapping[str, Class] = {
    "BloomForCausalLM": Class(),
    "CohereForCausalLM": Class(head=False, since="0.33"),
    "DeepseekV2ForCausalLM": Class(GATE_INSIDE),
    "DeepseekV3ForCausalLM": Class(GATE_INSIDE),
    "FalconForCausalLM": Class(),
    "GPTNeoXForCausalLM": Class(own_attention=True, rename=(("gpt_neox.", "model."),)),
    "Gemma2ForCausalLM": Class(head=False),
    "Gemma3ForCausalLM": Class(),
    "GraniteForCausalLM": Class(since="0.33"),
    "LlamaForCausalLM": Class(since="0.11"),
    "MistralForCausalLM": Class(since="0.11"),
    "MixtralForCausalLM": Class(GATE_BESIDE, rename=((".mlp.", ".block_sparse_moe."),), since="0.11"),
    "OPTForCausalLM": Class(),
    "Olmo2ForCausalLM": Class(own_attention=True, since="0.33"),
    "Phi3ForCausalLM": Class(),
    "Qwen2ForCausalLM": Class(since="0.11"),
    "Qwen2MoeForCausalLM": Class(GATE_BESIDE),
    "Qwen3ForCausalLM": Class(since="0.11"),
    "Qwen3MoeForCausalLM": Class(GATE_INSIDE, since="0.11"),
    "StableLmForCausalLM": Class(since="0.33"),
    "Starcoder2ForCausalLM": Class(own_attention=True, since="0.33"),
}
"""Classes whose names and bytes were compared with those that the loader of 0.33 holds."""

CANNOT = {
    "MPTForCausalLM": "it has had no such class since 0.28",
    "MptForCausalLM": "it has had no such class since 0.28",
    "PhiForCausalLM": "its loader of sharded_state does not know the bias of the head (KeyError 'lm_head.bias')",
}
"""Why vLLM itself cannot read a class back."""


def table(model: Model, version: str) -> EngineTable:
    """What vLLM stores of a model.

    Raises:
        UnsupportedError: the names that the model's class has are not known, or vLLM itself cannot load it.
    """
    name = model.architecture
    if name in CANNOT:
        raise UnsupportedError(f"vLLM {version} cannot load a sharded_state of {name}: {CANNOT[name]}")
    known = {each: one for each, one in CLASSES.items() if _number(one.since) <= _number(version)}
    if name not in known:
        raise UnsupportedError(
            f"vLLM {version}'s names for {name or 'a model without architectures in config.json'} are not known; those "
            f"of {', '.join(sorted(known))} are"
        )
    one, is_old = known[name], version == "0.11"
    if "router" in model.words and not one.router:
        raise UnsupportedError(f"vLLM's {name} has no experts, and this model has; see architectures in its config.json")
    _require_correction(model)
    scales = () if is_old else SCALES
    entries = list(_latent(scales) if "kv_a" in model.words else ())
    entries += _apart(model, scales) if one.own_attention else _attention(scales)
    if one.router:
        entries += _mixture(GATE_BESIDE, "") if is_old else _mixture(one.router, "routed_experts.")
    return EngineTable(
        (*entries, *REST),
        file_name,
        vocabulary=rows,
        stages=stages,
        tied=("head",) if one.head else ("embed",),
        tied_last="head" if one.head else "embed",
        drop=lambda part: _dropped(part, model),
        kv_shared=not one.own_attention,  # transformers' modules cut keys like any matrix, through heads
        rename=one.rename,
        part_bytes=5 << 30,
        most=(1 if is_old else None, None),
    )


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _require_correction(model: Model) -> None:
    """Raise UnsupportedError where vLLM would not make the router's correction that the checkpoint has.

    Source: ``models/deepseek_v2.py``, ``DeepseekV2MoE``: it is made where ``topk_method`` is ``noaux_tc``.
    """
    found = next((part.tensor.name for part in model.parts if part.word == "router" and not part.kind), None)
    method = model.config.values.get("topk_method")
    if found and "kv_a" in model.words and method != "noaux_tc":
        raise UnsupportedError(
            f"vLLM has no place for {found} where config.json says topk_method {method!r:.40}; add "
            '"topk_method": "noaux_tc" to the config.json of the checkpoint, as its release has it'
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
