"""Meta's own files of Llama: ``consolidated.NN.pth`` for every model-parallel rank, and ``params.json``.

Read by ``llama-models`` and everything that takes "original" checkpoints. Rows of queries and keys are in pairs, as
Meta's rotary embedding turns neighbours where transformers turns halves. A rank has whole KV heads: there are no more
ranks than those. The two versions differ in the embedding alone: Llama 1 and 2 cut it along the hidden width
(``ParallelEmbedding``), Llama 3 along the vocabulary (``VocabParallelEmbedding``). The config does not tell which code
will load the files, so the version does; without one it is llama3, what Meta's code has today. On one rank the two are
the same.

Source: github.com/meta-llama/llama ``llama/model.py`` (2023), github.com/meta-llama/llama-models
``models/llama3/model.py``, transformers ``models/llama/convert_llama_weights_to_hf.py``.
"""

from __future__ import annotations

import json
import re

from tpshard.config import Config
from tpshard.errors import UnsupportedError
from tpshard.exporting.enginetable import ALONG_OTHER, CUT, ROTARY, TORCH, EngineTable, Entry, Version
from tpshard.exporting.grid import Grid, Rank
from tpshard.exporting.parts import Model

ENGINE = "meta"
SUMMARY = "Meta's consolidated.NN.pth with params.json, for Llama's own code"
VERSIONS = (
    Version("llama3", "embedding cut along the vocabulary; by the rules of Meta's layers, read by torch.load"),
    Version("llama2", "embedding cut along the hidden width; by the rules of Meta's layers, read by torch.load"),
)

PATTERN = re.compile(r"consolidated\.(?P<tp>\d{2,4})\.pth")
CONTAINER = TORCH
WITHIN = ""
IGNORED = re.compile(r"rope\.freqs")  # of 2023: the code computes them

_LAYER = "layers.{layer}"
ENTRIES = (
    Entry("head", "output.{kind}"),
    Entry("norm norm", "norm.{kind}"),
    Entry("q", f"{_LAYER}.attention.wq.{{kind}}", form=ROTARY),
    Entry("k", f"{_LAYER}.attention.wk.{{kind}}", form=ROTARY),
    Entry("v", f"{_LAYER}.attention.wv.{{kind}}"),
    Entry("o", f"{_LAYER}.attention.wo.{{kind}}"),
    Entry("gate", f"{_LAYER}.feed_forward.w1.{{kind}}"),
    Entry("down", f"{_LAYER}.feed_forward.w2.{{kind}}"),
    Entry("up", f"{_LAYER}.feed_forward.w3.{{kind}}"),
    Entry("norm input_layernorm", f"{_LAYER}.attention_norm.{{kind}}"),
    Entry("norm post_attention_layernorm", f"{_LAYER}.ffn_norm.{{kind}}"),
)


KNOWN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
"""Classes whose blocks are Llama's; Qwen2's have biases, which code that knows them adds."""


def table(model: Model, version: str) -> EngineTable:
    """What Meta's code stores of a model.

    Raises:
        UnsupportedError: the code has no such blocks, activation or rotary embedding.
    """
    c = model.config
    if model.architecture not in KNOWN:
        named = model.architecture or "a model without architectures in config.json"
        raise UnsupportedError(
            f"Meta's code computes Llama's blocks, and those of {named} "
            f"may be others with tensors of the same kinds; it runs {', '.join(sorted(KNOWN))}"
        )
    activation = c.get("hidden_act") or "silu"
    if activation != "silu":
        raise UnsupportedError(f"Meta's code has the activation silu alone; this model has {activation!r:.40}")
    _scaled_rope(c)
    return EngineTable(
        (Entry("embed", "tok_embeddings.{kind}", form=ALONG_OTHER if version == "llama2" else CUT), *ENTRIES),
        file_name,
        vocabulary=rows,
        kv_shared=False,
        most=(1, 1),
        tied=("embed", "head"),
        container=TORCH,
        sides=lambda model, grid: {"params.json": params(model)},
    )


def file_name(grid: Grid, rank: Rank, part: int, parts: int) -> str:
    return f"consolidated.{rank.tp:02d}.pth"


def rows(vocab: int, tp_size: int) -> int:
    """No padding: fairscale divides the vocabulary or stops (``divide_and_check_no_remainder``)."""
    if vocab % tp_size:
        raise UnsupportedError(
            f"Meta's layers share a vocabulary of {vocab} among ranks without padding, and {tp_size} does not divide it"
        )
    return vocab // tp_size


def params(model: Model) -> bytes:
    """``params.json``: the arguments of Meta's ``ModelArgs``."""
    c = model.config
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    multiple, factor = feed_forward(hidden, c.count("intermediate_size"))
    values: dict[str, object] = {
        "dim": hidden,
        "n_layers": model.layers,
        "n_heads": heads,
        "n_kv_heads": c.count("num_key_value_heads", default=heads),
        "vocab_size": c.count("vocab_size"),
        "multiple_of": multiple,
        "ffn_dim_multiplier": factor,
        "norm_eps": c.get("rms_norm_eps") or 1e-5,
        "rope_theta": _rope(c).get("rope_theta") or c.get("rope_theta") or 10000.0,
    }
    if _scaled_rope(c):
        values["use_scaled_rope"] = True
    return (json.dumps(values, indent=2) + "\n").encode()


def feed_forward(hidden: int, width: int) -> tuple[int, float | None]:
    """``(multiple_of, ffn_dim_multiplier)`` from which Meta's ``FeedForward`` computes the width.

    It takes two thirds of ``4 * hidden``, times the multiplier, rounded up to the multiple.
    """
    base = 2 * 4 * hidden // 3
    for multiple in (256, 1024, 4096):
        if -(-base // multiple) * multiple == width:
            return multiple, None
    multiple = min(width & -width, 4096)
    return multiple, (width - multiple / 2) / base if multiple > 1 else (width + 0.5) / base


def _rope(c: Config) -> dict[str, object]:
    found = c.get("rope_parameters") or c.get("rope_scaling")
    return found if isinstance(found, dict) else {}


def _scaled_rope(c: Config) -> bool:
    """Whether the rotary embedding is that of Llama 3.1 (``use_scaled_rope``).

    Raises:
        UnsupportedError: it is scaled in another way.
    """
    kind = _rope(c).get("rope_type") or _rope(c).get("type") or "default"
    if kind not in ("default", "llama3"):
        raise UnsupportedError(
            f"Meta's code has no rotary embedding scaled as {kind!r:.40}; it has the plain one and that of Llama 3.1"
        )
    return kind == "llama3"
