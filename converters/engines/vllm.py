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
from tpshard.exporting.enginetable import CUT, PLAIN, WHOLE, Constant, EngineTable, Entry, Version
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

GATE_INSIDE, GATE_BESIDE = "experts.gate", "gate"  # where a class registers its router first in the alphabet
BANK = "routed_experts"


class Class(NamedTuple):
    """How one of vLLM's classes goes another way than most.

    Args:
        router: of a class with routed experts the path of its router, below the module of the feed-forward.
        bank: the path of its stacked experts, below the module that holds the checkpoint's.
        correction: the path of the router's correction, where it is not the router's.
        by_transformers: whether vLLM has no class of its own and runs transformers' modules. Queries, keys and values
            stay apart there, and what the checkpoint has fused is cut as it is.
        head: whether there is one; a class without looks tokens up backwards in the embedding.
        cuts_norms: whether norms over all heads are cut with the heads; elsewhere every rank has them whole.
        lacks: a stretch of the names of tensors that a checkpoint may have and the class has no place for.
        rename: what it calls otherwise than the checkpoint.
        since: the first version whose names are known.
    """

    router: str = ""
    bank: str = BANK
    correction: str = ""
    by_transformers: bool = False
    head: bool = True
    cuts_norms: bool = False
    lacks: str = ""
    rename: tuple[tuple[str, str], ...] = ()
    since: str = "0.33"


CLASSES: Mapping[str, Class] = {
    "BloomForCausalLM": Class(since="0.32"),
    "Cohere2ForCausalLM": Class(head=False),
    "CohereForCausalLM": Class(head=False, cuts_norms=True),
    "DeepseekV2ForCausalLM": Class(GATE_INSIDE, since="0.32"),
    "DeepseekV3ForCausalLM": Class(GATE_INSIDE, since="0.32"),
    "FalconForCausalLM": Class(since="0.32"),
    "GPTNeoXForCausalLM": Class(by_transformers=True, rename=(("gpt_neox.", "model."),), since="0.32"),
    "Gemma2ForCausalLM": Class(head=False, since="0.32"),
    "Gemma3ForCausalLM": Class(since="0.32"),
    "GemmaForCausalLM": Class(),
    "Glm4ForCausalLM": Class(),
    "Glm4MoeForCausalLM": Class(GATE_BESIDE, correction=f"experts.{BANK}"),
    "GlmForCausalLM": Class(by_transformers=True),
    "GraniteForCausalLM": Class(),
    "GraniteMoeForCausalLM": Class(
        GATE_BESIDE, f"experts.{BANK}", rename=((".block_sparse_moe.router", ".block_sparse_moe"),)
    ),
    "LlamaForCausalLM": Class(since="0.11"),
    "MistralForCausalLM": Class(since="0.11"),
    "MixtralForCausalLM": Class(GATE_BESIDE, rename=((".mlp", ".block_sparse_moe"),), since="0.11"),
    "NemotronForCausalLM": Class(),
    "OPTForCausalLM": Class(since="0.32"),
    "Olmo2ForCausalLM": Class(by_transformers=True),
    "OlmoForCausalLM": Class(by_transformers=True),
    "OlmoeForCausalLM": Class(GATE_BESIDE),
    "Phi3ForCausalLM": Class(since="0.32"),
    "PhiForCausalLM": Class(by_transformers=True),
    "Qwen2ForCausalLM": Class(since="0.11"),
    "Qwen2MoeForCausalLM": Class(GATE_BESIDE, since="0.32"),
    "Qwen3ForCausalLM": Class(since="0.11"),
    "Qwen3MoeForCausalLM": Class(GATE_INSIDE, since="0.11"),
    "StableLmForCausalLM": Class(lacks="_layernorm.norms."),
    "Starcoder2ForCausalLM": Class(by_transformers=True),
}
"""Classes whose names and bytes were compared with those that the loader of 0.33 holds."""

GONE = {"MPTForCausalLM": "0.28", "MptForCausalLM": "0.28"}
"""The last version of vLLM that had a class."""


def table(model: Model, version: str) -> EngineTable:
    """What vLLM stores of a model.

    Raises:
        UnsupportedError: the names that the model's class has are not known, or vLLM itself cannot load it.
    """
    name = model.architecture
    known = {each: one for each, one in CLASSES.items() if _number(one.since) <= _number(version)}
    if name in GONE and _number(version) > _number(GONE[name]):
        raise UnsupportedError(f"vLLM {version} cannot run {name}, which it supported until {GONE[name]}")
    if name not in known:
        raise UnsupportedError(
            f"vLLM {version}'s names for {name or 'a model without architectures in config.json'} are not known; those "
            f"of {', '.join(sorted(known))} are"
        )
    cls, is_old = known[name], version == "0.11"
    _require_place(model, cls, name)
    scales = () if is_old else SCALES
    entries = [*(_latent(scales) if "kv_a" in model.words else ()), *_matrices(model, cls, scales)]
    if cls.router:
        entries += _mixture(GATE_BESIDE, "", "") if is_old else _mixture(cls.router, f"{cls.bank}.", cls.correction)
    return EngineTable(
        (*entries, *REST),
        file_name,
        vocabulary=rows,
        stages=stages,
        kv_shared=not cls.by_transformers,  # modules of transformers cut keys like any matrix, through a shared head
        tied=("head",) if cls.head else ("embed",),
        tied_last="head" if cls.head else "embed",
        drop=lambda part: _dropped(part, model),
        rename=cls.rename,
        part_bytes=5 << 30,
        most=(1 if is_old else None, None),
    )


REST = (Entry("head", "lm_head.{kind}"), Entry("*", "{own}", kinds=("weight", "bias", "")))


def _scaled(name: str, scales: Sequence[str]) -> tuple[Constant, ...]:
    return tuple(Constant(f"{{parent}}.{name}.{scale}", "F32", ONE) for scale in scales)


def _matrices(model: Model, cls: Class, scales: Sequence[str]) -> tuple[Entry, ...]:
    beside = _scaled("attn", scales)
    attention = Entry("q k v", "{parent}.qkv_proj.{kind}", fused="{module}.{kind}", beside=beside)
    gates = Entry("gate up", "{parent}.gate_up_proj.{kind}", fused="{module}.{kind}")
    if cls.by_transformers:
        fused = {part.word for part in model.parts if part.strand is not None}
        attention = Entry("q k v" if "q" in fused else "q", "{own}", form=PLAIN if "q" in fused else CUT, beside=beside)
        gates = Entry("gate up", "{own}", form=PLAIN) if "gate" in fused else gates
    norms = [Entry(f"norm {at}_norm", "{own}", form=CUT if cls.cuts_norms else WHOLE) for at in "qk"]
    return (attention, gates, *norms)


def _latent(scales: Sequence[str]) -> tuple[Entry, ...]:
    return (
        Entry("q_a kv_a", "{parent}.fused_qkv_a_proj.{kind}", form=WHOLE, needs="q_a"),
        Entry("norm q_a_layernorm", "{parent}.mla_attn.q_a_layernorm.{kind}"),
        Entry("q_b", "{parent}.mla_attn.q_b_proj.{kind}"),
        Entry("q", "{parent}.mla_attn.q_proj.{kind}"),
        Entry("o", "{parent}.mla_attn.o_proj.{kind}", beside=_scaled("mla_attn.mla_attn", scales)),
    )


def _mixture(router: str, bank: str, correction: str) -> tuple[Entry, ...]:
    shared = "{outer}.experts._shared_experts._layer"
    return (
        Entry("router", f"{{parent}}.{router}.{{kind}}", form=WHOLE),
        Entry("router", f"{{outer}}.{correction or router}.{{leaf}}", kinds=("",), form=WHOLE),
        Entry("expert_gate expert_up", f"{{parent}}.{bank}w13_{{kind}}"),
        Entry("expert_down", f"{{parent}}.{bank}w2_{{kind}}"),
        Entry("shared_gate shared_up", f"{shared}.gate_up_proj.{{kind}}"),
        Entry("shared_down", f"{shared}.down_proj.{{kind}}"),
        Entry("shared_router", "{parent}.experts._shared_experts._layer.expert_gate.{kind}", form=WHOLE),
    )


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _require_place(model: Model, cls: Class, name: str) -> None:
    """Raise UnsupportedError where vLLM's own module has no place for a tensor, though its class is known.

    Source: ``models/deepseek_v2.py`` (``DeepseekV2MoE``), ``models/transformers/causal.py`` (``load_weights``).
    """
    for part in model.parts:
        tensor = part.tensor.name
        if part.word == "router" and not cls.router:
            raise UnsupportedError(f"vLLM's {name} has no experts, and the model has {tensor}; look at architectures")
        if cls.lacks and cls.lacks in tensor:
            raise UnsupportedError(f"vLLM's {name} has no place for {tensor}: it cannot load such a checkpoint either")
        if cls.by_transformers and part.word == "head" and part.kind == "bias":
            raise UnsupportedError(
                f"vLLM makes {tensor} of {name} only while it loads a checkpoint, and its loader of sharded_state then "
                "fails with a KeyError; serve the checkpoint itself"
            )
        method = model.config.values.get("topk_method")
        if part.word == "router" and not part.kind and "kv_a" in model.words and method != "noaux_tc":
            raise UnsupportedError(
                f"vLLM has no place for {tensor} where config.json says topk_method {method!r:.40}; add "
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
