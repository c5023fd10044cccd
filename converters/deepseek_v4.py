"""DeepSeek-V4: many query heads over one shared key, an output matrix of groups, compressors, several residual streams.

The groups of the output matrix are what is dealt to ranks: a group's heads, its rows of ``wo_a`` (which sees that
group alone) and its columns of ``wo_b``. The one key head, what compresses it and what chooses among the compressed
are whole. The first layers choose experts by the token's id.
Source: transformers ``models/deepseek_v4/modeling_deepseek_v4.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import MIXTRAL, expert_channels, experts, gated_mlp, norms, vocabulary_of
from tpshard.blocks.experts import shared_channels
from tpshard.config import Config
from tpshard.errors import UnsupportedError
from tpshard.table import Table

FAMILY = "deepseek_v4"
MODEL_TYPES = ("deepseek_v4",)
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {0: "sliding_attention", 4: SPARSE, 128: HEAVY}
SHARED_KEY = "one key head serves all ranks"
STREAMS = "every rank has all residual streams"


def table(c: Config) -> Table:
    hidden, vocab, count = c.count("hidden_size"), vocabulary_of(c), c.count("n_routed_experts", "num_local_experts")
    layers, streams = c.count("num_hidden_layers"), c.count("hc_mult", default=4)
    width = c.count("moe_intermediate_size", "intermediate_size")

    t = Table(layers, count, prefixes=("model.", ""))
    t.linear("head", vocab, hidden, role="head")
    t.norm("@norm", hidden)
    for block, embed, last in (("as saved", "@embed_tokens", "@hc_head.hc"), ("as published", "embed", "hc_head")):
        with t.block(block):
            t.embedding(embed, vocab, hidden)
            _streams(t, last, streams, streams, 1, hidden)
    t.one_of("as saved", "as published")
    layer = "@layers.{layer}"
    _attention(t, c, f"{layer}.attn", hidden)
    norms(t, layer, ("attn_norm", "ffn_norm"), hidden)
    for part in ("attn", "ffn"):
        _streams(t, f"{layer}.hc_{part}", streams, streams * (streams + 2), 3, hidden)
    mlp = f"{layer}.ffn"
    t.linear(f"{mlp}.gate", count, hidden, role="router")
    hashed = _hashed(c, layers)
    with t.only(hashed):
        t.whole(f"{mlp}.gate.tid2eid", c.count("vocab_size"), c.count("num_experts_per_tok"), why="experts by token id")
    with t.only(set(range(layers)) - set(hashed)):
        t.tensor(f"{mlp}.gate.bias", count, role="router_bias")
    shared = shared_channels(c.number("n_shared_experts", default=1) * width)
    if shared:
        gated_mlp(t, f"{mlp}.shared_experts", shared, hidden, names=MIXTRAL, part="shared_")
    experts(t, f"{mlp}.experts", count, expert_channels(c, "moe_intermediate_size", "intermediate_size"), hidden,
            names=MIXTRAL)  # fmt: skip
    t.one_of("experts")
    return t


def _attention(t: Table, c: Config, at: str, hidden: int) -> None:
    heads, size, latent = c.count("num_attention_heads"), c.count("head_dim", default=512), c.count("q_lora_rank")
    groups = c.count("o_groups", default=8)
    if heads % groups:
        raise UnsupportedError(
            f"{heads} attention heads are no multiple of the {groups} output groups; correct config.json"
        )
    group = Units("groups", groups, noun=f"output groups of {heads // groups} heads")
    out = group.each(c.count("o_lora_rank", default=1024))
    t.linear(f"{at}.wq_a", latent, hidden, role="q_a")
    t.norm(f"{at}.q_norm", latent)
    t.linear(f"{at}.wq_b", group.each(heads // groups * size), latent, role="q_b")
    t.linear(f"{at}.wkv", size, hidden, role="kv_a")
    t.norm(f"{at}.norm", size)
    t.tensor(f"{at}.attn_sink", group.each(heads // groups), role="sinks")
    t.linear(f"{at}.wo_a", out, heads // groups * size, role="o_group")
    t.linear(f"{at}.wo_b", hidden, out, role="o")
    kinds = _kinds(c)
    rates = Config(c.get("compress_rates", default={SPARSE: 4, HEAVY: 128}))
    for kind, ways in ((SPARSE, 2), (HEAVY, 1)):
        with t.only(number for number, held in enumerate(kinds) if held == kind):
            _compressor(t, f"{at}.compressor", rates.count(kind), ways, size, hidden)
    with t.only(number for number, held in enumerate(kinds) if held == SPARSE):
        count, size = c.count("index_n_heads", default=64), c.count("index_head_dim", default=128)
        why = "every rank chooses the same tokens"
        _compressor(t, f"{at}.indexer.compressor", rates.count(SPARSE), 2, size, hidden)
        t.whole(f"{at}.indexer.weights_proj.weight", count, hidden, why=why)
        t.whole(f"{at}.indexer.wq_b.weight", count * size, latent, why=why)


def _compressor(t: Table, at: str, rate: int, ways: int, size: int, hidden: int) -> None:
    """What makes one key of ``rate``; with two ways, of twice as many that overlap."""
    t.whole(f"{at}.wkv.weight", ways * size, hidden, why=SHARED_KEY)
    t.whole(f"{at}.wgate.weight", ways * size, hidden, why=SHARED_KEY)
    t.whole(f"{at}.ape", rate, ways * size, why=SHARED_KEY)
    t.norm(f"{at}.norm", size)


def _streams(t: Table, name: str, streams: int, out: int, scales: int, hidden: int) -> None:
    t.whole(f"{name}_fn", out, streams * hidden, why=STREAMS)
    t.whole(f"{name}_base", out, why=STREAMS)
    t.whole(f"{name}_scale", scales, why=STREAMS)


def _kinds(c: Config) -> list[str]:
    """What attention every layer has: ``layer_types``, or the ratios of the published configs, or two heavy first."""
    count = c.count("num_hidden_layers")
    if c.get("layer_types") is not None:
        return c.listed("layer_types", count)
    if c.get("compress_ratios") is not None:
        return [RATIOS.get(ratio, "unknown") for ratio in c.listed("compress_ratios", count)]
    return [SPARSE if at >= 2 and at % 2 else HEAVY for at in range(count)]


def _hashed(c: Config, layers: int) -> list[int]:
    if c.get("mlp_layer_types") is None:
        return list(range(min(layers, c.number("num_hash_layers", default=3))))
    return [at for at, kind in enumerate(c.listed("mlp_layer_types", layers)) if kind == "hash_moe"]
