"""SGLang's ``sharded_state`` of dense models in bf16: vLLM's fusions without its scales.

``python -m sglang.launch_server --model-path OUT --load-format sharded_state --tp N``. SGLang saves and loads what its
back-ends made of the weights after loading. For dense models that are not quantised that is the weights themselves; for
experts and quantised matrices it is an order of bytes that hangs on the device, so they are refused.

Source: SGLang 0.5.23, ``model_loader/loader.py`` (``ShardedStateLoader``) and ``layers/vocab_parallel_embedding.py``;
read and not run.
"""

from __future__ import annotations

import re

from tpshard.errors import UnsupportedError
from tpshard.exporting.enginetable import EngineTable, Entry, Version
from tpshard.exporting.grid import Grid, Rank
from tpshard.exporting.parts import Model

ENGINE = "sglang"
SUMMARY = "serving: sharded_state of dense models that are not quantised, loaded with --load-format sharded_state"
VERSIONS = (Version("0.5.23", "written from its source, not loaded by it: it does not run on a CPU here"),)

PATTERN = re.compile(r"model-rank-(?P<tp>\d+)-part-(?P<part>\d+)\.safetensors")

ENTRIES = (
    Entry("q k v", "{parent}.qkv_proj.{kind}", fused="{module}.{kind}"),
    Entry("gate up", "{parent}.gate_up_proj.{kind}", fused="{module}.{kind}"),
    Entry("head", "lm_head.{kind}"),
    Entry("*", "{own}"),
)

CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes whose modules are called as in the checkpoint, but for the two fusions."""


def table(model: Model, version: str) -> EngineTable:
    """What SGLang stores of a model.

    Raises:
        UnsupportedError: it has experts, or its class is none of those whose names are known.
    """
    if "router" in model.words:
        raise UnsupportedError(
            f"SGLang stores the experts of {model.architecture or 'this model'} in the order that its back-end put "
            "them in after loading, which hangs on the device; serve the checkpoint, or save it with SGLang there"
        )
    if model.architecture not in CLASSES:
        raise UnsupportedError(
            f"SGLang's names for {model.architecture or 'a model without architectures in config.json'} are not known; "
            f"those of {', '.join(sorted(CLASSES))} are"
        )
    return EngineTable(
        ENTRIES, file_name, vocabulary=rows, most=(1, 1), tied=("head",), part_bytes=5 << 30, metadata={"format": "pt"}
    )


def file_name(grid: Grid, rank: Rank, part: int, parts: int) -> str:
    """``model-rank-0-part-0.safetensors``; pipeline stages have no place in the name."""
    return f"model-rank-{rank.tp}-part-{part}.safetensors"


def rows(vocab: int, tp_size: int) -> int:
    """The vocabulary is padded to a multiple of 64, and of 64 x ranks where those do not share it equally."""
    padded = -(-vocab // 64) * 64
    if padded % tp_size:
        padded = -(-vocab // (64 * tp_size)) * 64 * tp_size
    return padded // tp_size
