"""The files of DeepSeek's own inference code for V2 and V3: ``model{rank}-mp{ranks}.safetensors``.

``torchrun --nproc-per-node N generate.py --ckpt-path OUT --config CONFIG``, with a config of its repository.
Experts are never cut: every rank holds as many whole ones, under their numbers in the model. The code has no
prediction layers and takes exactly the tensors that its model has, so those layers are left out, whatever their
numbers: they are the ones past ``num_hidden_layers``.

Source: github.com/deepseek-ai/DeepSeek-V3 of 2025-08, ``inference/model.py`` and ``inference/convert.py``.
"""

from __future__ import annotations

import re

from tpshard.errors import UnsupportedError
from tpshard.exporting.enginetable import EngineTable, Entry, Version
from tpshard.exporting.grid import Grid, Rank
from tpshard.exporting.parts import Model, Part

ENGINE = "deepseek"
SUMMARY = "DeepSeek's own inference code for V2 and V3 (bf16)"
VERSIONS = (Version("2025-08", "tensors of every rank against those of the repository's convert.py"),)

PATTERN = re.compile(r"model(?P<tp>\d+)-mp(?P<tp_size>\d+)\.safetensors")


def _matrices(words: str, names: str, at: str) -> tuple[Entry, ...]:
    return tuple(
        Entry(word, f"layers.{{layer}}.{at}.{name}.{{kind}}", kinds=("weight",))
        for word, name in zip(words.split(), names.split(), strict=True)
    )


ENTRIES = (
    Entry("embed", "embed.{kind}", kinds=("weight",)),
    Entry("head", "head.{kind}", kinds=("weight",)),
    Entry("norm norm", "norm.{kind}", kinds=("weight",)),
    Entry("norm input_layernorm", "layers.{layer}.attn_norm.{kind}", kinds=("weight",)),
    Entry("norm post_attention_layernorm", "layers.{layer}.ffn_norm.{kind}", kinds=("weight",)),
    Entry("norm q_a_layernorm", "layers.{layer}.attn.q_norm.{kind}", kinds=("weight",)),
    Entry("norm kv_a_layernorm", "layers.{layer}.attn.kv_norm.{kind}", kinds=("weight",)),
    *_matrices("q q_a q_b kv_a kv_b o", "wq wq_a wq_b wkv_a wkv_b wo", "attn"),
    *_matrices("gate up down", "w1 w3 w2", "ffn"),
    *_matrices("router", "gate", "ffn"),
    Entry("router", "layers.{layer}.ffn.gate.bias", kinds=("",)),  # the correction for the choice of experts
    *_matrices("shared_gate shared_up shared_down", "w1 w3 w2", "ffn.shared_experts"),
    *_matrices("expert_gate expert_up expert_down", "w1 w3 w2", "ffn.experts.{expert}"),
)


def table(model: Model, version: str) -> EngineTable:
    """What DeepSeek's code stores of a model.

    Raises:
        UnsupportedError: the model has no latent attention, which is the only one that the code knows.
    """
    if "kv_a" not in model.words:
        raise UnsupportedError(
            f"DeepSeek's code runs models with latent attention alone; {model.architecture or 'this model'} has none"
        )
    return EngineTable(
        ENTRIES,
        file_name,
        vocabulary=rows,
        whole_experts=True,
        most=(1, None),
        tied=("embed", "head"),
        drop=lambda part: _dropped(part, model),
    )


def _dropped(part: Part, model: Model) -> str:
    if part.layer is not None and part.layer >= model.layers:
        return "a prediction layer, which DeepSeek's inference code does not run and refuses to load"
    return ""


def file_name(grid: Grid, rank: Rank, part: int, parts: int) -> str:
    """``model0-mp8.safetensors``.

    Raises:
        UnsupportedError: a rank's tensors in several files, which the code does not look for.
    """
    if parts > 1:
        raise UnsupportedError(
            f"DeepSeek's code loads one file a rank; the size limit makes {parts} of rank {rank.tp}: leave it out"
        )
    return f"model{rank.tp}-mp{grid.tp_size}.safetensors"


def rows(vocab: int, tp_size: int) -> int:
    """Equal rows and no padding.

    Source: ``inference/model.py``, ``ParallelEmbedding``.
    """
    if vocab % tp_size:
        raise UnsupportedError(
            f"DeepSeek's code does not pad the vocabulary of {vocab}, which {tp_size} ranks do not share equally; "
            "choose a degree that divides it"
        )
    return vocab // tp_size
