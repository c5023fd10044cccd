"""Qwen4-Exp (text): delta nets and indexed attention between several residual streams, and hashed n-gram tables.

What mixes the streams, and the indexer that chooses tokens, stay whole. An n-gram table (95 GiB in the released
model) lies in many parts; each is cut by rows, and looked up like a vocabulary. How many rows it has follows from
primes that the model takes as the sizes of its hash tables.
Source: transformers ``models/qwen4_exp/modeling_qwen4_exp.py``; names on disk: ``conversion_mapping.py``.
"""

from __future__ import annotations

from itertools import count, islice
from math import isqrt

from tpshard.axes import Units
from tpshard.blocks.dense import decoder, expert_channels, experts, gated_mlp
from tpshard.blocks.mixers import (
    ATTENTION,
    RECURRENT,
    delta_heads,
    delta_net,
    every_nth,
    layers_of,
    query_gated_attention,
)
from tpshard.config import Config
from tpshard.errors import UnsupportedError
from tpshard.table import Table

FAMILY = "qwen4_exp"
MODEL_TYPES = ("qwen4_exp_text",)
INDEXED = (*ATTENTION, "indexed_attention", "qwen_sparse_attention")
STREAMS = "every rank has all residual streams"
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
         "linear_num_value_heads": 32}  # fmt: skip
USUAL = {
    "qwen4_exp_text": {"vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
                       "num_key_value_heads": 2, "moe_intermediate_size": 512},
}  # fmt: skip


def table(c: Config) -> Table:
    c = c.with_usual(**DELTA)
    hidden, d = c.count("hidden_size"), delta_heads(c)
    number = c.count("num_experts", "num_local_experts", default=512)

    t = decoder(c, experts=number, prefixes=("model.", "model.language_model.", ""), norm=None)
    layer = "@layers.{layer}"
    usual = every_nth(t.layers, c.count("full_attention_interval", default=4), "full_attention", "linear_attention")
    types = c.with_usual(layer_types=usual).listed("layer_types", t.layers)
    with t.only(layers_of(types, *RECURRENT)):
        delta_net(
            t, f"{layer}.linear_attn", d, hidden, convolutions={"conv1d": d.qkv},
            ins={"in_proj_qkv": d.qkv, "in_proj_z": d.value, "in_proj_b": d.one, "in_proj_a": d.one},
            kernel=c.count("linear_conv_kernel_dim", default=4),
        )  # fmt: skip
    with t.only(layers_of(types, *INDEXED)):
        query_gated_attention(c, t, f"{layer}.self_attn")
        if c.get("indexer_n_heads") is not None:
            _indexer(t, c, f"{layer}.self_attn.indexer", hidden)
    at = f"{layer}.mlp"
    t.linear(f"{at}.gate", number, hidden, role="router")
    width = c.count("shared_expert_intermediate_size", default=512)
    shared = Units("shared_ffn", width, noun="channels of the shared expert").each()
    gated_mlp(t, f"{at}.shared_expert", shared, hidden, part="shared_")
    t.linear(f"{at}.shared_expert_gate", 1, hidden, role="shared_router")
    experts(t, f"{at}.experts", number, expert_channels(c, "moe_intermediate_size"), hidden)
    t.one_of("experts", "stacked experts")
    _streams(t, c, f"{layer}.attn_hyper_connection", hidden, injects=True)
    _streams(t, c, f"{layer}.mlp_hyper_connection", hidden, injects=True)
    _streams(t, c, "@hyper_connection_mixer", hidden, injects=False)
    for index, layer_id in enumerate(sorted(set(c.get("ple_layer_ids", default=())))):
        with t.only([layer_id - 1]):
            _ngrams(t, c, f"{layer}.ple", hidden, index)
    return t


def _streams(t: Table, c: Config, at: str, hidden: int, *, injects: bool) -> None:
    """What reads one input out of all residual streams, and says how the output goes back into them."""
    streams, rank = c.count("hc_count", default=4), c.count("hc_lowrank", default=320)
    t.norm(f"{at}.hc_norm", streams * hidden)
    t.whole(f"{at}.input_mix_weight_down.weight", rank, streams * hidden, why=STREAMS)
    t.whole(f"{at}.input_mix_weight_up.weight", streams * hidden, rank, why=STREAMS)
    if injects:
        t.whole(f"{at}.block_inject_weight.weight", streams, streams * hidden, why=STREAMS)


def _indexer(t: Table, c: Config, at: str, hidden: int) -> None:
    size = c.count("indexer_head_dim")
    heads = c.count("indexer_n_heads") + c.count("indexer_kv_heads")
    t.whole(f"{at}.index_qk_proj.weight", heads * size, hidden, why="all ranks choose the same tokens")
    for name in ("q_layernorm", "k_layernorm"):
        t.norm(f"{at}.{name}", size)


def _ngrams(t: Table, c: Config, at: str, hidden: int, index: int) -> None:
    """The hashed n-grams of one layer, and what adds them to the residual streams."""
    streams, width = c.count("hc_count", default=4) * hidden, c.count("ple_embed_dim", default=hidden)
    longest = c.count("ngram_size", default=3)
    heads = (longest - 1) * c.count("heads_per_ngram", default=8)
    parts = c.count("split_ngram_parts", default=512)
    rows = Units(f"ngrams.{index}", _table_rows(c, heads, index) // parts, noun="rows of a part of the n-gram table")
    table = f"{at}.ple_embedding"
    for part in range(parts):
        t.embedding(f"{table}.ngram_embedding.shard_{part}", rows.each(), width // heads)
    t.tensor(f"{table}.layer_multipliers", longest, role="buffer")
    for name in ("ngram_heads_vocab_sizes", "ngram_heads_offsets"):
        t.tensor(f"{table}.{name}", heads, role="buffer")
    t.whole(f"{at}.key_proj.weight", streams, width, why=STREAMS)
    t.whole(f"{at}.value_proj.weight", hidden, width, why=STREAMS)
    t.whole(f"{at}.conv1d.weight", streams, 1, c.count("ple_conv_kernel_size", default=4), why=STREAMS)
    for name in ("norm_key", "norm_query", "norm_conv"):
        t.norm(f"{at}.{name}", streams)


def _table_rows(c: Config, heads: int, index: int) -> int:
    """The rows of a table: a prime for every head, each used once in the model, together rounded up.

    Raises:
        UnsupportedError: numbers so large that looking for the primes would take long.
    """
    base = c.count("ngram_vocab_size_base", default=20_000_000)
    multiple = c.count("make_ngram_vocab_size_divisible_by", default=128)
    if base > 2**31 or heads * (index + 1) > 2**12:
        raise UnsupportedError(
            f"config.json: n-gram tables of {base} rows for {heads} heads in {index + 1} layers are more than is "
            "supported; correct the counts"
        )
    primes = (n for n in count(base) if n > 1 and all(n % divisor for divisor in range(2, isqrt(n) + 1)))
    rows = sum(islice(primes, heads * index, heads * (index + 1)))
    return -(-rows // multiple) * multiple
