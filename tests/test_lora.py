"""Adapters as files: names, configs, and everything about them that is refused; neither torch nor peft is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapterfiles import Shapes, pairs, write_adapter
from commands import ok, refused
from hypothesis import given
from hypothesis import strategies as st
from weights import CONFIG, ranks, read, tree

from tpshard import DamagedError, UnsupportedError, hub, inspect, merge, reshard, split, verify
from tpshard.adapterbase import Base
from tpshard.axes import Units, replicated
from tpshard.lora import piece_of
from tpshard.registry import table_for


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", pairs())


# --- names -----------------------------------------------------------------------------------------------------------

part = st.text("abcdefgh_0123456789", min_size=1, max_size=8).filter(lambda text: text not in ("weight", "bias"))
modules = st.lists(part.filter(lambda text: text != "base_layer"), min_size=1, max_size=5).map(".".join)


@given(module=modules, own=st.one_of(st.just(""), part), wrapped=st.booleans(), prefixed=st.booleans())
def test_names_are_read_as_peft_writes_them(module: str, own: str, wrapped: bool, prefixed: bool) -> None:
    start = ("base_model.model." if prefixed else "") + module + (".base_layer" if wrapped else "")
    named = f".{own}" if own else ""
    kinds = {
        f"{start}.lora_A{named}.weight": ("A", False),
        f"{start}.lora_B{named}.weight": ("B", False),
        f"{start}.lora_B{named}.bias": ("bias", False),
        f"{start}.lora_embedding_A{named}": ("A", True),
        f"{start}.lora_embedding_B{named}": ("B", True),
        f"{start}.lora_magnitude_vector{named}": ("magnitude", False),
        f"{start}.lora_magnitude_vector{named}.weight": ("magnitude", False),
        f"{start}.token_adapter.trainable_tokens_delta{named}": ("tokens", False),
    }
    found = {name: piece_of(name) for name in kinds}
    assert {name: (piece.kind, piece.embedding) for name, piece in found.items()} == kinds
    assert {piece.base for piece in found.values()} == {module}
    assert len({piece.pair for piece in found.values()}) == 1
    for saved in ("", ".modules_to_save", f".modules_to_save{named}"):
        assert piece_of(f"{start}{saved}.weight") == ("copy", f"{module}.weight", "", False)
    assert piece_of(f"{start}.lora_diag{named}").kind == ""


@pytest.mark.parametrize(
    ("prefix", "own"),
    [("base_model.model.", ""), ("", ""), ("model.", ""), ("base_model.model.model.", ".default")],
)
def test_spellings_of_names_make_no_difference_to_the_cut(prefix: str, own: str, llama: Path, tmp_path: Path) -> None:
    usual = write_adapter(tmp_path / "usual", pairs())
    other = write_adapter(tmp_path / "other", pairs(prefix=prefix, own=own))
    for path in (usual, other):
        split(path, tmp_path / f"{path.name}-3", 3, base=llama)
    for mine, theirs in zip(ranks(tmp_path / "other-3"), ranks(tmp_path / "usual-3"), strict=True):
        assert list(mine.values()) == list(theirs.values())


# --- bytes and files -------------------------------------------------------------------------------------------------


def test_side_files_are_carried_and_a_config_of_its_own_is_one(adapter: Path, llama: Path, tmp_path: Path) -> None:
    (adapter / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 12}))  # of whatever else
    (adapter / "training_args.bin").write_bytes(b"pickle")
    report = split(adapter, tmp_path / "8", 8, base=llama)
    assert report.left_out == ["training_args.bin (weights that are not in use)"]
    assert report.side_files == 3
    split(adapter, tmp_path / "3", 3, base=llama)
    reshard(tmp_path / "8", tmp_path / "8-3", 3)
    assert tree(tmp_path / "8-3") == tree(tmp_path / "3")
    assert verify(tmp_path / "3", against=adapter).passed
    assert merge(tmp_path / "3", tmp_path / "merged").identical_to_source is True
    assert tree(tmp_path / "merged") == tree(adapter, but=["training_args.bin"])


def test_a_changed_adapter_config_is_noticed(adapter: Path, llama: Path, tmp_path: Path) -> None:
    split(adapter, tmp_path / "two", 2, base=llama)
    (tmp_path / "two" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    refused(4, "merge", tmp_path / "two", tmp_path / "out", says=("adapter_config.json", "changed"))
    assert not verify(tmp_path / "two").passed


def test_kv_heads_are_copied_where_there_are_fewer_than_ranks(adapter: Path, llama: Path, tmp_path: Path) -> None:
    split(adapter, tmp_path / "eight", 8, base=llama)
    whole, parts = read(adapter / "adapter_model.safetensors"), ranks(tmp_path / "eight")
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"
    for rank, held in enumerate(parts):
        kv = rank // 2  # 8 query heads over 4 KV heads, of 4 rows each
        assert np.array_equal(held[name].array, whole[name].array[4 * kv : 4 * kv + 4])


def test_the_command_line(adapter: Path, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = ok("split", adapter, out, "--tp", 4, "--base", llama, "--verify", "digest", "--verify", "plan").out
    assert "llama adapter, 24 tensors" in told
    assert "llama adapter" in ok("inspect", out).out
    assert "llama adapter" in ok("inspect", adapter, "--base", llama).out
    assert "degrees: any from 1 to 8" in ok("inspect", adapter, "--base", llama).out
    ok("plan", adapter, "--tp", "2,4", "--base", llama)
    ok("reshard", out, tmp_path / "three", "--tp", 3)
    ok("verify", tmp_path / "three", "--against", adapter)
    ok("merge", tmp_path / "three", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(adapter)
    refused(3, "merge", out, tmp_path / "packed", "--max-file-size", "1MB", says=("adapter", "--max-file-size"))


def test_inspect_tells_an_adapter_from_a_model(adapter: Path, llama: Path) -> None:
    report = inspect(adapter)
    assert (report.kind, report.tensors, report.largest_degree) == ("adapter", 24, 0)
    assert "org/base" in report.warnings[0]
    assert "degrees" not in ok("inspect", adapter).out.replace("its degrees follow", "")
    assert inspect(adapter, base=llama).equal_degrees == inspect(llama).equal_degrees


def test_levels_that_run_a_model_are_not_passed_by_an_adapter(adapter: Path, llama: Path, tmp_path: Path) -> None:
    split(adapter, tmp_path / "two", 2, base=llama)
    report = verify(tmp_path / "two", against=adapter, levels=["structure", "forward", "twin"])
    assert (report.passed, report.status) == (False, 3)
    assert [verdict.verdict for verdict in report.verdicts] == ["passed", "unsupported", "unsupported"]
    assert "base model" in report.verdicts[1].notes[0]


def test_experts_apart_and_stacked(tmp_path: Path) -> None:
    """Both forms that a mixture's experts have, whichever the base's files have: here it has no files at all."""
    config = CONFIG | {"model_type": "mixtral", "num_local_experts": 3}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    apart = "base_model.model.model.layers.1.block_sparse_moe.experts"
    stacked = "base_model.model.model.layers.0.mlp.experts"
    shapes: Shapes = {
        f"{stacked}.base_layer.lora_A.weight": (12, 32),
        f"{stacked}.base_layer.lora_B.weight": (88, 12),
        f"{stacked}.lora_A.weight": (12, 44),
        f"{stacked}.lora_B.weight": (32, 12),
    }
    for expert in range(3):
        shapes |= {f"{apart}.{expert}.w1.lora_A.weight": (4, 32), f"{apart}.{expert}.w1.lora_B.weight": (44, 4)}
        shapes |= {f"{apart}.{expert}.w2.lora_A.weight": (4, 44), f"{apart}.{expert}.w2.lora_B.weight": (32, 4)}
    banks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = write_adapter(tmp_path / "adapter", shapes, target_parameters=banks)
    split(adapter, tmp_path / "out", 4, base=tmp_path / "base")
    held = {name: stored.shape for name, stored in ranks(tmp_path / "out")[0].items()}
    assert held[f"{stacked}.base_layer.lora_A.weight"] == (12, 32)
    assert held[f"{stacked}.base_layer.lora_B.weight"] == (22, 12)
    assert held[f"{stacked}.lora_A.weight"] == (12, 11)
    assert held[f"{apart}.2.w1.lora_B.weight"] == (11, 4)
    assert held[f"{apart}.2.w2.lora_A.weight"] == (4, 11)
    assert verify(tmp_path / "out", against=adapter).passed
    beyond = {name.replace("experts.2", "experts.3"): shape for name, shape in shapes.items()}
    with pytest.raises(UnsupportedError, match=r"experts\.3\.w1"):
        split(write_adapter(tmp_path / "beyond", beyond, target_parameters=banks), tmp_path / "x", 2,
              base=tmp_path / "base")  # fmt: skip
    with pytest.raises(DamagedError, match=r"12 rows .* for 3 experts, .* rank 5"):
        split(write_adapter(tmp_path / "rank", shapes, target_parameters=banks, r=5), tmp_path / "x", 2,
              base=tmp_path / "base")  # fmt: skip


def test_an_adapter_goes_by_the_steps_of_a_quantised_base() -> None:
    """The matrices of such a base are stored as other tensors, whose groups make larger steps of the axis."""
    down = "model.layers.0.mlp.down_proj"
    stepped = Units("ffn", 44, step=11, noun="feed-forward channels")
    stored = {f"{down}.qweight": (stepped.each(), replicated(32))}
    base = Base("base", "llama", table_for(CONFIG), stored, quantised=True)
    found = base.targets([f"{down}.weight", "model.layers.1.mlp.up_proj.weight"])
    assert [[dim.axes for dim in target.dims if dim] for target in found.values()] == [
        [(), (stepped,)],
        [(stepped,), ()],
    ]


# --- what is refused -------------------------------------------------------------------------------------------------

Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[type[Exception], Callable[[Shapes], object], dict[str, Any], tuple[str, ...]]] = {
    "no second half": (DamagedError, lambda s: s.pop(f"{Q}.lora_B.weight"), {}, ("lacks its lora_B", Q)),
    "no first half": (DamagedError, lambda s: s.pop(f"{Q}.lora_A.weight"), {}, ("lacks its lora_A", Q)),
    "two ranks in a pair": (
        DamagedError, lambda s: s.update({f"{Q}.lora_B.weight": (32, 5)}), {}, ("rank 4", "rank 5"),
    ),
    "another rank than the config's": (DamagedError, lambda s: None, {"r": 8}, ("4 rows", "rank 8")),
    "another base, by its outputs": (
        DamagedError, lambda s: s.update({f"{Q}.lora_B.weight": (40, 4)}), {}, ("40 outputs", "[32, 32]", "org/base"),
    ),
    "another base, by its inputs": (
        DamagedError, lambda s: s.update({f"{Q}.lora_A.weight": (4, 64)}), {}, ("64 inputs", "[32, 32]"),
    ),
    "inputs and outputs exchanged": (
        DamagedError,
        lambda s: s.update(
            {f"{Q[:-16]}mlp.up_proj.lora_A.weight": (4, 44), f"{Q[:-16]}mlp.up_proj.lora_B.weight": (32, 4)}
        ),
        {}, ("44 inputs", "[44, 32]"),
    ),
    "a layer too many": (
        UnsupportedError, lambda s: s.update(pairs(layers=3)), {}, ("layers.2.self_attn", "--copy-unknown"),
    ),
    "a module that the base has not": (
        UnsupportedError, lambda s: s.update({"base_model.model.score.weight": (2, 32)}), {}, ("score.weight",),
    ),
    "a tensor of another variant": (
        UnsupportedError, lambda s: s.update({f"{Q}.lora_diag": (4,)}), {}, (f"{Q}.lora_diag",),
    ),
    "a convolution": (
        UnsupportedError,
        lambda s: s.update({f"{Q}.lora_A.weight": (4, 32, 3), f"{Q}.lora_B.weight": (32, 4, 1)}), {}, ("convolution",),
    ),
    "a copy of another shape": (
        DamagedError, lambda s: s.update({"base_model.model.lm_head.weight": (57, 32)}), {}, ("[57, 32]", "[53, 32]"),
    ),
    "a magnitude of another length": (
        DamagedError, lambda s: s.update({f"{Q}.lora_magnitude_vector": (31,)}), {}, ("[31]", "[32, 32]"),
    ),
    "tokens of another width": (
        DamagedError,
        lambda s: s.update({"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": (3, 8)}),
        {}, ("[3, 8]", "[53, 32]"),
    ),
    "two names of one tensor": (
        DamagedError, lambda s: s.update({f"{Q[17:]}.lora_A.weight": (4, 32)}), {}, ("two names of one tensor",),
    ),
    "tokens of a bank of experts": (
        UnsupportedError,
        lambda s: s.update({f"{Q}.token_adapter.trainable_tokens_delta": (3, 32)} | {
            "base_model.model.model.layers.0.mlp.token_adapter.trainable_tokens_delta": (3, 32)}),
        {"target_parameters": ["up_proj.weight", "mlp.weight", "up_proj"]}, ("mlp.token_adapter",),
    ),
    "another kind": (UnsupportedError, lambda s: None, {"peft_type": "LOKR"}, ("LOKR",)),
    "no kind": (UnsupportedError, lambda s: None, {"peft_type": None}, ("None",)),
    "block-diagonal": (UnsupportedError, lambda s: None, {"use_bdlora": {"nblocks": 2}}, ("use_bdlora",)),
    "repeated layers": (UnsupportedError, lambda s: None, {"layer_replication": [[0, 2]]}, ("layer_replication",)),
    "a rank that is none": (DamagedError, lambda s: None, {"r": "4"}, ("'r'", "'4'")),
    "a rank pattern that is none": (DamagedError, lambda s: None, {"rank_pattern": [4]}, ("rank_pattern",)),
    "ranks in it that are none": (DamagedError, lambda s: None, {"rank_pattern": {"q": True}}, ("rank_pattern",)),
    "parameters that are none": (DamagedError, lambda s: None, {"target_parameters": "x"}, ("target_parameters",)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_both_sides(name: str, llama: Path, tmp_path: Path) -> None:
    kind, change, config, says = REFUSED[name]
    shapes = pairs()
    change(shapes)
    adapter = write_adapter(tmp_path / "adapter", shapes, **config)
    with pytest.raises(kind) as caught:
        split(adapter, tmp_path / "out", 2, base=llama)
    for text in says:
        assert text in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_unknown_tensors_are_copied_whole_on_request(llama: Path, tmp_path: Path) -> None:
    shapes = pairs() | {"base_model.model.score.weight": (2, 32)}
    adapter = write_adapter(tmp_path / "adapter", shapes)
    report = split(adapter, tmp_path / "out", 3, base=llama, copy_unknown=True)
    assert report.copied_whole == ["base_model.model.score.weight"]
    whole = read(adapter / "adapter_model.safetensors")
    assert all(held[name] == whole[name] for held in ranks(tmp_path / "out") for name in report.copied_whole)


def test_an_adapter_without_its_base_is_refused_and_its_base_named(adapter: Path, tmp_path: Path) -> None:
    for words in (("split", adapter, tmp_path / "out", "--tp", 2), ("plan", adapter, "--tp", 2)):
        refused(3, *words, says=("PEFT adapter alone", "--base", "org/base"))
    (adapter / "config.json").write_text(json.dumps(CONFIG))  # of the base, which is still not there
    refused(3, "split", adapter, tmp_path / "out", "--tp", 2, says=("PEFT adapter alone",))


def test_bases_that_are_none(adapter: Path, llama: Path, tmp_path: Path) -> None:
    refused(2, "split", llama, tmp_path / "out", "--tp", 2, "--base", llama, says=("--base", "no PEFT adapter"))
    refused(3, "split", adapter, tmp_path / "out", "--tp", 2, "--base", adapter, says=("PEFT adapter alone",))
    refused(2, "split", adapter, tmp_path / "out", "--tp", 2, "--base", tmp_path / "none", says=("none",))
    split(adapter, tmp_path / "two", 2, base=llama)
    refused(2, "split", adapter, tmp_path / "out", "--tp", 2, "--base", tmp_path / "two", says=("adapter",))
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    (quantised / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "gptq"}}))
    refused(3, "split", adapter, tmp_path / "out", "--tp", 2, "--base", quantised, says=("quantis",))
    (adapter / "adapter_model.safetensors").unlink()
    refused(4, "split", adapter, tmp_path / "out", "--tp", 2, "--base", llama, says=("adapter_model.safetensors",))


def test_of_a_base_on_the_hub_the_config_alone_is_fetched(
    adapter: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def resolve(name: str, *, only: tuple[str, ...] = ()) -> Path:
        asked.append((name, only))
        return llama

    monkeypatch.setattr(hub, "resolve", resolve)
    monkeypatch.chdir(tmp_path)
    split(adapter, tmp_path / "by-id", 3, base="org/base@main")
    assert asked == [("org/base@main", ("config.json",))]
    split(adapter, tmp_path / "direct", 3, base=llama)
    assert tree(tmp_path / "by-id") == tree(tmp_path / "direct")


def test_a_degree_that_the_base_cannot_take_is_refused(llama: Path, tmp_path: Path) -> None:
    mlp = {name: shape for name, shape in pairs().items() if ".mlp." in name}  # which could be shared by 44 ranks
    adapter = write_adapter(tmp_path / "adapter", mlp)
    refused(3, "split", adapter, tmp_path / "out", "--tp", 9, "--base", llama, says=("heads", "9 ranks"))
    refused(3, "split", adapter, tmp_path / "out", "--tp", 3, "--base", llama, "--even", says=("equal",))
