"""Gemma 1, 2 and 3: Llama's projections with up to four norms a layer; Gemma 3 with images as well.

Gemma 3's vision tower (SigLIP) and projector stay whole on every rank. Numbers that a nested
``text_config`` leaves out are those of transformers' ``Gemma3TextConfig``, as the published 4B has it.
Source: transformers ``models/gemma{,2,3}/modeling_gemma*.py``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.partition import Heads, Padded, Units
from tpshard.table import Table

FAMILY = "gemma"
MODEL_TYPES = ("gemma", "gemma2", "gemma3_text", "gemma3")
_GEMMA2 = {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
           "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
USUAL = {
    "gemma": {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
              "num_attention_heads": 16, "num_key_value_heads": 16},
    "gemma2": _GEMMA2,
    "gemma3_text": {**_GEMMA2, "vocab_size": 262208},
}  # fmt: skip


def table(c: Config) -> Table:
    composite = c.model_type == "gemma3"
    tied = c.flag("tie_word_embeddings", default=True)
    version = {"gemma": 1, "gemma2": 2}.get(c.model_type, 3)
    prefixes = ("language_model.model.", "model.language_model.", "language_model.") if composite else ("model.", "")
    c = c.nested("text_config") if composite else c
    usual = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208} if composite else {}
    c = Config({**usual, **c.values})
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads = Heads("heads", query_heads, c.count("num_key_value_heads", default=query_heads))
    size = c.head_dim(query_heads, default=256)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    bias = c.flag("attention_bias", default=False)

    t = Table(layers=c.count("num_hidden_layers"), prefixes=prefixes)
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q", bias=bias)
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k", bias=bias)
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v", bias=bias)
    t.linear(f"{layer}.self_attn.o_proj", hidden, q, role="o", bias=bias)
    t.linear(f"{layer}.mlp.gate_proj", ffn, hidden, role="gate")
    t.linear(f"{layer}.mlp.up_proj", ffn, hidden, role="up")
    t.linear(f"{layer}.mlp.down_proj", hidden, ffn, role="down")
    t.norm(f"{layer}.input_layernorm", hidden)
    t.norm(f"{layer}.post_attention_layernorm", hidden)
    if version >= 2:
        t.norm(f"{layer}.pre_feedforward_layernorm", hidden)
        t.norm(f"{layer}.post_feedforward_layernorm", hidden)
    if version == 3:
        t.norm(f"{layer}.self_attn.q_norm", size)
        t.norm(f"{layer}.self_attn.k_norm", size)
    t.norm("@norm", hidden)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    if composite:
        _vision(t)
    return t


def _vision(t: Table) -> None:
    """The tensors that read images: whole, in the two spellings that releases of transformers wrote."""
    for outer in ("", "model."):
        t.tensor(f"{outer}multi_modal_projector.mm_input_projection_weight", None, None, role="vision", optional=True)
        t.tensor(f"{outer}multi_modal_projector.mm_soft_emb_norm.weight", None, role="vision", optional=True)
        for tower in (f"{outer}vision_tower.vision_model", f"{outer}vision_tower"):
            t.tensor(f"{tower}.embeddings.patch_embedding.weight", *[None] * 4, role="vision", optional=True)
            t.tensor(f"{tower}.embeddings.patch_embedding.bias", None, role="vision", optional=True)
            t.tensor(f"{tower}.embeddings.position_embedding.weight", None, None, role="vision", optional=True)
            block = f"{tower}.encoder.layers.{{vision_layer}}"
            for linear in (*(f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2"):
                t.linear(f"{block}.{linear}", None, None, role="vision", bias=True, optional=True)
            for norm in (f"{block}.layer_norm1", f"{block}.layer_norm2", f"{tower}.post_layernorm"):
                t.norm(norm, None, bias=True, optional=True)
