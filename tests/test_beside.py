"""What lies beside the ranks' files: changed, missing or strange, it is told, and refused where it would be carried."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import ok, refused, tpshard
from test_check import SIX, found

from tpshard import merge, split
from tpshard.check import verify
from tpshard.manifestreader import parsed
from tpshard.sidefiles import copy_sides, file_sha256


@pytest.fixture(scope="module")
def six(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split to six."""
    directory = tmp_path_factory.mktemp("six") / "shards"
    split(llama, directory, 6)
    return directory


@pytest.fixture
def shards(six: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(six, tmp_path / "shards"))


SIDES = {"config.json": ("1e-05", "2e-05"), "tokenizer.json": ("{", "["), "sub/extra.json": ("{", "[")}


@pytest.fixture(scope="module")
def furnished(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with side files, one of them in a directory of its own, and what is left out."""
    source = Path(shutil.copytree(llama, tmp_path_factory.mktemp("furnished") / "model"))
    (source / "sub").mkdir()
    for name in ("tokenizer.json", "sub/extra.json"):
        (source / name).write_text("{}")
    (source / "consolidated.00.pth").write_bytes(b"other weights")
    return source


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("length", ["same", "other"])
def test_changed_side_files(name: str, length: str, furnished: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    split(furnished, shards, 3)
    text = (shards / name).read_text()
    assert SIDES[name][0] in text
    new = text.replace(*SIDES[name], 1) if length == "same" else text + " "
    (shards / name).write_text(new)
    if length == "same":
        assert verify(shards, levels=["structure"]).passed
        found("digest", shards, file=name)
        assert [f.file for f in verify(shards, against=furnished, levels=["bytes"]).findings] == [name]
    else:
        found("structure", shards, file=name, says="bytes where")
    for words in (("merge", shards, tmp_path / "out"), ("reshard", shards, tmp_path / "out", "--tp", 2)):
        refused(4, *words, says=(name, "changed since the split", "--allow-changed"))
        refused(4, *words, "--dry-run", says=(name,))
    assert not (tmp_path / "out").exists()
    done = ok("merge", shards, tmp_path / "merged", "--allow-changed")
    assert name in done.err
    assert "changed since the split" in done.err
    assert (tmp_path / "merged" / name).read_text() == new
    assert name in ok("reshard", shards, tmp_path / "two", "--tp", 2, "--allow-changed").err
    ok("verify", tmp_path / "two")  # the new manifest records what was carried
    manifest = parsed((tmp_path / "two" / "tpshard.json").read_bytes(), "two")
    assert manifest.origin.config_sha256 == file_sha256(tmp_path / "two" / "config.json")
    assert found("bytes", tmp_path / "two", "--against", furnished, file=name)["findings"][0]["tensor"] == ""
    ok("merge", tmp_path / "two", tmp_path / "again")
    ok("verify", tmp_path / "two", "--against", tmp_path / "again")
    (shards / name).unlink()
    found("structure", shards, file=name, says="missing")
    for extra in ((), ("--allow-changed",)):
        refused(4, "merge", shards, tmp_path / "none", *extra, says=(name, "missing"))


def test_a_side_file_that_changes_on_the_way(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(root: Path, output: Path, paths: Any) -> Any:
        (root / "config.json").write_bytes((root / "config.json").read_bytes() + b" ")
        return copy_sides(root, output, paths)

    monkeypatch.setattr("tpshard.output.copy_sides", copied)
    for words in (("merge", shards, tmp_path / "out"), ("reshard", shards, tmp_path / "out", "--tp", 2)):
        original = (shards / "config.json").read_bytes()
        refused(4, *words, says=("config.json", "changed"))
        (shards / "config.json").write_bytes(original)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", ["more", "fewer", "other"])
def test_bytes_compare_side_files_with_the_sources(which: str, furnished: Path, tmp_path: Path) -> None:
    split(furnished, tmp_path / "shards", 2)
    split(furnished, tmp_path / "three", 3)
    assert verify(tmp_path / "shards", against=furnished, levels=["bytes"]).passed
    source = Path(shutil.copytree(furnished, tmp_path / "source"))
    if which == "more":
        (source / "sub" / "new.json").write_text("{}")
    elif which == "fewer":
        (source / "sub" / "extra.json").unlink()
    else:
        (source / "sub" / "extra.json").write_text("[]")
    name = "sub/new.json" if which == "more" else "sub/extra.json"
    found("bytes", tmp_path / "shards", "--against", source, file=name, says="source")
    ok("verify", tmp_path / "shards", "--against", tmp_path / "three")
    split(source, tmp_path / "four", 4)
    found("bytes", tmp_path / "shards", "--against", tmp_path / "four", file=name, says="four")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("intermediate_size", 96, "gate_proj"),
        ("vocab_size", 54, "embed_tokens"),
        ("num_hidden_layers", 1, "model.layers.1"),
        ("num_hidden_layers", 3, "model.layers.2"),
        ("num_key_value_heads", 1, "k_proj"),
        ("model_type", "nonsense", "nonsense"),
        ("num_attention_heads", None, "num_attention_heads"),
        (None, None, "JSON"),
    ],
)
def test_structure_sees_a_config_that_no_longer_fits(key: str, value: Any, says: str, shards: Path) -> None:
    config = json.loads((shards / "config.json").read_text())
    if key is not None:
        assert config[key] != value
        config[key] = value
    (shards / "config.json").write_text(json.dumps(config) if key is not None else "{")
    report = tpshard("verify", shards, "--level", "structure", "--json")
    assert report.status == 1
    messages = [f["message"] for f in json.loads(report.out)["findings"] if f["file"] == "config.json"]
    assert any("no longer fits the tensors" in message and says in message for message in messages), messages


def test_structure_sees_a_config_that_implies_another_cut(shards: Path) -> None:
    """Half the heads, each twice as wide: every shape is what it was."""
    config = json.loads((shards / "config.json").read_text())
    half = {key: config[key] // 2 for key in ("num_attention_heads", "num_key_value_heads")}
    (shards / "config.json").write_text(json.dumps(config | half | {"head_dim": 2 * config["head_dim"]}))
    report = verify(shards, levels=["structure"])
    assert any("another cut of model.layers.0.self_attn.q_proj" in finding.message for finding in report.findings)


# --- what does not belong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model-tp-06-of-07.safetensors", "model.safetensors", "A.SAFETENSORS", "gone"])
def test_a_stray_file_of_weights(name: str, shards: Path, six: Path, tmp_path: Path) -> None:
    if name == "gone":
        (shards / "gone.safetensors").symlink_to("nowhere")
        name = "gone.safetensors"
    else:
        shutil.copy(shards / SIX[0], shards / name)
    report = found("structure", shards, file=name, says="not one of this split's files")
    assert [finding["file"] for finding in report["findings"]] == [name]
    done = ok("merge", shards, tmp_path / "merged")
    assert name in done.err
    assert not (tmp_path / "merged" / name).exists() or name == "model.safetensors"
    assert name in ok("reshard", shards, tmp_path / "six", "--tp", 6).err
    assert (tmp_path / "six" / "tpshard.json").read_bytes() == (six / "tpshard.json").read_bytes()


def test_other_strangers_are_noted(shards: Path, tmp_path: Path) -> None:
    assert verify(shards).warnings == []
    for number in range(7):
        (shards / f"note{number}.txt").write_text("")
    (shards / "parts.safetensors").mkdir()
    for name in (".DS_Store", "tpshard-verification.json"):
        (shards / name).write_text("{}")
    report = verify(shards)
    assert report.passed
    (warning,) = report.warnings
    assert all(word in warning for word in ("note0.txt", "note4.txt", "and 3 more"))
    assert not any(word in warning for word in ("DS_Store", "tpshard-verification"))
    assert warning in ok("verify", shards).out
    ok("merge", shards, tmp_path / "merged")
    assert not list((tmp_path / "merged").glob("note*"))


def test_what_the_split_left_out_is_listed_by_merge(furnished: Path, tmp_path: Path) -> None:
    left = "consolidated.00.pth (weights that are not in use)"
    assert f"left out: {left}" in ok("split", furnished, tmp_path / "two", "--tp", 2).out
    ok("reshard", tmp_path / "two", tmp_path / "three", "--tp", 3)
    done = ok("merge", tmp_path / "three", tmp_path / "merged")
    assert f"left out at the split: {left}" in done.out
    report = merge(tmp_path / "two", tmp_path / "merged2")
    assert report.left_out == [left]
    ok("verify", tmp_path / "three", "--against", furnished)
