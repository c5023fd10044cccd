"""Exact rules of GPT-like decoders and BERT-like encoders: fused matrices, spellings on disk, marks, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tables import Config, Shapes, checkpoint, rows, rule_of, tensors

from tpshard.errors import DamagedError, TpshardError, UnsupportedError
from tpshard.matching import known_names, match
from tpshard.partition import partition
from tpshard.registry import table_for
from tpshard.table import ADDED_ONCE, NEEDS_GATHER, NEEDS_SUM

BERT: Config = {
    "vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 20, "type_vocab_size": 2,
}  # fmt: skip
GPT: Config = {"vocab_size": 90, "n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 20}
LLAMA: Config = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "ffn_dim": 96,
}  # fmt: skip
TINY: dict[str, Config] = {
    "albert": {**BERT, "embedding_size": 16},
    "bert": BERT,
    "bert-generation": BERT,
    "big_bird": BERT,
    "biogpt": BERT,
    "bloom": {"vocab_size": 90, "hidden_size": 64, "n_head": 4, "n_layer": 2},
    "camembert": BERT,
    "codegen": GPT,
    "convbert": {**BERT, "hidden_size": 64, "num_attention_heads": 8, "head_ratio": 2, "embedding_size": 16},
    "cpmant": {**BERT, "dim_head": 8, "dim_ff": 48, "prompt_types": 2, "prompt_length": 3, "segment_types": 4,
               "position_bias_num_buckets": 8},
    "ctrl": {**GPT, "dff": 96},
    "data2vec-text": BERT,
    "deberta": {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0},
    "deberta-v2": {**BERT, "relative_attention": True, "pos_att_type": "c2p|p2c", "position_buckets": 8,
                   "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3, "position_biased_input": False},
    "diffllama": LLAMA,
    "distilbert": {"vocab_size": 90, "dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48,
                   "max_position_embeddings": 20},
    "doge": {**LLAMA, "is_moe": True, "num_experts": 25},
    "electra": {**BERT, "embedding_size": 16},
    "ernie": {**BERT, "use_task_id": True},
    "esm": {**BERT, "emb_layer_norm_before": True},
    "esmc": {**LLAMA, "num_key_value_heads": 8},
    "eurobert": LLAMA,
    "flaubert": {"vocab_size": 90, "emb_dim": 32, "n_heads": 4, "n_layers": 2, "max_position_embeddings": 20},
    "fnet": BERT,
    "funnel": {"vocab_size": 90, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [2, 1],
               "num_decoder_layers": 1},
    "git": {**BERT, "vision_config": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
                                      "intermediate_size": 48, "image_size": 32, "patch_size": 8}},
    "gpt2": {**GPT, "add_cross_attention": True},
    "gpt_neo": {"vocab_size": 90, "hidden_size": 64, "num_heads": 8, "num_layers": 2, "max_position_embeddings": 20},
    "gpt_neox_japanese": {"vocab_size": 90, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    "gptj": GPT,
    "gte": BERT,
    "ibert": BERT,
    "jina_embeddings_v3": BERT,
    "layoutlm": BERT,
    "longformer": BERT,
    "luke": {**BERT, "entity_vocab_size": 30, "entity_emb_size": 16},
    "megatron-bert": BERT,
    "mobilebert": {**BERT, "hidden_size": 64, "intra_bottleneck_size": 32, "embedding_size": 16},
    "modernbert": BERT,
    "modernbert-decoder": BERT,
    "moshi": LLAMA,
    "mpnet": BERT,
    "mpt": {"vocab_size": 90, "d_model": 64, "n_heads": 4, "n_layers": 2},
    "mra": BERT,
    "neomme": {**LLAMA, "embedding_rank": 16, "patch_size": 4},
    "nomic_bert": BERT,
    "nystromformer": {**BERT, "conv_kernel_size": 5},
    "openai-gpt": GPT,
    "perceiver": {"vocab_size": 90, "d_latents": 32, "d_model": 64, "num_latents": 6, "num_self_attends_per_block": 2,
                  "max_position_embeddings": 20, "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    "reformer": {"vocab_size": 90, "hidden_size": 32, "num_attention_heads": 4, "attention_head_size": 8,
                 "feed_forward_size": 48, "attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 5],
                 "axial_pos_embds_dim": [12, 20]},
    "rembert": {**BERT, "input_embedding_size": 16, "output_embedding_size": 40},
    "roberta": BERT,
    "roberta-prelayernorm": BERT,
    "roc_bert": BERT,
    "roformer": {**BERT, "embedding_size": 16},
    "squeezebert": {**BERT, "embedding_size": 32},
    "tapas": BERT,
    "ultrabert": LLAMA,
    "xglm": {"vocab_size": 90, "d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48},
    "xlm": {"vocab_size": 90, "emb_dim": 32, "n_heads": 4, "n_layers": 2, "max_position_embeddings": 20, "n_langs": 3},
    "xlm-roberta": BERT,
    "xlm-roberta-xl": BERT,
    "xlnet": {"vocab_size": 90, "d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 48, "d_head": 8},
    "xmod": {**BERT, "languages": ["en_XX", "de_DE"], "adapter_layer_norm": True},
    "yoso": BERT,
}  # fmt: skip
FAMILIES = list(TINY)


def config_of(model_type: str, **more: Any) -> Config:
    return {**TINY[model_type], "model_type": model_type, **more}


# fmt: off
ROWS = {
    # [block][q v k][2 heads][8]
    "codegen, a head": ("codegen", "transformer.h.0.attn.qkv_proj.weight", 0, 8, 1, [(8, 16), (24, 32), (40, 48)]),
    "codegen, uneven": ("codegen", "transformer.h.0.attn.qkv_proj.weight", 0, 3, 0,
                        [(0, 56), (64, 72), (80, 88)]),
    "codegen, out": ("codegen", "transformer.h.0.attn.out_proj.weight", 1, 8, 1, [(8, 16)]),
    "bloom, head by head": ("bloom", "h.1.self_attention.query_key_value.bias", 0, 2, 1, [(96, 192)]),
    "neox japanese": ("gpt_neox_japanese", "gpt_neox_japanese.layers.0.attention.query_key_value.weight", 0, 4, 1,
                      [(48, 96)]),
    "mpt, three blocks": ("mpt", "transformer.blocks.0.attn.Wqkv.weight", 0, 4, 1, [(16, 32), (80, 96), (144, 160)]),
    "gpt-1, columns": ("openai-gpt", "h.0.attn.c_attn.weight", 1, 4, 3, [(48, 64), (112, 128), (176, 192)]),
    "gpt-2, cross": ("gpt2", "transformer.h.0.crossattention.c_attn.bias", 0, 4, 3, [(48, 64), (112, 128)]),
    # a head of the first half and its partner of the second
    "diffllama, q": ("diffllama", "model.layers.0.self_attn.q_proj.weight", 0, 2, 1, [(32, 64), (96, 128)]),
    "diffllama, k": ("diffllama", "model.layers.0.self_attn.k_proj.weight", 0, 2, 1, [(16, 32), (48, 64)]),
    "diffllama, o": ("diffllama", "model.layers.0.self_attn.o_proj.weight", 1, 2, 1, [(64, 128)]),
    "diffllama, a part of a pair": ("diffllama", "model.layers.0.self_attn.k_proj.weight", 0, 4, 3,
                                    [(16, 32), (48, 64)]),
    "moshi, gate and up": ("moshi", "model.layers.0.mlp.fc1.weight", 0, 2, 1, [(24, 48), (72, 96)]),
    "cpm-ant, a column a head": ("cpmant", "cpmant.position_bias.relative_attention_bias", 1, 4, 2, [(2, 3)]),
    "xlnet, the middle": ("xlnet", "transformer.layer.0.rel_attn.o", 1, 4, 2, [(2, 3)]),
    "reformer, shared": ("reformer", "reformer.encoder.layers.1.attention.self_attention.query_key.weight", 0, 4, 1,
                         [(8, 16)]),
    "deberta, head by head": ("deberta", "deberta.encoder.layer.0.attention.self.in_proj.weight", 0, 4, 1, [(24, 48)]),
    "deberta, a bias of q": ("deberta", "deberta.encoder.layer.0.attention.self.q_bias", 0, 4, 1, [(8, 16)]),
    "convbert, two halves": ("convbert", "convbert.encoder.layer.0.attention.output.dense.weight", 1, 4, 1,
                             [(8, 16), (40, 48)]),
    "convbert, kernels": ("convbert", "convbert.encoder.layer.0.attention.self.conv_kernel_layer.weight", 1, 4, 1,
                          [(8, 16)]),
    "squeezebert, inside groups": ("squeezebert", "transformer.encoder.layers.0.intermediate.conv1d.weight", 0, 4, 1,
                                   [(3, 6), (15, 18), (27, 30), (39, 42)]),
    "squeezebert, back": ("squeezebert", "transformer.encoder.layers.0.output.conv1d.weight", 1, 4, 1, [(3, 6)]),
    "modernbert, three blocks": ("modernbert", "model.layers.0.attn.Wqkv.weight", 0, 4, 1,
                                 [(8, 16), (40, 48), (72, 80)]),
    "modernbert, input and gate": ("modernbert", "model.layers.0.mlp.Wi.weight", 0, 4, 1, [(12, 24), (60, 72)]),
    "gte": ("gte", "new.encoder.layer.0.attention.qkv_proj.bias", 0, 4, 1, [(8, 16), (40, 48), (72, 80)]),
    "nomic": ("nomic_bert", "encoder.layers.0.attn.Wqkv.weight", 0, 4, 1, [(8, 16), (40, 48), (72, 80)]),
    "neomme, values of words": ("neomme", "model.value_embeddings.weight", 1, 2, 1, [(32, 64)]),
    "nystromformer, a filter a head": ("nystromformer", "nystromformer.encoder.layer.0.attention.self.conv.weight", 0,
                                       4, 1, [(1, 2)]),
    "ibert, integers": ("ibert", "ibert.encoder.layer.0.attention.self.query.fc_scaling_factor", 0, 4, 1, [(8, 16)]),
    "luke, entities": ("luke", "luke.entity_embeddings.entity_embeddings.weight", 0, 3, 2, [(20, 30)]),
    "xmod, a language": ("xmod", "roberta.encoder.layer.0.output.adapter_modules.de_DE.dense2.weight", 1, 4, 1,
                         [(4, 8)]),
    "doge, experts of one row": ("doge", "model.layers.0.mlp.down_embed.weight", 0, 5, 1, [(5, 10)]),
    "mobilebert, down and gathered": ("mobilebert", "mobilebert.encoder.layer.0.bottleneck.input.dense.weight", 0, 4, 1,
                                      [(8, 16)]),
}
# fmt: on


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_a_rank(case: str) -> None:
    model_type, name, axis, tp_size, rank, expected = ROWS[case]
    assert rows(config_of(model_type), name, axis, tp_size, rank) == expected


MARKS = {
    "q norm over all heads": ("esmc", "esmc.layers.0.self_attn.q_norm.weight", "norm", NEEDS_SUM),
    "values that all heads' masks see": ("doge", "model.layers.0.self_attn.v_proj.weight", "v", NEEDS_GATHER),
    "the way to the narrow stream": (
        "mobilebert", "mobilebert.encoder.layer.0.bottleneck.attention.dense.weight", "gathered", NEEDS_GATHER),
    "after the sum inside attention": (
        "convbert", "convbert.encoder.layer.0.attention.self.conv_kernel_layer.bias", "attn_mix_bias", ADDED_ONCE),
    "after a convolution in groups": (
        "squeezebert", "transformer.encoder.layers.0.output.conv1d.bias", "down_bias", ADDED_ONCE),
    "an output's bias": ("bert", "bert.encoder.layer.0.output.dense.bias", "down_bias", ADDED_ONCE),
    "added by the model to all logits": ("esm", "lm_head.bias", "whole", "whole: added to the gathered logits"),
    "a bias of no matrix": (
        "gpt_neox_japanese", "gpt_neox_japanese.layers.1.attention.dense_bias", "whole",
        "whole: added to the residual stream after the sum"),
}  # fmt: skip


@pytest.mark.parametrize("case", MARKS)
def test_what_a_tensor_is_marked_with(case: str) -> None:
    model_type, name, role, note = MARKS[case]
    rule = rule_of(table_for(config_of(model_type)), name)
    assert (rule.role, rule.note) == (role, note)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_prefix_of_a_whole_checkpoint_is_known(model_type: str) -> None:
    config = config_of(model_type)
    table = table_for(config)
    for prefix in range(len(table.stacks[0].pairs)):
        shapes = checkpoint(config, prefix)
        assert set(match(table, tensors(shapes)).rules) == set(shapes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_missing_tensor_of_the_body_is_named(model_type: str) -> None:
    config = config_of(model_type)
    table, shapes = table_for(config), checkpoint(config)
    optional = {number for number, stack in enumerate(table.stacks) if stack.optional}
    body = [name for name in shapes if rule_of(table, name).stack not in optional]
    for name in body[:: max(len(body) // 12, 1)]:
        with pytest.raises(DamagedError, match=r"missing from the weights|holds none of"):
            match(table, tensors({n: s for n, s in shapes.items() if n != name}))


def heads_of_classes(config: Config) -> list[list[str]]:
    """The tensors of every head that a checkpoint may lack."""
    table, shapes = table_for(config), checkpoint(config)
    by_stack: dict[int, list[str]] = {}
    for name in shapes:
        number = rule_of(table, name).stack
        if table.stacks[number].optional:
            by_stack.setdefault(number, []).append(name)
    return list(by_stack.values())


@pytest.mark.parametrize("model_type", [m for m in FAMILIES if heads_of_classes(config_of(m))])
def test_a_head_is_there_whole_or_not_at_all(model_type: str) -> None:
    config = config_of(model_type)
    table, shapes = table_for(config), checkpoint(config)
    for head in heads_of_classes(config):
        match(table, tensors({n: s for n, s in shapes.items() if n not in head}))
        if len(head) > 1:
            with pytest.raises(DamagedError, match=r"missing|none of"):
                match(table, tensors({n: s for n, s in shapes.items() if n != head[-1]}))


OLD = "norms with gamma and beta"
NORMED = ["albert", "bert", "distilbert", "electra", "layoutlm", "roberta", "xlm-roberta", "deberta-v2"]


@pytest.mark.parametrize("model_type", NORMED)
def test_norms_have_one_spelling_or_the_other(model_type: str) -> None:
    config = config_of(model_type)
    table, new, old = table_for(config), checkpoint(config), checkpoint(config, blocks=[OLD])
    assert any(name.endswith("LayerNorm.gamma") for name in old)
    assert not any(name.endswith(("LayerNorm.weight", "LayerNorm.bias")) for name in old)
    assert len(new) == len(old)
    match(table, tensors(old))
    one = next(name for name in old if re.search(r"\d.*\.gamma$", name))
    with pytest.raises(DamagedError, match=r"norms|missing"):
        match(table, tensors({**new, one: old[one]}))  # one norm in both spellings
    with pytest.raises(DamagedError):
        match(table, tensors({n: s for n, s in old.items() if n != one}))


HUB = {  # names as well-known releases have them, and what they are
    "google-bert/bert-base-uncased": ("bert", {
        "bert.embeddings.LayerNorm.gamma": "norm", "bert.encoder.layer.1.attention.self.query.weight": "q",
        "cls.predictions.transform.LayerNorm.beta": "norm_bias", "cls.seq_relationship.weight": "pooler",
        "bert.pooler.dense.weight": "pooler", "cls.predictions.decoder.weight": "head"}),
    "sentence-transformers/all-MiniLM-L6-v2": ("bert", {
        "embeddings.position_ids": "buffer", "encoder.layer.0.intermediate.dense.weight": "up",
        "pooler.dense.bias": "pooler_bias"}),
    "BAAI/bge-reranker-large": ("xlm-roberta", {
        "roberta.encoder.layer.0.output.dense.weight": "down", "classifier.dense.weight": "pooler",
        "classifier.out_proj.weight": "pooler"}),
    "microsoft/deberta-v3-base": ("deberta-v2", {
        "deberta.encoder.rel_embeddings.weight": "whole", "lm_predictions.lm_head.dense.weight": "head_projection",
        "mask_predictions.classifier.weight": "pooler", "deberta.encoder.layer.0.attention.self.pos_key_proj.bias":
        "k_bias", "deberta.encoder.conv.conv.weight": "whole"}),
    "facebook/esm2_t33_650M_UR50D": ("esm", {
        "esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq": "buffer",
        "esm.contact_head.regression.weight": "pooler", "esm.encoder.layer.0.LayerNorm.weight": "norm"}),
    "bigscience/bloom": ("bloom", {"word_embeddings_layernorm.weight": "norm", "h.0.mlp.dense_h_to_4h.weight": "up"}),
    "EleutherAI/gpt-j-6b": ("gptj", {"transformer.h.0.attn.masked_bias": "buffer", "lm_head.bias": "head_bias"}),
    "Salesforce/codegen-350M-mono": ("codegen", {"transformer.h.0.attn.causal_mask": "buffer"}),
    "openai-community/openai-gpt": ("openai-gpt", {
        "tokens_embed.weight": "embed", "positions_embed.weight": "position"}),
    "nomic-ai/nomic-embed-text-v1.5": ("nomic_bert", {
        "emb_ln.weight": "norm", "encoder.layers.0.mlp.fc12.weight": "gate"}),
    "answerdotai/ModernBERT-base": ("modernbert", {
        "head.dense.weight": "head_projection", "decoder.bias": "head_bias",
        "model.layers.1.attn_norm.weight": "norm"}),
    "google/electra-base-discriminator": ("electra", {"discriminator_predictions.dense_prediction.weight": "pooler"}),
}  # fmt: skip


@pytest.mark.parametrize("release", HUB)
def test_names_of_releases(release: str) -> None:
    model_type, roles = HUB[release]
    known = known_names(table_for(config_of(model_type)), roles)
    assert {name: known[name].rule.role for name in roles} == roles


LIES: dict[str, tuple[Config, Shapes, str]] = {
    "a wider model": (config_of("bert", hidden_size=64), checkpoint(config_of("bert")), r"32.*64"),
    "more words": (config_of("gptj", vocab_size=91), checkpoint(config_of("gptj")), r"90.*91"),
    "more positions": (config_of("roberta", max_position_embeddings=22), checkpoint(config_of("roberta")), r"20.*22"),
    "a layer more": (config_of("mpt", n_layers=1), checkpoint(config_of("mpt")), r"blocks\.1.*1 layer"),
    "GPT-1 called GPT-2": (config_of("gpt2"), checkpoint(config_of("openai-gpt")), r"tokens_embed|positions_embed"),
    "CodeGen called GPT-J": (config_of("gptj"), checkpoint(config_of("codegen")), r"qkv_proj"),
    "BERT called RoBERTa": (config_of("roberta"), checkpoint(config_of("bert")), r"bert\.|cls\."),
    "GPT-2's orientation": (
        config_of("mpt"), {**checkpoint(config_of("mpt")), "transformer.blocks.0.attn.Wqkv.weight": (64, 192)},
        r"64 rows.*192"),
    "other languages": (
        config_of("xmod", languages=["en_XX", "fr_XX"]), checkpoint(config_of("xmod")), r"de_DE"),
    "a norm that is not there": (
        config_of("modernbert"), {**checkpoint(config_of("modernbert")), "model.layers.0.attn_norm.weight": (32,)},
        r"layers\.0\.attn_norm"),
    "hashed attention in a local layer": (
        config_of("reformer", attn_layers=["lsh", "lsh"]), checkpoint(config_of("reformer")),
        r"layers\.0.*(query|key)"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_with_what_contradicts_it(lie: str) -> None:
    config, shapes, told = LIES[lie]
    with pytest.raises(TpshardError, match=told):
        match(table_for(config), tensors(shapes))


NO_CUT = {
    "CodeGen's blocks": (config_of("codegen", n_head=6, n_embd=48), "6 attention heads do not divide"),
    "no half of the KV heads": (config_of("diffllama", num_attention_heads=6, num_key_value_heads=3), "3 KV heads"),
    "no kinds of layers": ({k: v for k, v in config_of("reformer").items() if k != "attn_layers"}, "attn_layers"),
}


@pytest.mark.parametrize("case", NO_CUT)
def test_a_count_that_cannot_be_is_refused(case: str) -> None:
    config, told = NO_CUT[case]
    with pytest.raises(UnsupportedError, match=told):
        table_for(config)


def test_a_tied_head_is_its_embedding_and_an_untied_one_must_be_there() -> None:
    shapes = checkpoint(config_of("gpt_neo"))
    tied = match(table_for(config_of("gpt_neo")), tensors(shapes))
    assert tied.aliases == {"lm_head.weight": "transformer.wte.weight"}
    with pytest.raises(DamagedError, match=r"lm_head\.weight is missing"):
        match(table_for(config_of("gpt_neo", tie_word_embeddings=False)), tensors(shapes))


RELEASED: dict[str, Config] = {
    "bert-base": {"model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
                  "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512},
    "xlm-roberta-base": {"model_type": "xlm-roberta", "vocab_size": 250002, "hidden_size": 768,
                         "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
                         "max_position_embeddings": 514, "type_vocab_size": 1},
    "layoutlm-base": {"model_type": "layoutlm", "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
                      "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512},
    "albert-base-v2": {"model_type": "albert", "vocab_size": 30000, "hidden_size": 768, "embedding_size": 128,
                       "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512},
    "deberta-v3-base": {"model_type": "deberta-v2", "vocab_size": 128100, "hidden_size": 768, "num_hidden_layers": 12,
                        "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512,
                        "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
                        "share_att_key": True, "pos_att_type": "p2c|c2p", "type_vocab_size": 0,
                        "position_biased_input": False},
    "distilbert-base": {"model_type": "distilbert", "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12,
                        "hidden_dim": 3072, "max_position_embeddings": 512},
    "mobilebert": {"model_type": "mobilebert", "vocab_size": 30522, "hidden_size": 512, "num_hidden_layers": 24,
                   "num_attention_heads": 4, "intermediate_size": 512, "max_position_embeddings": 512},
    "modernbert-base": {"model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768, "num_hidden_layers": 22,
                        "num_attention_heads": 12, "intermediate_size": 1152},
    "esm2-650M": {"model_type": "esm", "vocab_size": 33, "hidden_size": 1280, "num_hidden_layers": 33,
                  "num_attention_heads": 20, "intermediate_size": 5120, "max_position_embeddings": 1026,
                  "position_embedding_type": "rotary"},
    "electra-base": {"model_type": "electra", "vocab_size": 30522, "hidden_size": 768, "embedding_size": 768,
                     "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "language-perceiver": {"model_type": "perceiver", "vocab_size": 262, "d_latents": 1280, "d_model": 768,
                           "num_latents": 256, "qk_channels": 256, "v_channels": 1280},
    "fnet-base": {"model_type": "fnet", "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12,
                  "intermediate_size": 3072, "max_position_embeddings": 512},
    "git-base": {"model_type": "git", "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 6,
                 "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 1024,
                 "vision_config": {"hidden_size": 768, "patch_size": 16}},
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
             "n_positions": 1024},
    "biogpt": {"model_type": "biogpt", "vocab_size": 42384, "hidden_size": 1024, "num_hidden_layers": 24,
               "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 1024},
    "bloom": {"model_type": "bloom", "vocab_size": 250880, "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112},
    "doge-160M": {"model_type": "doge", "vocab_size": 32768, "hidden_size": 768, "num_hidden_layers": 24,
                  "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 1536},
    "phi-4-multimodal": {"model_type": "phi4_multimodal", "vocab_size": 200064, "hidden_size": 3072,
                         "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24,
                         "num_key_value_heads": 8},
}  # fmt: skip


@pytest.mark.parametrize("tp_size", [2, 3])
@pytest.mark.parametrize("release", RELEASED)
def test_nearly_everything_of_a_release_is_cut(release: str, tp_size: int) -> None:
    """The sharded fraction: 1 where every element is on one rank, 0 where all are on every rank."""
    config = RELEASED[release]
    shapes = checkpoint(config, without=r"^lm_predictions|^mask_predictions|^embedding_decoder")
    matched = match(table_for(config), tensors(shapes))
    total = held = 0
    for dims in matched.dims.values():
        parts = [partition(dim, tp_size) for dim in dims]
        sizes = [1] * tp_size
        count = 1
        for part in parts:
            count *= part.extent
            sizes = [size * part.length(rank) for rank, size in enumerate(sizes)]
        total, held = total + count, held + sum(sizes)
    assert (1 - held / tp_size / total) / (1 - 1 / tp_size) >= 0.95
