"""Cohere Transcribe: Parakeet's encoder and a decoder, released under NeMo's names; the head has a bias.

Source: transformers ``models/cohere_asr/modeling_cohere_asr.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import include_respelt
from tpshard.blocks.dense import attention, channels_of, heads_of, mlp, norms, vocabulary_of
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "cohere_asr"
MODEL_TYPES = ("cohere_asr",)
USUAL = {"hidden_size": 1280, "num_hidden_layers": 48, "num_attention_heads": 8, "intermediate_size": 5120}
ENCODER = {  # NeMo's names by those of transformers
    "self_attn.q_proj": "self_attn.linear_q", "self_attn.k_proj": "self_attn.linear_k",
    "self_attn.v_proj": "self_attn.linear_v", "self_attn.o_proj": "self_attn.linear_out",
    "self_attn.relative_k_proj": "self_attn.linear_pos", "self_attn.bias_": "self_attn.pos_bias_",
    "conv.norm": "conv.batch_norm",
}  # fmt: skip
QKVO = ("query_net", "key_net", "value_net", "out_projection")
BETWEEN = "from the encoder's width to the decoder's, all of which every layer reads"


def table(c: Config) -> Table:
    hidden, heads, vocab = c.count("hidden_size", default=1024), heads_of(c), vocabulary_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=True)
    encoder = part_of(c.with_usual(encoder_config=USUAL), "encoder_config", model_type="parakeet_encoder")

    t = Table(c.count("num_hidden_layers", default=8), prefixes=("model.", ""))
    part = table_of(encoder)
    part.modules[0] = part.modules[0]._replace(name="@pre_encode")
    include_respelt(
        t, part, ENCODER, *((f"{at}encoder.", f"{at}encoder.") for at in ("model.", "")), axes="encoder_"
    )
    for what, dims in (("weight", (hidden, encoder.count("hidden_size"))), ("bias", (hidden,))):
        t.whole(f"@encoder_decoder_proj.{what}", *dims, why=BETWEEN, optional=encoder.count("hidden_size") == hidden)
    words = "@transf_decoder._embedding"
    t.embedding(f"{words}.token_embedding", vocab, hidden)
    places = c.count("max_position_embeddings", default=1024)
    t.tensor(f"{words}.position_embedding.pos_enc", places, hidden, role="position")
    t.norm(f"{words}.layer_norm", hidden, bias=True)
    layer = "@transf_decoder._decoder.layers.{layer}"
    for at in ("first_sub_layer", "second_sub_layer"):
        q, kv = heads.query(size), heads.kv(size)
        attention(t, f"{layer}.{at}", q, kv, hidden, bias=bias, out_bias=bias, names=QKVO)
    mlp(t, f"{layer}.third_sub_layer", channels_of(c), hidden, names=("dense_in", "dense_out"))
    norms(t, layer, ("layer_norm_1", "layer_norm_2", "layer_norm_3"), hidden, bias=True)
    t.norm("@transf_decoder._decoder.final_layer_norm", hidden, bias=True)
    t.linear("log_softmax.mlp.layer0", vocab, hidden, role="head", bias=True, optional=True)
    return t
