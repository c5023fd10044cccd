"""DeepSeek-V2 and V3: latent attention, dense layers first, then routed and shared experts.

The down-projections to the latents (``q_a``, ``kv_a``) and their norms are whole; what leads from a latent
to the heads is cut by head. V3's hub files hold prediction layers past the last one, whose embedding and
head repeat the model's own.
Source: transformers ``models/deepseek_v{2,3}/modeling_deepseek_v*.py``; prediction layers: the weights'
documentation in deepseek-ai/DeepSeek-V3, ``README_WEIGHTS.md``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.partition import Padded, Units
from tpshard.table import Table

FAMILY = "deepseek"
MODEL_TYPES = ("deepseek_v2", "deepseek_v3")


def table(c: Config) -> Table:
    hidden = c.count("hidden_size")
    heads = Units("heads", c.count("num_attention_heads"), noun="attention heads")
    nope, rope, value = c.count("qk_nope_head_dim"), c.count("qk_rope_head_dim"), c.count("v_head_dim")
    latent, bias = c.count("kv_lora_rank"), c.flag("attention_bias", default=False)
    vocab = Padded("vocab", c.count("vocab_size")).each()
    extra = c.number("num_nextn_predict_layers")
    experts = c.number("n_routed_experts")

    t = Table(layers=c.count("num_hidden_layers"), experts=experts, extra_layers=extra, prefixes=("model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    q_latent = c.get("q_lora_rank")
    if q_latent is None:
        t.linear(f"{layer}.self_attn.q_proj", heads.each(nope + rope), hidden, role="q")
    else:
        q_latent = c.count("q_lora_rank")
        t.linear(f"{layer}.self_attn.q_a_proj", q_latent, hidden, role="q_a", bias=bias)
        t.norm(f"{layer}.self_attn.q_a_layernorm", q_latent)
        t.linear(f"{layer}.self_attn.q_b_proj", heads.each(nope + rope), q_latent, role="q_b")
    t.linear(f"{layer}.self_attn.kv_a_proj_with_mqa", latent + rope, hidden, role="kv_a", bias=bias)
    t.norm(f"{layer}.self_attn.kv_a_layernorm", latent)
    t.linear(f"{layer}.self_attn.kv_b_proj", heads.each(nope + value), latent, role="kv_b")
    t.linear(f"{layer}.self_attn.o_proj", hidden, heads.each(value), role="o", bias=bias)
    t.norm(f"{layer}.input_layernorm", hidden)
    t.norm(f"{layer}.post_attention_layernorm", hidden)
    _feed_forward(t, c, layer, hidden, experts)
    with t.block("prediction"):
        t.norm(f"{layer}.enorm", hidden)
        t.norm(f"{layer}.hnorm", hidden)
        t.linear(f"{layer}.eh_proj", hidden, 2 * hidden, role="prediction_projection")
        t.norm(f"{layer}.shared_head.norm", hidden)
        t.linear(f"{layer}.shared_head.head", vocab, hidden, role="prediction_head", optional=True)
        t.linear(f"{layer}.embed_tokens", vocab, hidden, role="prediction_embed", optional=True)
    t.norm("@norm", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    return t


def _feed_forward(t: Table, c: Config, layer: str, hidden: int, experts: int) -> None:
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    bias = c.flag("mlp_bias", default=False)
    with t.block("dense"):
        t.linear(f"{layer}.mlp.gate_proj", ffn, hidden, role="gate", bias=bias)
        t.linear(f"{layer}.mlp.up_proj", ffn, hidden, role="up", bias=bias)
        t.linear(f"{layer}.mlp.down_proj", hidden, ffn, role="down", bias=bias)
    if not experts:
        t.one_of("dense")
        return
    width, shared_experts = c.count("moe_intermediate_size"), c.number("n_shared_experts")
    own = Units("expert_ffn", width, noun="channels of every expert").each()
    with t.block("router"):
        t.linear(f"{layer}.mlp.gate", experts, hidden, role="router")
        corrected = c.model_type == "deepseek_v3"
        t.tensor(f"{layer}.mlp.gate.e_score_correction_bias", experts, role="router_bias", optional=not corrected)
        if shared_experts:
            shared = Units("shared_ffn", shared_experts * width, noun="channels of the shared experts").each()
            t.linear(f"{layer}.mlp.shared_experts.gate_proj", shared, hidden, role="shared_gate", bias=bias)
            t.linear(f"{layer}.mlp.shared_experts.up_proj", shared, hidden, role="shared_up", bias=bias)
            t.linear(f"{layer}.mlp.shared_experts.down_proj", hidden, shared, role="shared_down", bias=bias)
    with t.block("experts"):
        expert = f"{layer}.mlp.experts.{{expert}}"
        t.linear(f"{expert}.gate_proj", own, hidden, role="expert_gate")
        t.linear(f"{expert}.up_proj", own, hidden, role="expert_up")
        t.linear(f"{expert}.down_proj", hidden, own, role="expert_down")
    with t.block("stacked experts"):
        t.tensor(f"{layer}.mlp.experts.gate_up_proj", experts, own * 2, hidden, role="expert_gate_up")
        t.tensor(f"{layer}.mlp.experts.down_proj", experts, hidden, own, role="expert_down")
    t.one_of("dense", "router")
    t.one_of("dense", "experts", "stacked experts")
