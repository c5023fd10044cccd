"""Adapters as files: names, configs, and everything about them that is refused; neither torch nor peft is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ok, refused
from hypothesis import given
from hypothesis import strategies as st
from weights import CONFIG, Tensor, nbytes, ranks, read, tree, write

from tpshard import DamagedError, UnsupportedError, inspect, merge, reshard, split, verify
from tpshard.adapterplan import adapter_plan_verdict, judge_adapter
from tpshard.intervals import Run
from tpshard.lora import piece_of
from tpshard.manifest import Manifest
from tpshard.partition import interned
from tpshard.plancuts import Planned, planned
from tpshard.shards import read_manifest
from tpshard.table import ADDED_ONCE

SHAPES = {  # of a layer of the Llama in weights.py, [out, in]
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.up_proj": (44, 32),
    "mlp.down_proj": (32, 44),
}
Shapes = dict[str, tuple[int, ...]]


def pairs(rank: int = 4, prefix: str = "base_model.model.model.", own: str = "", layers: int = 2) -> Shapes:
    """The tensors of an adapter of all these modules."""
    out: Shapes = {}
    for layer in range(layers):
        for module, (rows, columns) in SHAPES.items():
            name = f"{prefix}layers.{layer}.{module}"
            out[f"{name}.lora_A{own}.weight"] = (rank, columns)
            out[f"{name}.lora_B{own}.weight"] = (rows, rank)
    return out


def write_adapter(directory: Path, shapes: Mapping[str, tuple[int, ...]], **config: Any) -> Path:
    """An adapter of random bytes."""
    directory.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "org/base"} | config
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    (directory / "README.md").write_text("# an adapter\n")
    random = np.random.default_rng(1)
    tensors = {name: Tensor("F32", shape, random.bytes(nbytes("F32", shape))) for name, shape in shapes.items()}
    write(directory / "adapter_model.safetensors", tensors)
    return directory


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


def test_a_degree_that_the_base_cannot_take_is_refused(llama: Path, tmp_path: Path) -> None:
    mlp = {name: shape for name, shape in pairs().items() if ".mlp." in name}  # which could be shared by 44 ranks
    adapter = write_adapter(tmp_path / "adapter", mlp)
    refused(3, "split", adapter, tmp_path / "out", "--tp", 9, "--base", llama, says=("heads", "9 ranks"))
    refused(3, "split", adapter, tmp_path / "out", "--tp", 3, "--base", llama, "--even", says=("equal",))


# --- the level plan --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """An adapter with everything that has a rule of its own, on three ranks."""
    directory = tmp_path_factory.mktemp("plan")
    at = "base_model.model.model.layers.0.self_attn"
    shapes = pairs() | {
        f"{at}.q_proj.lora_magnitude_vector": (32,),
        f"{at}.o_proj.lora_magnitude_vector": (32,),
        f"{at}.k_proj.lora_B.bias": (16,),
        f"{at}.o_proj.lora_B.bias": (32,),
        "base_model.model.lm_head.weight": (53, 32),
    }
    split(write_adapter(directory / "adapter", shapes), directory / "out", 3, base=llama)
    return read_manifest(directory / "out")


def test_a_good_plan_passes(manifest: Manifest) -> None:
    verdict = adapter_plan_verdict(manifest)
    assert verdict.verdict == "passed"
    assert verdict.notes[0] == "judged: 12 pairs of adapter matrices"
    assert verdict.collectives == {"norm_all_reduce": 1}
    assert not list(judge_adapter(planned(manifest), manifest.tp_size))


def _exchanged(tensor: Planned) -> Planned:
    """Ranks 0 and 1 hold each other's part."""
    parts = [interned(p.extent, (p.ranks[1], p.ranks[0], *p.ranks[2:])) for p in tensor.parts]
    return tensor._replace(parts=tuple(parts))


def _whole(tensor: Planned) -> Planned:
    parts = [interned(p.extent, ((Run(0, p.extent),),) * 3) for p in tensor.parts]
    return tensor._replace(parts=tuple(parts))


def _shortened(tensor: Planned) -> Planned:
    """The last rank lacks its last index."""
    cut = [n for n, dim in enumerate(tensor.dims) if dim.axes]
    n = cut[0] if cut else 0
    *others, last = tensor.parts[n].ranks
    *runs, run = last
    short = (*runs, Run(run.start, run.length - 1))
    parts = [*tensor.parts]
    parts[n] = interned(tensor.parts[n].extent, (*others, short))
    return tensor._replace(parts=tuple(parts))


FAULTS: dict[str, Callable[[Planned], Planned]] = {
    "parts exchanged": _exchanged,
    "whole on every rank": _whole,
    "an index lacks": _shortened,
    "another note": lambda tensor: tensor._replace(note="" if tensor.note else ADDED_ONCE),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_in_every_tensor_is_found(fault: str, manifest: Manifest) -> None:
    good = planned(manifest)
    for name, tensor in good.items():
        bad = FAULTS[fault](tensor)
        if bad.parts == tensor.parts and bad.note == tensor.note:
            continue  # whole as it should be, or as long on both ranks
        found = list(judge_adapter(good | {name: bad}, manifest.tp_size))
        if fault == "another note" and ".lora_" not in name:
            continue  # copies have the notes of the base, which its own table answers for
        assert found, name


def test_a_pair_that_lost_its_cut_or_its_half_is_found(manifest: Manifest) -> None:
    at = "base_model.model.model.layers.1.mlp.down_proj"
    good = planned(manifest)
    a, b = good[f"{at}.lora_A.weight"], good[f"{at}.lora_B.weight"]
    bare = _whole(a)._replace(dims=b.dims[1:] * 2, note="")
    alone = {name: tensor for name, tensor in good.items() if name != b.name}
    assert "stands alone" in str(list(judge_adapter(alone, 3)))
    cut = b._replace(dims=(good[f"{Q}.lora_B.weight"].dims[0], b.dims[1]))
    cut = cut._replace(parts=(good[f"{Q}.lora_B.weight"].parts[0], b.parts[1]))
    assert "both cut" in str(list(judge_adapter(good | {b.name: cut}, 3)))
    found = str(list(judge_adapter(good | {a.name: bare, b.name: b._replace(note="")}, 3)))
    assert "is cut" in found, found
