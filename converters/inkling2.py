"""Inkling 2: attention with learnt relative positions, convolutions over keys and values, experts in every layer.

Full attention's convolutions depend on the token. Every block takes a mixture of what the blocks before it gave. The
Loop variant runs its middle layers several times. ``w13`` holds gate and up in turns.
Source: transformers ``models/inkling2{,_loop}/modeling_inkling2*.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import norms, vocabulary_of
from tpshard.blocks.mixers import layers_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "inkling2"
_TEXT = {"vocab_size": 201_024, "hidden_size": 4608, "num_hidden_layers": 48, "num_attention_heads": 48,
         "num_key_value_heads": 8, "head_dim": 128, "swa_num_attention_heads": 48, "swa_num_key_value_heads": 8,
         "swa_head_dim": 128, "sliding_window_size": 1024, "d_rel": 16, "rel_extent": 1024, "conv_kernel_size": 4,
         "moe_intermediate_size": 2304, "n_routed_experts": 384, "n_layers_per_attn_res_block": 6}  # fmt: skip
_LOOP = {"hidden_size": 2304, "num_hidden_layers": 24, "num_attention_heads": 24, "swa_num_attention_heads": 24,
         "moe_intermediate_size": 1152, "n_routed_experts": 128, "loop_layer_index_start": 6,
         "loop_layer_index_end": 18, "loop_gate_rank": 64}  # fmt: skip
USUAL = {"inkling2_text": _TEXT, "inkling2_loop_text": {**_TEXT, **_LOOP}}
MODEL_TYPES = tuple(USUAL)
MIXTURE = "weighs what whole blocks gave"
CONTROL = "a gate of a few channels is not worth a sum over ranks"


def table(c: Config) -> Table:
    c = c.with_usual(**USUAL[c.model_type])
    hidden, vocab, layers = c.count("hidden_size"), vocabulary_of(c), c.count("num_hidden_layers")
    kinds = c.get("layer_types") and c.listed("layer_types", layers)
    kinds = kinds or ["hybrid_sliding" if (at + 1) % 6 else "hybrid" for at in range(layers)]
    kernel, full = c.count("conv_kernel_size"), layers_of(kinds, "hybrid")

    t = Table(layers, prefixes=("model.llm.",))
    t.embedding("@embed", vocab, hidden)
    t.linear("@unembed", vocab, hidden, role="head")
    t.norm("@embed_norm", hidden)
    t.norm("@norm", hidden)
    layer = "@layers.{layer}"
    with t.only(full):
        heads, size = _heads(c, ""), c.count("head_dim")
        _attention(t, c, f"{layer}.attn", heads, size, c.count("rel_extent"))
        for name in "kv":
            t.tensor(f"{layer}.attn.{name}_sconv.static_w", kernel, heads.kv(size), role="attn_head")
            t.tensor(f"{layer}.attn.{name}_sconv.weight_proj", heads.kv(kernel), hidden, role="attn_head")
        norms(t, layer, ("q_input_norm", "k_input_norm", "v_input_norm"), hidden)
    with t.only(set(range(layers)) - full):
        heads, size = _heads(c, "swa_"), c.count("swa_head_dim")
        _attention(t, c, f"{layer}.attn", heads, size, c.count("sliding_window_size"))
        for name in "kv":
            t.tensor(f"{layer}.attn.{name}_sconv.weight", heads.kv(size), 1, kernel, role="attn_head")
        t.norm(f"{layer}.attn_norm", hidden)
    t.norm(f"{layer}.mlp_norm", hidden)
    for name in ("attn_sconv", "mlp_sconv"):
        t.whole(f"{layer}.{name}.weight", hidden, 1, kernel, why="runs along the residual stream")
    _experts(t, c, f"{layer}.mlp", hidden)
    _mixtures(t, full, layers, hidden)
    if c.model_type == "inkling2_loop_text":
        _loop(t, c, layer, hidden)
    return t


def _heads(c: Config, of: str) -> Heads:
    query, kv = c.count(f"{of}num_attention_heads"), c.count(f"{of}num_key_value_heads")
    return Heads("sliding_heads" if of else "heads", query, kv)


def _attention(t: Table, c: Config, at: str, heads: Heads, size: int, extent: int) -> None:
    hidden, relative = c.count("hidden_size"), c.count("d_rel")
    t.linear(f"{at}.wq_du", heads.query(size), hidden, role="q")
    t.linear(f"{at}.wk_dv", heads.kv(size), hidden, role="k")
    t.linear(f"{at}.wv_dv", heads.kv(size), hidden, role="v")
    t.linear(f"{at}.wr_du", heads.query(relative), hidden, role="attn_head")
    t.linear(f"{at}.wo_ud", hidden, heads.query(size), role="o")
    t.linear(f"{at}.gate_attn", heads.query(size), hidden, role="attn_gate")
    t.linear(f"{at}.attn_sink_proj", heads.query(1), hidden, role="attn_head")
    t.tensor(f"{at}.q_l2_clip.scale", heads.query(1), size, role="attn_head")
    t.tensor(f"{at}.rel_l2_clip.scale", heads.query(1), relative, role="attn_head")
    t.tensor(f"{at}.rel_logits_proj.proj", relative, extent, role="inside")  # one table for all heads


def _experts(t: Table, c: Config, at: str, hidden: int) -> None:
    count = c.count("n_routed_experts", "num_local_experts")
    own = Units("expert_ffn", c.count("moe_intermediate_size", "intermediate_size"), noun="channels of every expert")
    t.linear(f"{at}.gate", count, hidden, role="router", bias=True)
    t.tensor(f"{at}.experts.w13_weight", count, own.each(2), hidden, role="expert_gate_up")
    t.tensor(f"{at}.experts.w2_weight", count, hidden, own.each(), role="expert_down")


def _mixtures(t: Table, full: frozenset[int], layers: int, hidden: int) -> None:
    """Every layer but the first weighs what came before, for queries, keys and values apart in full attention."""
    following = {at: at + 1 in full for at in range(layers - 1)}
    with t.only(at for at, is_full in following.items() if is_full):
        t.whole("@attn_res.attn_queries.{layer}", 3, hidden, why=MIXTURE)
    with t.only(at for at, is_full in following.items() if not is_full):
        t.whole("@attn_res.attn_queries.{layer}", hidden, why=MIXTURE)
    t.whole("@attn_res.mlp_queries.{layer}", hidden, why=MIXTURE)
    t.whole("@attn_res.output_query", hidden, why=MIXTURE)


def _loop(t: Table, c: Config, layer: str, hidden: int) -> None:
    """What layers in the loop take over from the pass before."""
    loop = Config(c.get("loop_config", default={}))
    first = loop.count("core_start", default=c.count("loop_layer_index_start"))
    last = loop.count("core_end", default=c.count("loop_layer_index_end"))
    rank = loop.count("gate_rank", default=c.count("loop_gate_rank"))
    with t.only(range(first, last)):
        for part in ("attn", "k", "v", "mlp"):
            t.whole(f"{layer}.controllers.{part}.down_weight", rank, 2 * hidden, why=CONTROL)
            t.whole(f"{layer}.controllers.{part}.forget_weight", hidden, rank, why=CONTROL)
            t.whole(f"{layer}.controllers.{part}.gain_weight", hidden, rank, why=CONTROL)
    for name in ("queries", "kv_queries"):
        t.whole(f"@middle_cycle_cross_pass_{name}", 2 * (last - first), hidden, why=MIXTURE)
