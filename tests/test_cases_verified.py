"""The cases of public reports, H01 to H16 and H23 to H25, verified: the ranks run as a model, and faults named.

``VERIFY-OK`` asks for logits that differ by at most 1e-4; here every block must agree in fp64 as well.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from commands import Done, tpshard  # noqa: E402
from conftest import Case  # noqa: E402
from cuts import change_config  # noqa: E402
from damaged import Sharded  # noqa: E402
from weights import read_all, tensor, write  # noqa: E402

from tpshard import split  # noqa: E402
from tpshard.manifest import dumped  # noqa: E402
from tpshard.manifestreader import parsed  # noqa: E402

LOGITS = 1e-4  # the largest difference that VERIFY-OK allows


def forward(source: Path, shards: Path) -> tuple[Done, dict[str, Any]]:
    """``tpshard verify SRC OUT --level forward``, and what it says of that level."""
    done = tpshard("verify", source, shards, "--level", "forward", "--json")
    (verdict,) = [v for v in json.loads(done.out)["verdicts"] if v["level"] == "forward"]
    return done, verdict


def agrees(source: Path, directory: Path, tp_size: int) -> dict[str, Any]:
    """VERIFY-OK at this degree; returns the verdict."""
    shards = directory / f"verified-{source.name}-{tp_size}"
    split(source, shards, tp_size)
    return agree(source, shards)


def agree(source: Path, shards: Path) -> dict[str, Any]:
    done, verdict = forward(source, shards)
    assert done.status == 0, verdict
    assert verdict["verdict"] == "passed"
    assert verdict["logits"]["max_abs"] <= LOGITS
    assert verdict["coverage"] == 1.0
    return verdict


def disagrees(shards: Sharded, *layers: int) -> list[str]:
    """VERIFY-FAIL, the first bad layer named; returns the points, those of the logits left out."""
    done, verdict = forward(shards.source, shards.root)
    assert done.status == 1
    assert verdict["verdict"] == "failed"
    named: list[str] = [finding["tensor"] for finding in verdict["findings"] if finding["tensor"] != "logits"]
    assert named
    assert {int(part) for point in named for part in point.split(".") if part.isdigit()} == set(layers)
    assert f".{layers[0]}." in tpshard("verify", shards.source, shards.root, "--level", "forward").out
    return named


OK = [
    ("F-LLAMA6", (3, 4, 5, 6)),  # H01
    ("F-LLAMA8", (8,)),  # H02
    ("F-HD16", (2, 4)),  # H03
    ("F-V101", (4, 2)),  # H04
    ("F-TIED", (2,)),  # H05
    ("F-NEOX", (2,)),  # H07
    ("F-FALCON", (2, 4, 8)),  # H08
    ("F-GPT2", (2, 4)),  # H09, H11
    ("F-PHI3", (2, 4)),  # H10
    ("F-OPT", (2, 4)),  # H11
    ("F-DSV3", (2,)),  # H12
    ("F-OLMO2", (2, 4)),  # H13
    ("F-Q3MOE", (2,)),  # H14
    ("F-GPTOSS", (2,)),  # H15
    ("F-MAMBA2", (2, 4)),  # H16
]


@pytest.mark.parametrize(("name", "tp_size"), [(name, degree) for name, degrees in OK for degree in degrees])
def test_h01_to_h16_the_ranks_agree_with_the_model(name: str, tp_size: int, case: Case, tmp_path: Path) -> None:
    agrees(case(name), tmp_path, tp_size)


def test_h02_h04_resharded_ranks_agree_as_well(case: Case, tmp_path: Path) -> None:
    for name, chain in (("F-LLAMA8", (8, 2)), ("F-V101", (4, 2))):
        split(case(name), tmp_path / f"{name}{chain[0]}", chain[0])
        out = tmp_path / f"{name}{chain[1]}"
        assert tpshard("reshard", tmp_path / f"{name}{chain[0]}", out, "--tp", chain[1]).status == 0
        agree(case(name), out)


def test_h02_the_other_kv_head(case: Case, tmp_path: Path) -> None:
    """KV head ``rank % 2`` instead of ``rank // 4``: the shapes are right."""
    shards = Sharded(case("F-LLAMA8"), tmp_path, 8)
    for name in [f"model.layers.0.self_attn.{part}_proj.weight" for part in "kv"]:
        heads = [shards.get(0, name), shards.get(4, name)]
        for rank in range(8):
            shards.put(rank, name, heads[rank % 2])
    assert all("self_attn" in point for point in disagrees(shards, 0))


def test_h04_no_padding_row_wins_where_all_logits_are_negative(doctored: Case, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = doctored("F-V101")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(torch.tensor([[1, 5, 9, 2, 7, 11]])).last_hidden_state[0, 0]
    tensors = read_all(source)
    for number, scales in enumerate((np.ones(101), 1 + np.arange(101) / 100)):  # all rows alike; each its own
        rows = (-scales[:, None] * hidden.numpy()).astype("<f4")
        write(source / "model.safetensors", tensors | {"lm_head.weight": tensor(rows.view("<u4"), "F32")})
        (tmp_path / str(number)).mkdir()
        logits = agrees(source, tmp_path / str(number), 4)["logits"]
    assert logits["top1"] == 1.0  # of equal logits any may be the largest; of different ones one is


def test_h05_a_tied_head_that_is_stored(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-TIED")
    tensors = read_all(source)
    write(source / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    agrees(source, tmp_path, 2)


def test_h06_the_stored_head_is_used(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-LLAMA8")
    change_config(source, tie_word_embeddings=True)
    agrees(source, tmp_path, 2)
    shards = Sharded(source, tmp_path, 2)
    shards.change(1, "lm_head.weight", lambda value: value * 1.01)
    done, verdict = forward(source, shards.root)
    assert done.status == 1
    assert "lm_head" in [finding["tensor"] for finding in verdict["findings"]]


QKV = "gpt_neox.layers.0.attention.query_key_value.weight"


def test_h07_exchanged_rows_are_named(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-NEOX"), tmp_path, 2)
    one, two = shards.get(0, QKV), shards.get(1, QKV)
    shards.put(0, QKV, two)
    shards.put(1, QKV, one)
    assert all(point.startswith("gpt_neox.layers.0.attention") for point in disagrees(shards, 0))


def test_h07_fused_rows_read_as_three_blocks(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-NEOX"), tmp_path, 2)
    whole = torch.cat([shards.get(rank, QKV) for rank in range(2)])
    for rank in range(2):
        shards.put(rank, QKV, torch.cat([part.chunk(2)[rank] for part in whole.chunk(3)]))
    disagrees(shards, 0)


def test_h08_the_older_name_of_the_kv_heads(doctored: Case, tmp_path: Path) -> None:
    """transformers knows ``num_kv_heads`` alone: what the ranks are held against must be the model that is meant."""
    source = doctored("F-FALCON")
    heads = json.loads((source / "config.json").read_text())["num_kv_heads"]
    change_config(source, n_head_kv=heads)
    agrees(source, tmp_path, 4)


BIASES = [
    ("F-OPT", "model.decoder.layers.0.self_attn.out_proj.bias"),
    ("F-OPT", "model.decoder.layers.0.fc2.bias"),
    ("F-GPT2", "transformer.h.0.attn.c_proj.bias"),
    ("F-GPT2", "transformer.h.0.mlp.c_proj.bias"),
    ("F-GPTOSS", "model.layers.0.self_attn.o_proj.bias"),  # H15
    ("F-GPTOSS", "model.layers.0.mlp.experts.down_proj_bias"),
]


@pytest.mark.parametrize(("name", "bias"), BIASES)
@pytest.mark.parametrize("ranks", [(0, 1), (1,), (0,)])
def test_h11_h15_a_bias_counted_twice(name: str, bias: str, ranks: tuple[int, ...], case: Case, tmp_path: Path) -> None:
    shards = Sharded(case(name), tmp_path, 2)
    for rank in ranks:
        shards.change(rank, bias, lambda value: value * 2)
    disagrees(shards, 0)


def test_h13_the_norms_over_all_heads_are_summed_over_ranks(case: Case, tmp_path: Path) -> None:
    verdict = agrees(case("F-OLMO2"), tmp_path, 2)
    assert verdict["collectives"]["norm_all_reduce"] == 4  # of queries and keys, in two layers
    shards = Sharded(case("F-OLMO2"), tmp_path, 2)
    path = shards.root / "tpshard.json"
    manifest = parsed(path.read_bytes(), str(path))
    alone = {
        name: replace(note, text="") if name.startswith("model.layers.0") else note
        for name, note in manifest.notes.items()
    }
    path.write_bytes(dumped(replace(manifest, notes=alone)))  # as if a rank could norm its own heads by themselves
    assert all("self_attn" in point for point in disagrees(shards, 0))


def stacked(source: Path) -> None:
    """The experts of every layer in one tensor each, in the order of their numbers."""
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


def test_h14_stacked_experts_are_the_model_of_the_separate_ones(doctored: Case, case: Case, tmp_path: Path) -> None:
    source = doctored("F-Q3MOE")
    stacked(source)
    together, apart = agrees(source, tmp_path, 2), agrees(case("F-Q3MOE"), tmp_path, 2)
    assert {m["point"] for m in together["measures"]} == {m["point"] for m in apart["measures"]}


def test_h14_experts_in_text_order(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-Q3MOE")
    stacked(source)
    shards = Sharded(source, tmp_path, 2)
    order = sorted(range(12), key=str)
    for part in ("gate_up_proj", "down_proj"):
        for rank in range(2):
            shards.change(rank, f"model.layers.0.mlp.experts.{part}", lambda value: value[order])
    assert all("mlp" in point for point in disagrees(shards, 0))


def test_h15_the_same_sinks_on_both_ranks(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-GPTOSS"), tmp_path, 2)
    name = "model.layers.0.self_attn.sinks"
    shards.put(1, name, shards.get(0, name))
    assert all("self_attn" in point for point in disagrees(shards, 0))


def test_h15_gate_and_up_read_as_halves(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-GPTOSS"), tmp_path, 2)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = torch.cat([shards.get(rank, name) for rank in range(2)], -1)
    for rank in range(2):
        shards.put(rank, name, torch.cat([half.chunk(2, -1)[rank] for half in whole.chunk(2, -1)], -1))
    assert all("mlp" in point for point in disagrees(shards, 0))


def test_h23_code_beside_the_weights_is_not_run(doctored: Case, tmp_path: Path) -> None:
    source, marker = tmp_path / "my modèle 模型 v1", tmp_path / "marker"
    doctored("F-LLAMA8").rename(source)
    for name, text in (("modeling_x.py", f"open({str(marker)!r}, 'w').close()\n"), ("configuration_x.py", "exit(9)\n")):
        (source / name).write_text(text)
    change_config(source, auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "configuration_x.X"})
    agrees(source, tmp_path, 2)
    assert not marker.exists()


def test_h24_nan_in_the_source_is_said(case: Case, tmp_path: Path) -> None:
    split(case("F-MIX"), tmp_path / "out", 2)
    done, verdict = forward(case("F-MIX"), tmp_path / "out")
    assert done.status == 4
    assert verdict["verdict"] == "source_nan"
    assert verdict["findings"] == []
    assert any("gate_proj" in note for note in verdict["notes"])
    assert "source nan" in tpshard("verify", case("F-MIX"), tmp_path / "out", "--level", "forward").out
    assert tpshard("verify", case("F-MIX"), tmp_path / "out").status == 0  # byte for byte it is the source


def test_h25_twelve_ranks_written_in_reverse_order(case: Case, tmp_path: Path) -> None:
    split(case("F-LLAMA12"), tmp_path / "out", 12)
    (tmp_path / "turned").mkdir()
    for path in sorted((tmp_path / "out").iterdir(), reverse=True):
        shutil.copy(path, tmp_path / "turned" / path.name)
    agree(case("F-LLAMA12"), tmp_path / "turned")
