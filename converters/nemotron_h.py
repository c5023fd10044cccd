"""Nemotron-H: every layer is one block, Mamba-2, attention, an MLP without a gate, or experts without gates.

The blocks are listed in ``layers_block_type`` or, letter by letter, in ``hybrid_override_pattern``. Experts of
Nemotron 3 Super work in a latent (``moe_latent_size``). Prediction layers lie apart, under ``mtp.``.
Source: transformers ``models/nemotron_h/modeling_nemotron_h.py``; prediction layers: vLLM
``model_executor/models/nemotron_h_mtp.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpshard.axes import Units
from tpshard.blocks.dense import attention, channels_of, expert_channels, heads_of, mlp, vocabulary_of
from tpshard.blocks.mixers import ATTENTION, RECURRENT, layers_of, mamba2, state_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "nemotron_h"
MODEL_TYPES = ("nemotron_h",)
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def table(c: Config) -> Table:
    hidden, vocab = c.count("hidden_size"), vocabulary_of(c)
    types = _types(c, "layers_block_type", "layer_types", pattern="hybrid_override_pattern")
    count = c.number("n_routed_experts", "num_local_experts", default=8) if "moe" in types else 0

    t = Table(len(types), experts=count, prefixes=("backbone.", "model.", ""))
    t.embedding("@embeddings", vocab, hidden)
    _layers(t, c, "@layers.{layer}", types, hidden, count)
    t.norm("@norm_f", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embeddings.weight" if tied else None)
    if c.number("num_nextn_predict_layers"):
        types = _types(c, "mtp_layers_block_type", pattern="mtp_hybrid_override_pattern") or ["attention", "moe"]
        with t.stack(len(types), experts=count, prefixes=("mtp.",), optional=True):
            _layers(t, c, "@layers.{layer}", types, hidden, count)
            with t.only([0]):
                for name in ("enorm", "hnorm"):
                    t.norm(f"@layers.{{layer}}.{name}", hidden)
                t.linear("@layers.{layer}.eh_proj", hidden, 2 * hidden, role="prediction_projection")
            with t.only([len(types) - 1]):
                t.norm("@layers.{layer}.final_layernorm", hidden)
    return t


def _types(c: Config, *names: str, pattern: str) -> list[str]:
    listed = c.get(*names)
    if listed is not None:
        return list(listed)
    return [LETTERS.get(letter, letter) for letter in c.get(pattern, default="")]


def _layers(t: Table, c: Config, layer: str, types: Sequence[str], hidden: int, count: int) -> None:
    heads = heads_of(c, default_kv=8)
    size, bias = c.head_dim(heads.query_heads, default=128), c.flag("mlp_bias", default=False)
    state = state_heads(c.count("mamba_num_heads", default=128), c.count("n_groups", "mamba_n_groups", default=8))
    at = f"{layer}.mixer"
    t.norm(f"{layer}.norm", hidden)
    with t.only(layers_of(types, *RECURRENT)):
        mamba2(
            t, at, state, hidden, size=c.count("mamba_head_dim", default=64),
            state=c.count("ssm_state_size", default=128), kernel=c.count("conv_kernel", "mamba_d_conv", default=4),
            bias=c.flag("use_bias", default=False),
            conv_bias=c.flag("use_conv_bias", "mamba_conv_bias", default=True),
        )  # fmt: skip
    with t.only(layers_of(types, *ATTENTION)):
        attention(t, at, heads.query(size), heads.kv(size), hidden)
    with t.only(layers_of(types, "mlp")):
        mlp(t, at, channels_of(c), hidden, bias=bias, names=("up_proj", "down_proj"))
    sparse = layers_of(types, "moe")
    if not sparse:
        return
    ffn, latent = expert_channels(c, "moe_intermediate_size"), c.get("moe_latent_size")
    width = c.count("moe_shared_expert_intermediate_size", default=7688)
    shared = Units("shared_ffn", width, noun="channels of the shared expert").each()
    into = hidden if latent is None else c.count("moe_latent_size")
    with t.only(sparse):
        t.linear(f"{at}.gate", count, hidden, role="router")
        t.tensor(f"{at}.gate.e_score_correction_bias", count, role="router_bias")
        t.linear(f"{at}.shared_experts.up_proj", shared, hidden, role="shared_up", bias=bias)
        t.linear(f"{at}.shared_experts.down_proj", hidden, shared, role="shared_down", bias=bias)
        if latent is not None:
            t.whole(f"{at}.fc1_latent_proj.weight", into, hidden, why="all experts read the latent")
            t.whole(f"{at}.fc2_latent_proj.weight", hidden, into, why="it takes the sum over ranks")
        with t.block("experts"):
            t.linear(f"{at}.experts.{{expert}}.up_proj", ffn, into, role="expert_up")
            t.linear(f"{at}.experts.{{expert}}.down_proj", into, ffn, role="expert_down")
        with t.block("stacked experts"):
            t.tensor(f"{at}.experts.up_proj", count, ffn, into, role="expert_up")
            t.tensor(f"{at}.experts.down_proj", count, into, ffn, role="expert_down")
        t.one_of("experts", "stacked experts")
