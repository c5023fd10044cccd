"""The forward level on damaged shards: every fault is caught, and named at the point where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models  # noqa: E402
from conftest import Case  # noqa: E402
from damaged import Sharded, flip_lowest_bit, points  # noqa: E402

from tpshard.errors import DamagedError  # noqa: E402

Damage = Callable[[Sharded], None]


def exchange(name: str, one: int = 0, other: int = 1) -> Damage:
    def damage(shards: Sharded) -> None:
        first, second = shards.get(one, name), shards.get(other, name)
        shards.put(one, name, second)
        shards.put(other, name, first)

    return damage


def copy(frm: int, to: int, *names: str) -> Damage:
    def damage(shards: Sharded) -> None:
        for name in names:
            shards.put(to, name, shards.get(frm, name))

    return damage


def on(rank: int, name: str, how: Callable[[Any], Any]) -> Damage:
    return lambda shards: shards.change(rank, name, how)


def times(factor: float) -> Callable[[Any], Any]:
    return lambda value: value * factor


def row(index: int, factor: float) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        value[index] *= factor

    return change


def fill(index: int) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        value[index] = 0.1

    return change


def swap_rows(value: Any) -> Any:
    return value[[1, 0, *range(2, len(value))]]


def head_rows_off_by_one(shards: Sharded) -> None:
    for rank in range(shards.tp_size):
        shards.change(rank, "lm_head.weight", lambda value: value.roll(1, 0))


def experts_in_text_order(shards: Sharded) -> None:
    names = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(12)]
    order = sorted(range(12), key=str)
    for rank in range(shards.tp_size):
        values = [shards.get(rank, name) for name in names]
        for place, name in enumerate(names):
            shards.put(rank, name, values[order[place]])


ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
FAULTS: dict[str, tuple[str, int, Damage, str]] = {
    "fused qkv of two ranks exchanged": (
        "F-NEOX",
        2,
        exchange("gpt_neox.layers.0.attention.query_key_value.weight"),
        "gpt_neox.layers.0.attention.dense",
    ),
    "wrong kv replica": (
        "F-LLAMA8",
        8,
        copy(0, 5, f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"),
        f"{ATTENTION}.o_proj",
    ),
    "o_proj of two ranks exchanged": ("F-LLAMA6", 2, exchange(f"{ATTENTION}.o_proj.weight"), f"{ATTENTION}.o_proj"),
    "two rows of q exchanged": ("F-LLAMA6", 3, on(2, f"{ATTENTION}.q_proj.weight", swap_rows), f"{ATTENTION}.o_proj"),
    "gate of one rank is its up": (
        "F-LLAMA6",
        3,
        lambda s: s.put(1, f"{MLP}.gate_proj.weight", s.get(1, f"{MLP}.up_proj.weight")),
        f"{MLP}.down_proj",
    ),
    "one bit of a row-parallel matrix": (
        "F-LLAMA6",
        3,
        on(2, f"{MLP}.down_proj.weight", flip_lowest_bit(3, 5)),
        f"{MLP}.down_proj",
    ),
    "one bit of a column-parallel matrix": (
        "F-LLAMA6",
        3,
        on(1, f"{MLP}.up_proj.weight", flip_lowest_bit(0, 0)),
        f"{MLP}.down_proj",
    ),
    "row bias doubled on the first rank": (
        "F-GPT2",
        2,
        on(0, "transformer.h.0.mlp.c_proj.bias", times(2)),
        "transformer.h.0.mlp.c_proj",
    ),
    "row bias doubled on another rank": (
        "F-GPT2",
        2,
        on(1, "transformer.h.0.mlp.c_proj.bias", times(2)),
        "transformer.h.0.mlp.c_proj",
    ),
    "row bias nowhere": ("F-OPT", 4, on(0, "model.decoder.layers.1.fc2.bias", times(0)), "model.decoder.layers.1.fc2"),
    "key bias, which softmax hides": (
        "F-GPT2",
        2,
        on(1, "transformer.h.1.attn.c_attn.bias", row(20, 2)),
        "transformer.h.1.attn.c_attn",
    ),
    "fused columns exchanged": (
        "F-GPT2",
        2,
        exchange("transformer.h.1.attn.c_attn.weight"),
        "transformer.h.1.attn.c_proj",
    ),
    "norm on one rank": (
        "F-LLAMA6",
        3,
        on(2, "model.layers.1.input_layernorm.weight", lambda v: torch.ones_like(v)),
        "model.layers.1.input_layernorm",
    ),
    "one bit of a norm on one rank": ("F-LLAMA6", 3, on(1, "model.norm.weight", flip_lowest_bit(7)), "model.norm"),
    "norm over all heads on one rank": (
        "F-OLMO2",
        4,
        on(2, f"{ATTENTION}.k_norm.weight", times(1.01)),
        f"{ATTENTION}.o_proj",
    ),
    "a head's own norm on one rank": (
        "F-Q3MOE",
        2,
        on(1, f"{ATTENTION}.q_norm.weight", times(1.01)),
        f"{ATTENTION}.q_norm",
    ),
    "embedding row": ("F-LLAMA6", 3, on(1, "model.embed_tokens.weight", row(3, 0)), "model.embed_tokens"),
    "one bit of a head row": ("F-LLAMA6", 3, on(1, "lm_head.weight", flip_lowest_bit(4, 1)), "lm_head"),
    "tied row": ("F-TIED", 3, on(1, "model.embed_tokens.weight", row(3, 1.01)), "model.embed_tokens"),
    "padding row of the head": ("F-V101", 4, on(3, "lm_head.weight", fill(25)), "lm_head"),
    "padding row of the embedding": ("F-V101", 4, on(3, "model.embed_tokens.weight", fill(24)), "model.embed_tokens"),
    "vocabulary off by one": ("F-LLAMA6", 2, head_rows_off_by_one, "lm_head"),
    "positions": ("F-GPT2", 2, on(1, "transformer.wpe.weight", row(60, 2)), "transformer.wpe"),
    "router on one rank": ("F-Q3MOE", 2, on(1, f"{MLP}.gate.weight", swap_rows), f"{MLP}.gate"),
    "correction bias on one rank": (
        "F-DSV3",
        4,
        on(2, f"{MLP}.gate.e_score_correction_bias", times(1.01)),
        f"{MLP}.gate",
    ),
    "experts in text order": ("F-Q3MOE", 2, experts_in_text_order, f"{MLP}.experts"),
    "one bit of one expert": (
        "F-Q3MOE",
        2,
        on(1, f"{MLP}.experts.11.up_proj.weight", flip_lowest_bit(2, 3)),
        f"{MLP}.experts",
    ),
    "one bit of a stacked expert": (
        "F-GPTOSS",
        2,
        on(1, f"{MLP}.experts.gate_up_proj", flip_lowest_bit(3, 2, 5)),
        f"{MLP}.experts",
    ),
    "stacked expert bias twice": ("F-GPTOSS", 2, on(0, f"{MLP}.experts.down_proj_bias", times(2)), f"{MLP}.experts"),
    "sinks of another rank": ("F-GPTOSS", 2, copy(0, 1, f"{ATTENTION}.sinks"), f"{ATTENTION}.o_proj"),
    "latent projection on one rank": (
        "F-DSV3",
        4,
        on(2, f"{ATTENTION}.kv_a_proj_with_mqa.weight", flip_lowest_bit(3, 5)),
        f"{ATTENTION}.kv_a_proj_with_mqa",
    ),
    "shared expert": (
        "F-DSV3",
        4,
        on(2, f"{MLP}.shared_experts.up_proj.weight", row(0, 1.01)),
        f"{MLP}.shared_experts.down_proj",
    ),
    "decay of a state-space head": (
        "F-MAMBA2",
        4,
        on(2, "backbone.layers.1.mixer.A_log", times(1.01)),
        "backbone.layers.1.mixer.norm",
    ),
    "convolution": (
        "F-MAMBA2",
        2,
        on(1, "backbone.layers.1.mixer.conv1d.weight", row(3, 1.5)),
        "backbone.layers.1.mixer.norm",
    ),
    "gated norm over all heads": (
        "F-MAMBA2",
        4,
        on(2, "backbone.layers.1.mixer.norm.weight", times(1.01)),
        "backbone.layers.1.mixer.out_proj",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_where_it_is(fault: str, case: Case, tmp_path: Path) -> None:
    name, tp_size, damage, point = FAULTS[fault]
    shards = Sharded(case(name), tmp_path, tp_size)
    damage(shards)
    verdict = shards.verify()
    assert verdict.verdict == "failed"
    named = points(verdict)
    assert named[0] == point
    block = point.rpartition(".")[0]
    assert all(n == point or n.startswith(block) or n == "lm_head" for n in named), (
        named
    )  # a tied row is in both tables


def test_faults_do_not_hide_each_other(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-LLAMA6"), tmp_path, 3)
    shards.change(0, "model.layers.0.self_attn.v_proj.weight", lambda value: value * 2)
    shards.change(2, "model.layers.1.mlp.down_proj.weight", flip_lowest_bit(0, 0))
    assert points(shards.verify()) == ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]


def test_the_rank_of_a_replicated_fault_is_named(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-LLAMA6"), tmp_path, 4)
    shards.change(3, "model.layers.0.post_attention_layernorm.weight", lambda value: value * 1.5)
    failed = {(m.point, m.rank) for m in shards.verify().measures if m.status == "fail" and m.kind == "replicated"}
    assert failed == {("model.layers.0.post_attention_layernorm", 3)}


@pytest.mark.parametrize(
    ("edit", "point"),
    [
        ({"rms_norm_eps": 1e-5}, "model.layers.0.input_layernorm"),
        ({"rope_theta": 5e5}, "model.rotary_emb.inv_freq"),
        ({"hidden_act": "gelu"}, "model.layers.0.mlp.down_proj"),
        ({"num_hidden_layers": 1}, ""),
    ],
)
def test_an_edited_config_shows(edit: dict[str, Any], point: str, case: Case, tmp_path: Path) -> None:
    """The ranks are built from the shards' config, the reference from the source's."""
    shards = Sharded(case("F-LLAMA6"), tmp_path, 2)
    shards.configure(**edit)
    verdict = shards.verify()
    assert verdict.verdict == "failed"
    assert verdict.findings[0].tensor == point


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("olmo", "model.layers.1.mlp.down_proj.weight"),
        ("olmo2", "model.layers.0.self_attn.o_proj.weight"),
        ("olmo", "lm_head.weight"),
        ("mamba2", "backbone.layers.1.mixer.out_proj.weight"),
        ("qwen3_moe", "model.layers.1.self_attn.o_proj.weight"),
    ],
)
def test_the_last_bit_of_a_float32_weight_behind_a_cast(name: str, tensor: str, tmp_path: Path) -> None:
    """Where the model computes in float32 inside, the gate is still that of the noise that it shows."""
    tiny_models.build(name).to(torch.float32).save_pretrained(tmp_path / "model")
    shards = Sharded(tmp_path / "model", tmp_path, 2)
    largest = int(shards.get(1, tensor).abs().argmax())
    at = divmod(largest, shards.get(1, tensor).shape[1])
    shards.change(1, tensor, flip_lowest_bit(*at))
    verdict = shards.verify()
    assert verdict.verdict == "failed"
    assert points(verdict)[0] == tensor.removesuffix(".weight")
    failed = [m for m in verdict.measures if m.status == "fail" and m.gate]
    assert all(m.gate < 1e-10 and m.error < 1e-7 for m in failed)


@pytest.mark.parametrize("damaged", [False, True])
def test_float32_kernels_on_local_shapes_are_told_from_a_last_bit(damaged: bool, tmp_path: Path) -> None:
    """deepseek_v2 turns its heads in float32, whose last place depends on the number of heads: zero-padding decides."""
    tiny_models.build("deepseek_v2").to(torch.float32).save_pretrained(tmp_path / "model")
    shards = Sharded(tmp_path / "model", tmp_path, 3)
    tensor = "model.layers.1.self_attn.o_proj.weight"
    if damaged:
        largest = int(shards.get(1, tensor).abs().argmax())
        shards.change(1, tensor, flip_lowest_bit(*divmod(largest, shards.get(1, tensor).shape[1])))
    verdict = shards.verify(mode="auto")
    assert verdict.verdict == ("failed" if damaged else "passed"), [finding.message for finding in verdict.findings]
    assert points(verdict) == ([tensor.removesuffix(".weight")] if damaged else [])
    assert "zero-padded as well" in verdict.notes[-1]


@pytest.mark.parametrize("edit", [{"num_attention_heads": 3}, {"vocab_size": 95}, {"num_hidden_layers": 3}])
def test_a_config_that_does_not_fit_the_tensors_is_refused(edit: dict[str, Any], case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-LLAMA6"), tmp_path, 2)
    shards.configure(**edit)
    with pytest.raises(DamagedError, match="not of one model"):
        shards.verify()


def test_a_rank_that_cannot_run_is_a_finding(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-Q3MOE"), tmp_path, 2)
    shards.configure(num_experts_per_tok=99)
    verdict = shards.verify()
    assert verdict.verdict == "failed"
    assert "rank 0 fails after model.layers.0.post_attention_layernorm" in verdict.findings[0].message
