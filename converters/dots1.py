"""dots1, GLM-4.5, Solar Open, Mellum, K-EXAONE: grouped queries, then one MLP or shared and routed experts.

They differ in which norms and biases the config asks for, and in where the router keeps its correction.
GLM-4.5's hub files hold a layer past the last that predicts a further token, Mellum's and K-EXAONE's a module ``mtp``.
Source: transformers ``models/{dots1,glm4_moe,solar_open,mellum,exaone_moe}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import (
    attention,
    channels_of,
    decoder,
    expert_channels,
    gated_mlp,
    heads_of,
    norms,
    vocabulary_of,
)  # fmt: skip
from tpshard.blocks.experts import CORRECTION, DRAFTS, mixed_layers, mixture, prediction, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "dots1"
USUAL = {
    "glm4v_moe_text": {"vocab_size": 151424, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
                       "num_attention_heads": 96, "num_key_value_heads": 8, "moe_intermediate_size": 1408,
                       "n_routed_experts": 128, "attention_bias": True},
}  # fmt: skip
MODEL_TYPES = ("dots1", "exaone_moe", "glm4_moe", "mellum", "solar_open", *USUAL)
EXAONE_CORRECTION = "e_score_correction_bias"
DEFAULTS = {  # of what released configs leave out: correction, dense layers first, head size
    "dots1": (CORRECTION, 0, None),
    "exaone_moe": (EXAONE_CORRECTION, 1, None),
    "glm4_moe": (CORRECTION, 1, None),
    "glm4v_moe_text": (CORRECTION, 1, None),
    "mellum": (None, 0, 128),
    "solar_open": (CORRECTION, 0, 128),
}


def table(c: Config) -> Table:
    correction, first_dense, head_dim = DEFAULTS[c.model_type]
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads, default=head_dim)
    bias = c.flag("attention_bias", default=False)
    extra = c.number("num_nextn_predict_layers") if c.model_type == "glm4_moe" else 0
    count, width = c.count("n_routed_experts", "num_experts", "num_local_experts"), c.count("moe_intermediate_size")
    layers = mixed_layers(c, first_dense=first_dense, predicted=extra)

    t = decoder(c, experts=count, extra_layers=extra)
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        bias=bias, out_bias=bias and c.model_type in ("dots1", "mellum"),
    )  # fmt: skip
    if c.flag("use_qk_norm", default=c.model_type in ("dots1", "exaone_moe", "mellum")):
        norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    if layers.dense:
        with t.only(layers.dense):
            gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, "moe_intermediate_size"), hidden, correction=correction,
            shared=shared_channels(c.number("n_shared_experts", "num_shared_experts", default=_shared(c)) * width),
        )  # fmt: skip
    if c.model_type in ("exaone_moe", "mellum"):
        t.whole_module("mtp", why=DRAFTS, optional=True)
    if extra:
        prediction(t, layer, vocabulary_of(c), hidden)
    return t


def _shared(c: Config) -> int:
    """Shared experts where the config does not say."""
    return int(c.model_type in ("exaone_moe", "glm4_moe", "glm4v_moe_text", "solar_open"))
