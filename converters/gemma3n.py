"""Gemma 3n: several residual streams (AltUp), a low-rank pair beside attention (LAuReL), embeddings for every layer.

The first layers set all but the largest of their gate's channels to zero, by mean and spread over all of them: there
the gate is put together over ranks. The last layers have no keys and values of their own; files may store unused ones.
Source: transformers ``models/gemma3n/modeling_gemma3n.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import attention, decoder, layer_inputs, norms
from tpshard.config import Config
from tpshard.table import NEEDS_GATHER, UNUSED, Table

FAMILY = "gemma3n"
USUAL = {
    "gemma3n_text": {
        "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
    },
}  # fmt: skip
MODEL_TYPES = tuple(USUAL)
STREAMS = "every rank has all residual streams"


def table(c: Config) -> Table:
    c = c.with_usual(**USUAL[c.model_type])
    hidden, layers, size = c.count("hidden_size"), c.count("num_hidden_layers"), c.count("head_dim")
    heads = Heads("heads", c.count("num_attention_heads"), c.count("num_key_value_heads"))
    bias, layer = c.flag("attention_bias", default=False), "@layers.{layer}"
    own = range(layers - c.number("num_kv_shared_layers"))

    t = decoder(c, prefixes=("model.", "model.language_model.", ""), tied=True)
    _streams(t, c, layer, hidden)
    layer_inputs(t, c, layer)
    at = f"{layer}.self_attn"
    with t.only(own):
        attention(t, at, heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
        norms(t, at, ("q_norm", "k_norm"), size)
    with t.only(range(len(own), layers)):
        t.linear(f"{at}.q_proj", heads.query(size), hidden, role="q", bias=bias)
        t.linear(f"{at}.o_proj", hidden, heads.query(size), role="o", bias=bias)
        t.norm(f"{at}.q_norm", size)
        for name in "kv":
            t.linear(f"{at}.{name}_proj", heads.kv(size), hidden, role=name, optional=True, note=UNUSED)
        t.norm(f"{at}.k_norm", size, optional=True)
    rank = Units("laurel", c.count("laurel_rank"), noun="channels of the low-rank pair", or_whole=True).each()
    t.linear(f"{layer}.laurel.linear_left", rank, hidden, role="low_in")
    t.linear(f"{layer}.laurel.linear_right", hidden, rank, role="low_out")
    t.norm(f"{layer}.laurel.post_laurel_norm", hidden)
    for (width, is_sparse), of in _widths(c, layers).items():
        ffn = Units(f"ffn_{width}", width, noun=f"of {width} feed-forward channels").each()
        with t.only(of):
            t.linear(f"{layer}.mlp.gate_proj", ffn, hidden, role="gate", note=NEEDS_GATHER if is_sparse else "")
            t.linear(f"{layer}.mlp.up_proj", ffn, hidden, role="up")
            t.linear(f"{layer}.mlp.down_proj", hidden, ffn, role="down")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    norms(t, layer, ("pre_feedforward_layernorm", "post_feedforward_layernorm"), hidden)
    return t


def _widths(c: Config, layers: int) -> Mapping[tuple[int, bool], list[int]]:
    """The layers of every feed-forward width, with and without gates that are set to zero by all channels' spread."""
    sparsity = c.get("activation_sparsity_pattern", default=[0.95] * (10 if layers > 10 else 0) + [0.0] * layers)
    listed = isinstance(c.get("intermediate_size"), list)
    widths = c.listed("intermediate_size", layers) if listed else [c.count("intermediate_size")] * layers
    found: dict[tuple[int, bool], list[int]] = {}
    for at, width in enumerate(widths):
        share = sparsity[at] if isinstance(sparsity, list) else sparsity
        found.setdefault((Config({"intermediate_size": width}).count("intermediate_size"), bool(share)), []).append(at)
    return found


def _streams(t: Table, c: Config, layer: str, hidden: int) -> None:
    """AltUp: what the streams are made of, predicts and corrects them in every layer, and joins them at the end."""
    streams, at = c.count("altup_num_inputs"), f"{layer}.altup"
    t.whole(f"{at}.prediction_coefs.weight", streams**2, streams, why=STREAMS)
    t.whole(f"{at}.correction_coefs.weight", streams, streams, why=STREAMS)
    t.whole(f"{at}.modality_router.weight", streams, hidden, why=STREAMS)
    t.norm(f"{at}.router_norm", hidden)
    t.whole(f"{at}.correct_output_scale", hidden, why=STREAMS, optional=not c.flag("altup_correct_scale", default=True))
    for stream in range(streams - 1):
        t.whole(f"@altup_projections.{stream}.weight", hidden, hidden, why=STREAMS)
        t.whole(f"@altup_unembed_projections.{stream}.weight", hidden, hidden, why=STREAMS)
