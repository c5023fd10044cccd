"""The cases of public reports about cutting, H01 to H16, by the letter: row ranges, refusals, exact merges.

Row and column ranges are inclusive and count from 0.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import ok, refused
from conftest import Case
from cuts import change_config, cut
from weights import ranks, read_all, tensor, tree, write

LAYER = "model.layers.0"


@pytest.mark.parametrize("tp_size", [3, 4])
def test_h01_even_is_refused_with_the_degrees_that_are(tp_size: int, case: Case, tmp_path: Path) -> None:
    refused(
        3, "split", case("F-LLAMA6"), tmp_path / "out", "--tp", tp_size, "--even", says=(6, 2, tp_size, "1, 2, 6")
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tp_size", [3, 4, 5])
def test_h01_unequal_ranks_hold_the_kv_heads_of_their_query_heads(tp_size: int, case: Case, tmp_path: Path) -> None:
    found = cut(case("F-LLAMA6"), tmp_path, tp_size)
    assert "unequal" in found.said
    assert "1, 2, 6" in found.said
    q, k, v, o = (f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo")
    heads: list[set[int]] = [set() for _ in range(tp_size)]
    for rank, tensors in enumerate(found.ranks):
        rows = [row.tobytes() for row in found.source[q].array]
        mine = [rows.index(row.tobytes()) for row in tensors[q].array]
        heads[rank] = {row // 8 for row in mine}
        assert mine == [8 * head + row for head in sorted(heads[rank]) for row in range(8)]
        groups = {head // 3 for head in heads[rank]}
        assert len(groups) == 1 or {3 * group + n for group in groups for n in range(3)} == heads[rank]
        kv_rows = [8 * group + row for group in sorted(groups) for row in range(8)]
        for name in (k, v):
            assert np.array_equal(tensors[name].array, found.source[name].array[kv_rows])
        assert np.array_equal(tensors[o].array, found.source[o].array[:, mine])
    assert [head for held in heads for head in sorted(held)] == list(range(6))


@pytest.mark.parametrize(("tp_size", "status"), [(7, 3), (0, 2), (-1, 2), (64, 3), (10**9, 3)])
def test_h01_impossible_degrees(tp_size: int, status: int, case: Case, tmp_path: Path) -> None:
    refused(status, "split", case("F-LLAMA6"), tmp_path / "out", "--tp", tp_size, says=(tp_size,))
    assert not list(tmp_path.iterdir())


def test_h01_six_ranks_are_equal(case: Case, tmp_path: Path) -> None:
    found = cut(case("F-LLAMA6"), tmp_path, 6, "--even")
    assert "unequal" not in found.said
    for part in "kv":
        found.holds(f"{LAYER}.self_attn.{part}_proj.weight", *["0-7"] * 3, *["8-15"] * 3)


def test_h02_more_ranks_than_kv_heads(case: Case, tmp_path: Path) -> None:
    source = case("F-LLAMA8")
    found = cut(source, tmp_path, 8)
    eighths = [f"{8 * rank}-{8 * rank + 7}" for rank in range(8)]
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn"
        found.holds(f"{at}.q_proj.weight", *eighths)
        found.holds(f"{at}.o_proj.weight", *eighths, axis=1)
        for part in "kv":
            found.holds(f"{at}.{part}_proj.weight", *["0-7"] * 4, *["8-15"] * 4)
    merged = read_all(tmp_path / "merged8")
    assert len(merged) == 21
    assert merged[f"{LAYER}.self_attn.k_proj.weight"].shape == (16, 64)
    ok("reshard", found.directory, tmp_path / "two", "--tp", 2)
    ok("split", source, tmp_path / "direct", "--tp", 2)
    assert tree(tmp_path / "two") == tree(tmp_path / "direct")
    ok("reshard", tmp_path / "two", tmp_path / "eight", "--tp", 8)
    assert tree(tmp_path / "eight") == tree(found.directory)


def test_h03_head_size_that_is_not_hidden_by_heads(case: Case, tmp_path: Path) -> None:
    two = cut(case("F-HD16"), tmp_path, 2)
    shapes = {part: two.ranks[0][f"{LAYER}.self_attn.{part}_proj.weight"].shape for part in "qko"}
    assert shapes == {"q": (32, 40), "k": (16, 40), "o": (40, 32)}
    four = cut(case("F-HD16"), tmp_path, 4)
    assert four.ranks[3][f"{LAYER}.self_attn.q_proj.weight"].shape == (16, 40)
    four.holds(f"{LAYER}.self_attn.k_proj.weight", "0-15", "0-15", "16-31", "16-31")
    four.holds(f"{LAYER}.self_attn.o_proj.weight", "0-15", "16-31", "32-47", "48-63", axis=1)


def test_h03_config_without_the_head_size_contradicts_the_file(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-HD16")
    change_config(source, head_dim=None)
    refused(4, "split", source, tmp_path / "out", "--tp", 2, says=("q_proj", 64, 40))


def test_h04_padded_vocabulary(case: Case, tmp_path: Path) -> None:
    four = cut(case("F-V101"), tmp_path, 4)
    assert four.report["padding"] == ["3 padded vocabulary rows"]
    names = "model.embed_tokens.weight", "lm_head.weight"
    for name in names:
        for rank in range(3):
            assert np.array_equal(four.ranks[rank][name].array, four.source[name].array[26 * rank : 26 * rank + 26])
        last = four.ranks[3][name].array
        assert last.shape == (26, 32)
        assert np.array_equal(last[:23], four.source[name].array[78:])
        assert not last[23:].any()
    merged = read_all(tmp_path / "merged4")
    assert all(merged[name].shape == (101, 32) for name in names)
    assert json.loads((tmp_path / "merged4" / "config.json").read_text())["vocab_size"] == 101
    ok("reshard", four.directory, tmp_path / "resharded", "--tp", 2)
    two = cut(case("F-V101"), tmp_path, 2)
    assert tree(tmp_path / "resharded") == tree(two.directory)
    assert two.ranks[1]["lm_head.weight"].shape == (51, 32)
    assert not two.ranks[1]["lm_head.weight"].array[50:].any()
    assert two.report["padding"] == ["1 padded vocabulary row"]


def test_h05_tied_without_a_head_on_disk(case: Case, tmp_path: Path) -> None:
    found = cut(case("F-TIED"), tmp_path, 2)
    found.holds("model.embed_tokens.weight", "0-47", "48-95")
    assert found.report["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    merged = read_all(tmp_path / "merged2")
    assert len(merged) == 11
    assert "lm_head.weight" not in merged
    assert json.loads((tmp_path / "merged2" / "config.json").read_text())["tie_word_embeddings"] is True


def test_h05_tied_with_an_equal_head_on_disk(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-TIED")
    tensors = read_all(source)
    write(source / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    found = cut(source, tmp_path, 2)
    assert len(found.ranks[0]) == 12
    found.holds("lm_head.weight", "0-47", "48-95")


def test_h06_flag_says_tied_and_the_file_says_otherwise(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-LLAMA8")
    change_config(source, tie_word_embeddings=True)
    found = cut(source, tmp_path, 2)
    (warning,) = [line for line in found.said.splitlines() if line.startswith("note: ")]
    assert all(word in warning for word in ("tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight"))
    found.holds("lm_head.weight", "0-47", "48-95")
    assert len(read_all(tmp_path / "merged2")) == 21


def test_h07_fused_per_head(case: Case, tmp_path: Path) -> None:
    found = cut(case("F-NEOX"), tmp_path, 2)
    for layer in range(2):
        at = f"gpt_neox.layers.{layer}.attention"
        found.holds(f"{at}.query_key_value.weight", "0-47", "48-95")
        found.holds(f"{at}.query_key_value.bias", "0-47", "48-95")
        found.holds(f"{at}.dense.weight", "0-15", "16-31", axis=1)


def test_h07_exchanged_rows_are_not_merged(case: Case, tmp_path: Path) -> None:
    ok("split", case("F-NEOX"), tmp_path / "out", "--tp", 2)
    files = sorted((tmp_path / "out").glob("model-tp-*"))
    one, two = ranks(tmp_path / "out")
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    first, second = one[name].data, two[name].data
    for path, old, new in zip(files, (first, second), (second, first), strict=True):
        raw = path.read_bytes()
        assert raw.count(old) == 1
        path.write_bytes(raw.replace(old, new))
    refused(4, "merge", tmp_path / "out", tmp_path / "merged", says=(name, "xxh3_128"))
    assert not (tmp_path / "merged").exists()


FALCON = "transformer.h.0.self_attention.query_key_value.weight"


def test_h08_fused_per_group(case: Case, tmp_path: Path) -> None:
    cut(case("F-FALCON"), tmp_path, 2).holds(FALCON, "0-47", "48-95")
    four = cut(case("F-FALCON"), tmp_path, 4)
    four.holds(FALCON, "0-15 32-47", "16-31 32-47", "48-63 80-95", "64-79 80-95")
    assert [tensors[FALCON].shape for tensors in four.ranks] == [(32, 64)] * 4
    assert read_all(tmp_path / "merged4")[FALCON].shape == (96, 64)
    eight = cut(case("F-FALCON"), tmp_path, 8)
    assert [tensors[FALCON].shape for tensors in eight.ranks] == [(24, 64)] * 8


def test_h08_older_name_of_the_kv_heads(doctored: Case, case: Case, tmp_path: Path) -> None:
    source = doctored("F-FALCON")
    change_config(source, num_kv_heads=None, n_head_kv=2)
    old = cut(source, tmp_path, 8)
    ok("split", case("F-FALCON"), tmp_path / "new", "--tp", 8)
    assert ranks(tmp_path / "new") == old.ranks


def test_h09_stored_input_by_output(case: Case, tmp_path: Path) -> None:
    two = cut(case("F-GPT2"), tmp_path, 2)
    at = "transformer.h.0"
    fused = "0-15 32-47 64-79", "16-31 48-63 80-95"
    two.holds(f"{at}.attn.c_attn.weight", *fused, axis=1)
    two.holds(f"{at}.attn.c_attn.bias", *fused)
    two.holds(f"{at}.attn.c_proj.weight", "0-15", "16-31", axis=0)
    two.holds(f"{at}.mlp.c_fc.weight", "0-63", "64-127", axis=1)
    two.holds(f"{at}.mlp.c_proj.weight", "0-63", "64-127", axis=0)
    two.whole("transformer.wpe.weight", f"{at}.ln_1.weight", f"{at}.ln_1.bias", "transformer.ln_f.weight")
    cut(case("F-GPT2"), tmp_path, 4)


def test_h10_fused_blocks(case: Case, tmp_path: Path) -> None:
    two = cut(case("F-PHI3"), tmp_path, 2)
    two.holds(f"{LAYER}.self_attn.qkv_proj.weight", "0-15 32-39 48-55", "16-31 40-47 56-63")
    two.holds(f"{LAYER}.mlp.gate_up_proj.weight", "0-31 64-95", "32-63 96-127")
    cut(case("F-PHI3"), tmp_path, 4).holds(
        f"{LAYER}.self_attn.qkv_proj.weight",
        "0-7 32-39 48-55", "8-15 32-39 48-55", "16-23 40-47 56-63", "24-31 40-47 56-63",
    )  # fmt: skip


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    ("name", "biases", "positions"),
    [
        (
            "F-OPT",
            ("model.decoder.layers.#.self_attn.out_proj.bias", "model.decoder.layers.#.fc2.bias"),
            ("model.decoder.embed_positions.weight", (66, 32)),
        ),
        (
            "F-GPT2",
            ("transformer.h.#.attn.c_proj.bias", "transformer.h.#.mlp.c_proj.bias"),
            ("transformer.wpe.weight", (64, 32)),
        ),
    ],
)
def test_h11_row_parallel_bias_counts_once(
    name: str, biases: tuple[str, ...], positions: tuple[str, tuple[int, ...]], tp_size: int, case: Case, tmp_path: Path
) -> None:
    found = cut(case(name), tmp_path, tp_size)
    assert sorted(found.report["added_once"]) == sorted(biases)
    manifest = json.loads((found.directory / "tpshard.json").read_text())
    notes = {entry["pattern"]: entry["note"] for entry in manifest["tensors"]}
    for bias in biases:
        assert "added once" in notes[bias]
        found.whole(bias.replace("#", "1"))
    found.whole(positions[0])
    assert found.ranks[0][positions[0]].shape == positions[1]


def test_h12_latent_attention_and_experts(case: Case, tmp_path: Path) -> None:
    found = cut(case("F-DSV3"), tmp_path, 2)
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    found.whole(
        f"{attention}.q_a_proj.weight", f"{attention}.q_a_layernorm.weight", f"{attention}.kv_a_layernorm.weight",
        f"{attention}.kv_a_proj_with_mqa.weight", f"{mlp}.gate.weight", f"{mlp}.gate.e_score_correction_bias",
    )  # fmt: skip
    assert found.source[f"{mlp}.gate.weight"].shape == (12, 32)
    found.holds(f"{attention}.q_b_proj.weight", "0-23", "24-47")
    found.holds(f"{attention}.kv_b_proj.weight", "0-31", "32-63")
    found.holds(f"{attention}.o_proj.weight", "0-15", "16-31", axis=1)
    for expert in [f"experts.{number}" for number in range(12)] + ["shared_experts"]:
        for part in ("gate", "up"):
            found.holds(f"{mlp}.{expert}.{part}_proj.weight", "0-7", "8-15")
        found.holds(f"{mlp}.{expert}.down_proj.weight", "0-7", "8-15", axis=1)
    assert len(read_all(tmp_path / "merged2")) == 65


@pytest.mark.parametrize("tp_size", [2, 4])
def test_h13_norm_across_heads(tp_size: int, case: Case, tmp_path: Path) -> None:
    found = cut(case("F-OLMO2"), tmp_path, tp_size)
    each = 32 // tp_size
    held = [f"{each * rank}-{each * rank + each - 1}" for rank in range(tp_size)]
    for part in "qk":
        found.holds(f"{LAYER}.self_attn.{part}_norm.weight", *held)
        found.holds(f"{LAYER}.self_attn.{part}_proj.weight", *held)
    assert sorted(found.report["needs_sum"]) == [f"model.layers.#.self_attn.{part}_norm.weight" for part in "kq"]
    found.whole("model.norm.weight", f"{LAYER}.post_attention_layernorm.weight")
    found.whole("model.layers.1.post_feedforward_layernorm.weight")


def test_h14_separate_experts(case: Case, tmp_path: Path) -> None:
    found = cut(case("F-Q3MOE"), tmp_path, 2)
    for number in range(12):
        at = f"{LAYER}.mlp.experts.{number}"
        found.holds(f"{at}.gate_proj.weight", "0-7", "8-15")
        found.holds(f"{at}.up_proj.weight", "0-7", "8-15")
        found.holds(f"{at}.down_proj.weight", "0-7", "8-15", axis=1)
    assert found.ranks[0][f"{at}.gate_proj.weight"].shape == (8, 32)
    assert found.ranks[0][f"{at}.down_proj.weight"].shape == (32, 8)
    assert len(read_all(tmp_path / "merged2")) == 93


def test_h14_stacked_experts(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-Q3MOE")
    tensors = read_all(source)
    dtype = tensors["lm_head.weight"].dtype
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        own = [
            {part: tensors.pop(f"{at}.{number}.{part}_proj.weight").array for part in ("gate", "up", "down")}
            for number in range(12)
        ]
        tensors[f"{at}.gate_up_proj"] = tensor(np.stack([np.concatenate([e["gate"], e["up"]]) for e in own]), dtype)
        tensors[f"{at}.down_proj"] = tensor(np.stack([e["down"] for e in own]), dtype)
    write(source / "model.safetensors", tensors)
    found = cut(source, tmp_path, 2)
    assert found.source[f"{LAYER}.mlp.experts.gate_up_proj"].shape == (12, 32, 32)
    found.holds(f"{LAYER}.mlp.experts.gate_up_proj", "0-7 16-23", "8-15 24-31", axis=1)
    found.holds(f"{LAYER}.mlp.experts.down_proj", "0-7", "8-15", axis=2)
    assert found.ranks[0][f"{LAYER}.mlp.experts.down_proj"].shape == (12, 32, 8)


def test_h15_sinks_and_alternating_gate_up(case: Case, tmp_path: Path) -> None:
    found = cut(case("F-GPTOSS"), tmp_path, 2)
    at = f"{LAYER}.mlp.experts"
    found.holds(f"{LAYER}.self_attn.sinks", "0-1", "2-3")
    found.holds(f"{at}.gate_up_proj", "0-31", "32-63", axis=2)
    found.holds(f"{at}.gate_up_proj_bias", "0-31", "32-63", axis=1)
    found.holds(f"{at}.down_proj", "0-15", "16-31", axis=1)
    found.whole(f"{at}.down_proj_bias", f"{LAYER}.self_attn.o_proj.bias")
    assert set(found.report["added_once"]) == {
        "model.layers.#.mlp.experts.down_proj_bias", "model.layers.#.self_attn.o_proj.bias"
    }  # fmt: skip
    found.whole(f"{LAYER}.mlp.router.weight", f"{LAYER}.mlp.router.bias")


def test_h16_state_space_layer(case: Case, tmp_path: Path) -> None:
    two = cut(case("F-MAMBA2"), tmp_path, 2)
    at = "backbone.layers.0.mixer"
    two.holds(
        f"{at}.in_proj.weight", "0-31 64-95 128-135 144-151 160-163", "32-63 96-127 136-143 152-159 164-167"
    )
    assert two.ranks[0][f"{at}.in_proj.weight"].shape == (84, 32)
    for part in ("weight", "bias"):
        two.holds(f"{at}.conv1d.{part}", "0-31 64-71 80-87", "32-63 72-79 88-95")
    for part in ("A_log", "D", "dt_bias"):
        two.holds(f"{at}.{part}", "0-3", "4-7")
    two.holds(f"{at}.norm.weight", "0-31", "32-63")
    assert two.report["needs_sum"] == ["backbone.layers.#.mixer.norm.weight"]
    two.holds(f"{at}.out_proj.weight", "0-31", "32-63", axis=1)
    four = cut(case("F-MAMBA2"), tmp_path, 4)
    four.holds(
        f"{at}.in_proj.weight",
        "0-15 64-79 128-135 144-151 160-161",
        "16-31 80-95 128-135 144-151 162-163",
        "32-47 96-111 136-143 152-159 164-165",
        "48-63 112-127 136-143 152-159 166-167",
    )


def test_a_split_with_a_wrong_shape_says_both_numbers(doctored: Case, tmp_path: Path) -> None:
    """What H03 asks of the head size holds for every size that the config tells."""
    for key, value, words in (
        ("intermediate_size", 95, ("gate_proj", 96, 95)),
        ("vocab_size", 97, ("embed_tokens", 96, 97)),
        ("num_hidden_layers", 3, ("model.layers.2",)),
        ("num_hidden_layers", 1, ("model.layers.1",)),
    ):
        source = doctored("F-LLAMA6")
        change_config(source, **{key: value})
        refused(4, "split", source, tmp_path / "out", "--tp", 2, says=words)
        shutil.rmtree(source)
