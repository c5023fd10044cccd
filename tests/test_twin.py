"""The twin: a tiny model of the same structure, which says in which ways the ranks of a class can be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the numeric verifier runs models with torch")
pytest.importorskip("transformers", reason="the numeric verifier runs the models of transformers")

import tiny_models

from tpshard.convert import split
from tpshard.errors import UnsupportedError, UsageError
from tpshard.numerics import twin as twins
from tpshard.numerics.twin import tried, twin
from tpshard.numerics.twinconfig import first_layers, shrunk
from tpshard.numerics.ways import LOCAL, ZERO_PAD, chosen
from tpshard.shards import Shards, open_shards

ZERO_PADDED = {  # what stands in the way of local shapes
    "falcon-rw": "size of tensor", "olmo2": "spans what is cut", "olmo2-gqa": "spans what is cut",
    "olmo3": "spans what is cut", "mamba2": "state-space", "mamba2-one-group": "state-space",
}  # fmt: skip


def shards_of(name: str, tmp_path: Path, tp_size: int) -> Shards:
    tiny_models.write(name, tmp_path / "model")
    split(tmp_path / "model", tmp_path / "shards", tp_size)
    return open_shards(tmp_path / "shards")


@pytest.mark.parametrize("name", list(tiny_models.MODELS))
def test_every_family_has_a_twin_that_passes_at_an_uneven_degree(name: str, tmp_path: Path) -> None:
    """At 3 heads, channels and vocabulary do not divide; every family passes zero-padded, and locally if it can."""
    shards = shards_of(name, tmp_path, 3)
    verdict = twin(shards)
    assert verdict.verdict == "passed", verdict.notes
    trial = tried(shards)
    assert trial.problems[ZERO_PAD] == ""
    if name in ZERO_PADDED:
        assert ZERO_PADDED[name] in trial.problems[LOCAL]
        assert any(ZERO_PADDED[name] in note for note in verdict.notes)
    assert verdict.mode == (ZERO_PAD if name in ZERO_PADDED else LOCAL)
    worst = max(measure.error for measure in verdict.measures)
    assert 0 < worst <= (1e-6 if name.startswith("deepseek_v2") else 1e-13)  # V2 scores experts in float32
    assert not verdict.findings


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi3", "falcon", "gpt_oss", "deepseek_v3"])
def test_more_ranks_than_kv_heads(name: str, tmp_path: Path) -> None:
    assert twin(shards_of(name, tmp_path, 4)).mode == LOCAL


def test_a_twin_is_tried_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of("llama", tmp_path, 2)
    first = tried(shards)
    monkeypatch.setattr(twins, "write_twin", lambda *args, **kwargs: pytest.fail("the twin was made again"))
    assert tried(shards) is first


def test_a_wrong_table_makes_the_level_unsupported_and_says_nothing_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin is cut by the table of this installation: here one that cuts [gate; up] as if it were one matrix."""
    from tpshard.axes import Units
    from tpshard.converters import phi3
    from tpshard.table import Table

    shards = shards_of("phi3", tmp_path, 2)
    right = phi3.table

    def wrong(config: Any) -> Table:
        table = right(config)
        width = Units("ffn2", 2 * config.count("intermediate_size")).each()
        table.rules[:] = [
            rule._replace(dims=(width, *rule.dims[1:])) if "gate_up_proj" in rule.name else rule for rule in table.rules
        ]
        return table

    monkeypatch.setattr(phi3, "table", wrong)
    monkeypatch.setattr(twins, "_trials", {})
    verdict = twin(shards)
    assert verdict.verdict == "unsupported"
    assert not verdict.findings
    assert any("mlp" in note for note in verdict.notes)
    with pytest.raises(UnsupportedError, match="cut by the same table, fails"):
        chosen(shards, "auto")


def test_a_config_that_cannot_be_made_small_leaves_the_zero_padded_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = shards_of("llama", tmp_path, 2)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("LlamaForCausalLM cannot be made small: no")

    monkeypatch.setattr(twins, "write_twin", fails)
    monkeypatch.setattr(twins, "_trials", {})
    way = chosen(shards, "auto")
    assert way.mode == ZERO_PAD
    assert "cannot be made small" in way.notes[0]
    with pytest.raises(UnsupportedError, match="--mode zero-pad"):
        chosen(shards, "local")
    with pytest.raises(UsageError, match="'gather' is no way"):
        chosen(shards, "gather")


@settings(max_examples=200, deadline=None)
@given(
    kv=st.integers(1, 128), group=st.integers(1, 16), tp_size=st.integers(1, 64), ffn=st.integers(1, 60000),
    vocabulary=st.integers(100, 300000), natural=st.booleans(), layers=st.integers(1, 126),
)  # fmt: skip
def test_a_small_config_keeps_what_decides_the_cut(
    kv: int, group: int, tp_size: int, ffn: int, vocabulary: int, natural: bool, layers: int
) -> None:
    heads = kv * group
    config = {
        "hidden_size": heads * (64 if natural else 96), "head_dim": 64, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocabulary, "num_hidden_layers": layers,
        "layer_types": ["full" if n % 3 else "sliding" for n in range(layers)],
    }  # fmt: skip
    before = json.dumps(config)
    small = shrunk(config, tp_size)
    assert json.dumps(config) == before
    assert small["num_attention_heads"] == group * small["num_key_value_heads"]
    assert small["num_key_value_heads"] % tp_size == kv % tp_size
    assert small["num_key_value_heads"] <= kv
    assert min(kv, tp_size) <= small["num_key_value_heads"] <= max(3 * tp_size, 1) + tp_size
    assert small["intermediate_size"] % tp_size == ffn % tp_size
    assert small["intermediate_size"] >= min(ffn, tp_size)
    assert small["vocab_size"] % tp_size == vocabulary % tp_size
    assert small["vocab_size"] >= 64
    assert (small["hidden_size"] == small["num_attention_heads"] * small["head_dim"]) is natural
    assert len(small["layer_types"]) == small["num_hidden_layers"] == min(2, layers)
    assert set(small["layer_types"]) == set(config["layer_types"])


@settings(max_examples=100, deadline=None)
@given(hidden=st.integers(1, 10000), expand=st.integers(1, 16), tp_size=st.integers(1, 64))
def test_a_small_state_space_keeps_as_many_channels_as_its_hidden_size_is_widened_to(
    hidden: int, expand: int, tp_size: int
) -> None:
    config = {"hidden_size": hidden, "expand": expand, "intermediate_size": expand * hidden, "num_hidden_layers": 64}
    small = shrunk(config, tp_size)
    assert small["intermediate_size"] == expand * small["hidden_size"]
    assert small["intermediate_size"] % tp_size == expand * hidden % tp_size
    assert small["intermediate_size"] >= min(tp_size, expand * hidden)
    assert small["hidden_size"] <= min(hidden, 8 * tp_size)


def test_a_small_deepseek_v3_keeps_its_kinds_of_layers_groups_and_expert_order() -> None:
    config = {
        "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "num_hidden_layers": 61, "moe_intermediate_size": 2048, "intermediate_size": 18432, "vocab_size": 129280,
        "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"},
        "max_position_embeddings": 163840,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    }  # fmt: skip
    small = shrunk(config, 8)
    assert (small["num_hidden_layers"], small["first_k_dense_replace"]) == (2, 1)
    assert (small["n_routed_experts"], small["n_group"], small["topk_group"], small["num_experts_per_tok"]) == (
        12,
        2,
        1,
        2,
    )
    assert small["num_attention_heads"] == 16
    assert small["rope_scaling"]["original_max_position_embeddings"] == 3
    assert "quantization_config" not in small
    assert "num_nextn_predict_layers" not in small


@pytest.mark.parametrize(
    ("config", "tp_size"),
    [
        # rope factors for every pair of a head's indices
        (
            lambda T: T.Phi3Config(
                hidden_size=3072,
                num_attention_heads=32,
                max_position_embeddings=131072,
                original_max_position_embeddings=4096,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0 + n / 100 for n in range(48)],
                    "long_factor": [1.0 + n / 10 for n in range(48)],
                },
                architectures=["Phi3ForCausalLM"],
            ),
            4,
        ),
        # channels that are the hidden size widened
        (lambda T: T.MambaConfig(hidden_size=2560, architectures=["MambaForCausalLM"]), 3),
        # 25 heads on 4 ranks
        (lambda T: T.GPT2Config(n_embd=1600, n_head=25, n_layer=48, architectures=["GPT2LMHeadModel"]), 4),
        pytest.param(lambda T: T.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]), 8, marks=pytest.mark.slow),
        pytest.param(lambda T: T.GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]), 6, marks=pytest.mark.slow),
    ],
    ids=["phi-3 128k", "mamba 2.8b", "gpt-2 xl", "deepseek v3", "gpt-neox 20b"],
)
def test_models_as_they_are_released_have_a_twin(config: Any, tp_size: int) -> None:
    """From the configs alone: 671 billion parameters or few."""
    import transformers

    values = json.loads(config(transformers).to_json_string())
    trial = twins._try(shrunk(values, tp_size), tp_size, False)
    assert trial.ran
    assert trial.problems[ZERO_PAD] == ""
    if values["model_type"] == "mamba":
        assert "state-space" in trial.problems[LOCAL]
    else:
        assert trial.problems[LOCAL] == ""


def test_the_first_layers_of_a_config() -> None:
    config = {"num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"], "mlp_only_layers": [1, 3], "hidden_size": 8}
    assert first_layers(config, 2) == {
        "num_hidden_layers": 2, "layer_types": ["a", "b"], "mlp_only_layers": [1], "hidden_size": 8,
    }  # fmt: skip
