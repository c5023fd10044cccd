"""I-BERT: RoBERTa whose matrices, embeddings and norms carry what their integer forms need.

``weight_integer`` and ``fc_scaling_factor`` are cut like the matrix that they are of; a scale of activations is one
number.
Source: transformers ``models/ibert/{modeling_ibert,quant_modules}.py``; arXiv 2101.01321.
"""

from __future__ import annotations

from tpshard.axes import Dim
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, pooler, roberta_head, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "ibert"
MODEL_TYPES = ("ibert",)
_EMBEDDINGS = ("embeddings_act1", "embeddings_act2", "output_activation", "LayerNorm.activation")
_LAYER = ("pre_intermediate_act", "pre_output_act", "intermediate.output_activation")
_SELF = ("query_activation", "key_activation", "value_activation", "output_activation", "softmax.act")
_OUTPUT = ("ln_input_act", "output_activation", "LayerNorm.activation")


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    layer = "@encoder.layer.{layer}"

    t = Table(c.count("num_hidden_layers"), prefixes=("ibert.", ""))
    embeddings(t, c, vocab, e.hidden, behind_padding=True)
    _scales(t, "@embeddings", _EMBEDDINGS)
    for name, role in (("word", "embed"), ("position", "position"), ("token_type", "position")):
        rows = vocab if name == "word" else None
        t.tensor(f"@embeddings.{name}_embeddings.weight_integer", rows, e.hidden, role=role)
        t.tensor(f"@embeddings.{name}_embeddings.weight_scaling_factor", 1, role="buffer")
    encoder_layer(t, e)
    for name, role, dim in (("query", "q", e.q), ("key", "k", e.kv), ("value", "v", e.kv)):
        _column(t, f"{layer}.attention.self.{name}", dim, e.hidden, role)
    _column(t, f"{layer}.intermediate.dense", e.ffn, e.hidden, "up")
    _row(t, f"{layer}.attention.output", e.hidden, e.q, "o")
    _row(t, f"{layer}.output", e.hidden, e.ffn, "down")
    _scales(t, layer, _LAYER)
    _scales(t, f"{layer}.attention.self", _SELF)
    for norm in ("@embeddings.LayerNorm", f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"):
        t.tensor(f"{norm}.shift", 1, role="buffer")
    pooler(t, e.hidden)
    roberta_head(t, c, e.hidden, vocab)
    task_heads(t, e.hidden)
    return t


def _scales(t: Table, at: str, names: tuple[str, ...]) -> None:
    for name in names:
        for number in ("x_min", "x_max", "act_scaling_factor"):
            t.tensor(f"{at}.{name}.{number}", 1, role="buffer")


def _column(t: Table, name: str, out: Dim, into: int, role: str) -> None:
    t.tensor(f"{name}.weight_integer", out, into, role=role)
    t.tensor(f"{name}.bias_integer", out, role=f"{role}_bias")
    t.tensor(f"{name}.fc_scaling_factor", out, role=f"{role}_bias")


def _row(t: Table, at: str, out: int, into: Dim, role: str) -> None:
    t.tensor(f"{at}.dense.weight_integer", out, into, role=role)
    t.tensor(f"{at}.dense.bias_integer", out, role="buffer")  # every rank scales its part alike, before the sum
    t.tensor(f"{at}.dense.fc_scaling_factor", out, role="buffer")
    _scales(t, at, _OUTPUT)
