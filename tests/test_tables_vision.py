"""Exact rules of newer models that see: layers that differ by the config, names of their own on disk, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from tables import Config, checkpoint, rows, rule_of, tensors

from tpshard.axes import Dim
from tpshard.errors import TpshardError
from tpshard.matching import match
from tpshard.registry import table_for
from tpshard.table import ADDED_ONCE

TOWER: Config = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "num_channels": 3,
}  # fmt: skip
MISTRAL: Config = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 8, "n_routed_experts": 4, "kv_lora_rank": 12, "qk_rope_head_dim": 2, "qk_nope_head_dim": 6,
    "v_head_dim": 4, "index_head_dim": 4, "index_n_heads": 2, "no_rope_layers": [1, 1, 1, 0],
    "kv_source_layers": [0, 1, 1, 3], "indexer_types": ["full", "shared", "full", "full"],
}  # fmt: skip
GLM: Config = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 8, "n_routed_experts": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 6, "v_head_dim": 4, "index_head_dim": 4, "index_n_heads": 2, "linear_head_dim": 4,
    "linear_num_heads": 8, "linear_conv_kernel_dim": 4, "hc_mult": 3, "index_kpool": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "full"],
}  # fmt: skip
GEMMA: Config = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
TINY: dict[str, Config] = {
    "evolla": {
        "model_type": "evolla", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "aligner_num_add_layers": 2, "resampler_depth": 2,
        "resampler_heads": 4, "resampler_dim_head": 6, "resampler_num_latents": 5,
        "protein_encoder_config": {**TOWER, "vocab_size": 30},
    },
    "glm5_next": {"model_type": "glm5_next_text", **GLM},
    "mistral_large4": {"model_type": "mistral_large4", "text_config": MISTRAL, "vision_config": TOWER},
    "t5gemma2": {
        "model_type": "t5gemma2", "architectures": ["T5Gemma2ForConditionalGeneration"], "decoder": GEMMA,
        "encoder": {"text_config": GEMMA, "vision_config": {**TOWER, "model_type": "siglip_vision_model"}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tensor", "axis", "expected"),
    [
        # where no position is rotated into the keys, all of a key is made of the latent
        ("mistral_large4", "layers.0.attention.wkv_b.weight", 0, [(40, 80)]),
        ("mistral_large4", "layers.3.attention.wkv_b.weight", 0, [(48, 96)]),
        ("mistral_large4", "layers.1.experts.2.w2.weight", 1, [(10, 20)]),
        ("mistral_large4", "vision_encoder.transformer.layers.0.attention.wq.weight", 0, [(12, 24)]),
        ("glm5_next", "model.layers.1.self_attn.q_b_proj.weight", 0, [(24, 48)]),
        ("glm5_next", "model.layers.0.self_attn.A_log", 0, [(4, 8)]),
        ("evolla", "model.layers.1.adapter.key_protein.weight", 0, [(16, 32)]),
        # keys of all heads, then values of all heads
        (
            "evolla", "model.protein_encoder.sequence_compressor_resampler.layers.0.0.to_kv.weight", 0,
            [(12, 24), (36, 48)],
        ),
        ("t5gemma2", "model.decoder.layers.0.self_attn.k_proj.weight", 0, [(8, 16)]),
    ],
)  # fmt: skip
def test_rows_of_the_second_of_two_ranks(name: str, tensor: str, axis: int, expected: list[tuple[int, int]]) -> None:
    assert rows(TINY[name], tensor, axis, 2, 1) == expected


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("layers.0.attention.wkv_a_with_mqa.weight", (14, 32)),  # the latent and what is rotated
        ("layers.3.attention.wkv_a_with_mqa.weight", (12, 32)),  # the latent alone
        ("layers.2.attention.wkv_a_with_mqa.weight", None),  # takes over that of layer 1
        ("layers.1.attention.indexer.wk.weight", None),  # takes over the choice of layer 0
        ("layers.2.attention.indexer.wk.weight", (4, 32)),
        ("layers.0.experts.0.w1.weight", None),  # a dense layer
    ],
)
def test_layers_of_mistral_large_4_hold_what_the_config_says(tensor: str, shape: tuple[int, ...] | None) -> None:
    shapes = checkpoint(TINY["mistral_large4"])
    assert shapes.get(tensor) == shape
    if shape is not None:
        table = table_for(TINY["mistral_large4"])
        with pytest.raises(TpshardError, match=str(shape[0])):
            match(table, tensors({**shapes, tensor: (shape[0] + 2, *shape[1:])}))


def test_only_every_second_layer_of_evolla_has_an_adapter() -> None:
    adapters = {name.split(".")[2] for name in checkpoint(TINY["evolla"]) if ".adapter." in name}
    assert adapters == {"1", "3"}


@pytest.mark.parametrize("name", ["wq_b.weight", "ssmax_scaling.s"])
def test_what_chooses_tokens_is_whole(name: str) -> None:
    rule = rule_of(table_for(TINY["mistral_large4"]), f"layers.0.attention.indexer.{name}")
    assert not any(isinstance(dim, Dim) for dim in rule.dims)


def test_the_adapter_adds_its_bias_once() -> None:
    assert rule_of(table_for(TINY["evolla"]), "model.layers.1.adapter.out_proj.bias").note == ADDED_ONCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["evolla", "glm5_next", "mistral_large4", "muse_glimmer", "muse_spark", "t5gemma2"]
)
def test_a_vision_model_conforms(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from zoo.conformance import check

    out = check(model_type, tmp_path, task="vlm", degrees=(2, 3), run_at=(3,))
    assert not out.problems
    assert out.error is not None, out.unsupported
