"""DeepSeek-V2, V3 and V3.2, and those with the same blocks: latent attention, dense layers first, then experts.

The down-projections to the latents (``q_a``, ``kv_a``) and their norms are whole; what leads from a latent
to the heads is cut by head. V3's hub files hold prediction layers past the last one, whose embedding and
head repeat the model's own. The indexer of V3.2 is whole; GLM-5 has one in some layers, which the next ones use.
Source: transformers ``models/deepseek_v{2,3,32}/modeling_deepseek_v*.py`` and the modules of the other model types.
"""

from __future__ import annotations

from collections.abc import Iterable

from tpshard.blocks.dense import (
    channels_of,
    decoder,
    expert_channels,
    gated_mlp,
    latent_attention,
    norms,
    token_indexer,
    vocabulary_of,
)  # fmt: skip
from tpshard.blocks.experts import CORRECTION, layers_where, mixed_layers, mixture, prediction, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "deepseek"
MODEL_TYPES = (
    "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "mistral4",
    "sarvam_mla", "youtu",
)  # fmt: skip
DENSE = ("minicpm3", "youtu")  # without experts, and tied where the config does not say
INDEXED = ("deepseek_v32", "glm_moe_dsa")
WITHOUT_CORRECTION = ("deepseek_v2", "mistral4")
FIRST_DENSE = {"deepseek_v2": 0, "mistral4": 0, "deepseek_v3": 3, "deepseek_v32": 3, "glm_moe_dsa": 3}  # else 1


def table(c: Config) -> Table:
    kind, dense = c.model_type, c.model_type in DENSE
    if kind == "minicpm3":
        c = c.with_usual(v_head_dim=c.count("hidden_size") // c.count("num_attention_heads"))
    hidden, extra = c.count("hidden_size"), c.number("num_nextn_predict_layers", "num_mtp_layers")
    experts = 0 if dense else c.number("n_routed_experts", "num_experts", "num_local_experts")
    if experts:
        layers = mixed_layers(c, first_dense=FIRST_DENSE.get(kind, 1), predicted=extra)
    else:
        layers = layers_where(c, [False] * c.count("num_hidden_layers"))

    t = decoder(c, experts=experts, extra_layers=extra, tied=dense)
    layer = "@layers.{layer}"
    # Youtu's layers are small beside the way to its latent: a twelfth of each would be whole on every rank.
    latent_attention(c, t, f"{layer}.self_attn", bias=c.flag("attention_bias", default=False), gathered=kind == "youtu")
    if kind in INDEXED:
        with t.only(_choosing(c, extra)):
            token_indexer(c, t, f"{layer}.self_attn.indexer")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    bias = c.flag("mlp_bias", default=False)
    if layers.dense:
        with t.only(layers.dense):
            gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=bias)
    if layers.sparse:
        width = c.count("moe_intermediate_size")
        with t.only(layers.sparse):
            mixture(
                t, f"{layer}.mlp", experts, expert_channels(c, "moe_intermediate_size"), hidden, bias=bias,
                correction=None if kind in WITHOUT_CORRECTION else CORRECTION,
                shared=shared_channels(c.number("n_shared_experts", "num_shared_experts") * width),
            )  # fmt: skip
            if kind == "axk1":
                t.norm(f"{layer}.post_mlp_layernorm", hidden)
        prediction(t, layer, vocabulary_of(c), hidden)
    return t


def _choosing(c: Config, extra: int) -> Iterable[int]:
    """The layers that choose tokens themselves: all, or by ``indexer_types``, a pattern, or one in so many."""
    count = c.count("num_hidden_layers")
    kinds = c.get("indexer_types", "index_topk_pattern")
    if kinds is None:
        every, offset = max(c.number("index_topk_freq", default=1), 1), c.number("index_skip_topk_offset", default=2)
        kinds = ["full" if max(at - offset + 1, 0) % every == 0 else "shared" for at in range(count)]
    return [at for at, kind in enumerate(kinds) if kind in ("full", "F")] + [*range(count, count + extra)]
