"""The cases of public reports about files, H20 to H25: damage, stale copies, safe writing, side files, odd values."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import environment, ok, process, refused, started
from conftest import Case
from cuts import change_config, cut
from weights import Tensor, header_of, ranks, read, read_all, tensor, tree, write

INDEX = "model.safetensors.index.json"


def piece(number: int) -> str:
    return f"model-{number:05d}-of-00007.safetensors"


def change_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


# --- H20: incomplete or damaged source -------------------------------------------------------------------------------


def _missing_file(source: Path) -> None:
    (source / piece(2)).unlink()


def _short(source: Path) -> None:
    path = source / piece(3)
    os.truncate(path, path.stat().st_size - 64)


def _long(source: Path) -> None:
    with (source / piece(3)).open("ab") as file:
        file.write(bytes(16))


def _entry_without_tensor(source: Path) -> None:
    change_index(source, lambda weight_map: weight_map.update({"model.layers.0.ghost.weight": piece(1)}))


def _no_index(source: Path) -> None:
    (source / INDEX).unlink()


def _no_config(source: Path) -> None:
    (source / "config.json").unlink()


NORM = "model.layers.1.post_attention_layernorm.weight"


def _no_norm(source: Path) -> None:
    for path in source.glob("*.safetensors"):
        tensors = read(path)
        if tensors.pop(NORM, None) is not None:
            write(path, tensors)
    change_index(source, lambda weight_map: weight_map.pop(NORM))
    index = json.loads((source / INDEX).read_text())
    index["metadata"]["total_size"] = sum(len(stored.data) for stored in read_all(source).values())
    (source / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_missing_file, piece(2)),
        (_short, piece(3)),
        (_long, piece(3)),
        (_entry_without_tensor, "model.layers.0.ghost.weight"),
        (_no_index, "index"),
        (_no_config, "config.json"),
        (_no_norm, NORM),
    ],
)
def test_h20_damaged_source(damage: Callable[[Path], None], says: str, doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-SHARDED")
    damage(source)
    for verb in (("split", source, tmp_path / "out", "--tp", 2), ("inspect", source), ("plan", source, "--tp", 2)):
        refused(4, *verb, says=(says,))
    assert not (tmp_path / "out").exists()


def test_h20_files_of_another_naming(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-SHARDED")
    for number in range(1, 8):
        (source / piece(number)).rename(source / f"model.safetensors-{number:05d}-of-00007.safetensors")

    def rename(weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            weight_map[name] = file.replace("model-", "model.safetensors-")

    change_index(source, rename)
    cut(source, tmp_path, 2)


def test_h20_merge_with_a_file_limit(case: Case, tmp_path: Path) -> None:
    ok("split", case("F-SHARDED"), tmp_path / "out", "--tp", 2)
    merged = tmp_path / "merged"
    ok("merge", tmp_path / "out", merged, "--max-file-size", "60kB")
    index = json.loads((merged / INDEX).read_text())
    assert index["metadata"]["total_size"] == 328960
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert name in read(merged / file)
    for path in merged.glob("*.safetensors"):
        assert header_of(path)["__metadata__"]["format"] == "pt"
        assert sum(len(stored.data) for stored in read(path).values()) <= 60_000
    assert read_all(merged) == read_all(case("F-SHARDED"))


# --- H21: the same tensor in two files -------------------------------------------------------------------------------

DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("stale_in", [7, 1])
def test_h21_stale_copy(stale_in: int, doctored: Case, case: Case, tmp_path: Path) -> None:
    source = doctored("F-SHARDED")
    assert json.loads((source / INDEX).read_text())["weight_map"][DOWN] == piece(4)
    path = source / piece(stale_in)
    nines = np.full(read(source / piece(4))[DOWN].shape, 9, "<f4")
    write(path, read(path) | {DOWN: tensor(nines, "F32")})
    done = ok("split", source, tmp_path / "out", "--tp", 2)
    (warning,) = [line for line in done.err.splitlines() if DOWN in line]
    assert piece(4) in warning
    assert piece(stale_in) in warning
    ok("split", case("F-SHARDED"), tmp_path / "clean", "--tp", 2)
    but = ("tpshard.json",)
    assert tree(tmp_path / "out", but=but) == tree(tmp_path / "clean", but=but)
    done = ok("merge", tmp_path / "out", tmp_path / "merged", "--json")
    assert json.loads(done.out)["identical_to_source"] is False
    assert piece(stale_in) in done.err
    assert read_all(tmp_path / "merged") == read_all(case("F-SHARDED"))
    (source / INDEX).unlink()
    refused(4, "split", source, tmp_path / "none", "--tp", 2)


# --- H22: safe writing -----------------------------------------------------------------------------------------------


def test_h22_output_and_source_apart(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-LLAMA8")
    before = tree(source)
    for output in (source, source / "inside", tmp_path, source / ".." / source.name):
        for extra in ((), ("--overwrite",)):
            refused(2, "split", source, output, "--tp", 2, *extra, says=("source",))
    assert tree(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.1])
def test_h22_killed_half_way(seconds: float, large: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.tpshard-partial"
    running = started("split", large, out, "--tp", 4)
    deadline = time.monotonic() + 30
    while not list(partial.glob("output/model-tp-*")) and running.poll() is None:
        assert time.monotonic() < deadline
    time.sleep(seconds)
    running.send_signal(signal.SIGKILL)
    assert running.wait(30) in (-signal.SIGKILL, 0)
    if out.exists() and seconds:  # it was quicker than the signal, and is then whole
        ok("verify", out, "--level", "structure")
        return
    for directory in (out, partial, partial / "output"):
        refused(2, "merge", directory, tmp_path / "merged")
        refused(2, "verify", directory)
        refused(2, "reshard", directory, tmp_path / "two", "--tp", "2")
        assert not (directory / "model.safetensors").exists()
        assert not (directory / INDEX).exists()
    done = ok("split", large, out, "--tp", 4)
    assert "cleared" in done.err
    assert not partial.exists()
    ok("verify", out, "--against", large, "--level", "bytes")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 150 KB."""
    directory = tmp_path / "small"
    directory.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150k", "tmpfs", directory], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small file system needs root and the right to mount")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def test_h22_no_room(case: Case, small_disk: Path) -> None:
    reason = refused(5, "split", case("F-SHARDED"), small_disk / "out", "--tp", 2, says=("needed", "free"))
    numbers = [int(word) for word in reason.replace(",", "").split() if word.isdigit()]
    assert any(number > 329_000 for number in numbers)
    assert any(number <= 160_000 for number in numbers)
    assert not list(small_disk.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small file system")
def test_h22_disk_fills_up_on_the_way(case: Case, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room was there when it was looked for, and then others took it."""
    monkeypatch.setattr("tpshard.outputplace._free_bytes", lambda folder: 10**9)
    refused(5, "split", case("F-SHARDED"), small_disk / "out", "--tp", 2, says=("No space left", "free"))
    assert not list(small_disk.iterdir())


def test_h22_failing_again_leaves_the_finished_one(doctored: Case, tmp_path: Path) -> None:
    source, out = doctored("F-SHARDED"), tmp_path / "out"
    ok("split", source, out, "--tp", 2)
    ok("split", source, tmp_path / "four", "--tp", 4)
    before = tree(out)
    shard = tmp_path / "four" / "model-tp-02-of-04.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    refused(4, "reshard", tmp_path / "four", out, "--tp", 2, "--overwrite", says=("model-tp-02-of-04.safetensors",))
    _short(source)
    refused(4, "split", source, out, "--tp", 4, "--overwrite")
    assert tree(out) == before
    assert not (tmp_path / "out.tpshard-partial").exists()


# --- H23: everything that is not a weight ----------------------------------------------------------------------------


def side_files(source: Path, marker: Path) -> None:
    (source / "sub").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (source / name).write_text('{"modèle": "模型"}')
    for name in ("chat_template.jinja", "README.md", "sub/extra.json"):
        (source / name).write_text("{{ text }}\r\n")
    (source / "modeling_x.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    (source / "configuration_x.py").write_text("raise SystemExit(9)\n")
    (source / "configuration_x.py").chmod(0o444)
    change_config(source, auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "configuration_x.X"})


def hub_cache(plain: Path, repo: Path) -> Path:
    """The checkpoint as a hub cache keeps it: every file a link into ``blobs``."""
    snapshot = repo / "snapshots" / "0123abc"
    (repo / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(file for file in plain.rglob("*") if file.is_file())):
        blob, link = repo / "blobs" / f"{number:040x}", snapshot / path.relative_to(plain)
        shutil.copy(path, blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.mark.parametrize("cache", [False, True])
def test_h23_side_files(cache: bool, doctored: Case, tmp_path: Path) -> None:
    source, marker = tmp_path / "my modèle 模型 v1", tmp_path / "marker"
    doctored("F-LLAMA8").rename(source)
    side_files(source, marker)
    before = tree(source)
    given = hub_cache(source, tmp_path / "models--org--name") if cache else source
    out, merged = tmp_path / "out", tmp_path / "merged"
    ok("split", given, out, "--tp", 2)
    if cache:
        shutil.rmtree(tmp_path / "models--org--name")
    ok("merge", out, merged)
    ok("verify", out)
    assert tree(merged) == before
    carried = {path: digest for path, digest in before.items() if path != "model.safetensors"}
    held = tree(out)
    assert {path: digest for path, digest in held.items() if not path.startswith("model-tp-")} == carried | {
        "tpshard.json": held["tpshard.json"]
    }
    for directory in (out, merged):
        assert not any(path.is_symlink() for path in directory.rglob("*"))
        assert (directory / "configuration_x.py").stat().st_mode & 0o200
    assert not marker.exists()


# --- H24: mixed and odd values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_h24_mixed_and_odd_values(key: str, doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-MIX")
    change_config(source, **{"dtype": None, "torch_dtype": None, key: "bfloat16"})
    cut(source, tmp_path, 2)
    merged: dict[str, Tensor] = read_all(tmp_path / "merged2")
    odd = {name: stored.dtype for name, stored in merged.items() if stored.dtype != "BF16"}
    assert odd == {
        "model.layers.1.mlp.gate.e_score_correction_bias": "F32",
        "model.norm.weight": "F32",
        "model.layers.0.mlp.up_proj.weight": "F16",
    }
    row = merged["model.layers.0.mlp.gate_proj.weight"].array[0]
    assert list(row[:4]) == [0x7FC1, 0x8000, 1, 0x7F80]  # NaN with payload, -0.0, smallest subnormal, +inf
    config: dict[str, Any] = json.loads((tmp_path / "merged2" / "config.json").read_text())
    assert config[key] == "bfloat16"
    assert ({"dtype", "torch_dtype"} - {key}).isdisjoint(config)


# --- H25: twelve ranks, files in any order ---------------------------------------------------------------------------


def test_h25_twelve_ranks_in_any_order(case: Case, tmp_path: Path) -> None:
    source, out, turned = case("F-LLAMA12"), tmp_path / "out", tmp_path / "turned"
    ok("split", source, out, "--tp", 12, "--threads", 1)
    ok("split", source, tmp_path / "out4", "--tp", 12, "--threads", 4)
    assert tree(tmp_path / "out4") == tree(out)
    turned.mkdir()
    for path in sorted(out.iterdir(), reverse=True):
        shutil.copy(path, turned / path.name)
    for name, locale in (("c", "C"), ("utf8", "C.UTF-8")):
        done = process("merge", turned, tmp_path / name, env=environment(LC_ALL=locale))
        assert done.returncode == 0, done.stderr
        assert tree(tmp_path / name) == tree(source)
    q = "model.layers.0.self_attn.q_proj.weight"
    held = ranks(turned)
    for rank in range(12):
        assert np.array_equal(held[rank][q].array, read_all(source)[q].array[8 * rank : 8 * rank + 8])
    ok("reshard", turned, tmp_path / "three", "--tp", 3)
    ok("split", source, tmp_path / "direct", "--tp", 3)
    assert tree(tmp_path / "three") == tree(tmp_path / "direct")
