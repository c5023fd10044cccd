"""split, reshard and merge over their options: the same bytes whatever the way, and the source's bytes again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import weights
from commands import ELSEWHERE, ok, process, refused, tpshard
from weights import Tensor, header_of, ranks, read, read_all, tree, write, write_llama

from tpshard import Options, UnsupportedError, UsageError, merge, plan, reshard, split, verify

# --- every way to a degree gives the same files ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def direct(llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """``direct(8)``: a split of the source to 8, each made once."""
    directory = tmp_path_factory.mktemp("direct")

    def get(tp_size: int) -> Path:
        if not (directory / str(tp_size)).exists():
            split(llama3, directory / str(tp_size), tp_size)
        return directory / str(tp_size)

    return get


@pytest.mark.parametrize(
    ("old", "new"), [(8, 4), (8, 3), (4, 8), (3, 7), (7, 3), (5, 6), (1, 8), (8, 1), (2, 5), (6, 6)]
)
def test_reshard_gives_the_files_of_a_direct_split(
    old: int, new: int, direct: Callable[[int], Path], tmp_path: Path
) -> None:
    report = reshard(direct(old), tmp_path / "new", new, from_tp_size=old)
    assert tree(tmp_path / "new") == tree(direct(new))
    assert (report.from_tp_size, report.to_tp_size) == (old, new)


@pytest.mark.parametrize("tp_size", range(1, 9))
def test_merge_gives_the_files_of_the_source(
    tp_size: int, direct: Callable[[int], Path], llama3: Path, tmp_path: Path
) -> None:
    report = merge(direct(tp_size), tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(llama3)
    assert report.identical_to_source is True


def test_a_long_way_round(llama: Path, tmp_path: Path) -> None:
    split(llama, tmp_path / "5", 5)
    for old, new in ((5, 8), (8, 3), (3, 1), (1, 7)):
        reshard(tmp_path / str(old), tmp_path / str(new), new)
    merge(tmp_path / "7", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(llama)


SAME = {
    "one thread": {"threads": 1},
    "four threads": {"threads": 4},
    "little memory": {"max_memory": 1 << 20, "threads": 3},
    "flushed": {"fsync": True},
}


@pytest.mark.parametrize("settings", SAME.values(), ids=SAME)
def test_settings_change_no_byte(
    settings: dict[str, Any], direct: Callable[[int], Path], llama3: Path, tmp_path: Path
) -> None:
    options = Options(**settings)
    split(llama3, tmp_path / "split", 3, options=options)
    assert tree(tmp_path / "split") == tree(direct(3))
    reshard(direct(8), tmp_path / "reshard", 3, options=options)
    assert tree(tmp_path / "reshard") == tree(direct(3))
    merge(direct(3), tmp_path / "merged", options=options)
    assert tree(tmp_path / "merged") == tree(llama3)
    assert verify(direct(3), against=llama3, options=options).passed


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sha256", ""])
def test_digests_are_of_the_chosen_kind_and_stay_it(algorithm: str, llama: Path, tmp_path: Path) -> None:
    options = Options(algorithm=algorithm)
    split(llama, tmp_path / "four", 4, options=options)
    split(llama, tmp_path / "three", 3, options=options)
    manifest = json.loads((tmp_path / "four" / "tpshard.json").read_text())
    assert manifest["algorithm"] == algorithm
    width = {"": 0, "xxh3_128": 32, "sha256": 64}[algorithm]
    held = {file["name"]: len(read(tmp_path / "four" / file["name"])) for file in manifest["files"]}
    assert all(len(file["digests"]) == width * held[file["name"]] for file in manifest["files"])
    reshard(tmp_path / "four", tmp_path / "again", 3)  # with default options: the manifest decides
    assert tree(tmp_path / "again") == tree(tmp_path / "three")
    report = merge(tmp_path / "three", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(llama)
    assert report.identical_to_source is bool(algorithm)
    assert verify(tmp_path / "three", against=llama).passed


def test_parts_of_at_most_the_given_size(llama: Path, tmp_path: Path) -> None:
    limit = 4000
    report = split(llama, tmp_path / "parts", 4, max_file_bytes=limit)
    whole = split(llama, tmp_path / "whole", 4)
    assert len(report.files) > 8
    for path in (tmp_path / "parts").glob("model-tp-*"):
        held = read(path)
        assert sum(len(stored.data) for stored in held.values()) <= limit or len(held) == 1
    assert ranks(tmp_path / "parts") == ranks(tmp_path / "whole")
    assert report.content == whole.content
    names = sorted(report.files)
    of_rank = [name for name in names if name.startswith("model-tp-02-of-04-")]
    assert of_rank == [f"model-tp-02-of-04-{n + 1:05d}-of-{len(of_rank):05d}.safetensors" for n in range(len(of_rank))]
    reshard(tmp_path / "parts", tmp_path / "kept", 2)  # keeps the limit
    reshard(tmp_path / "parts", tmp_path / "single", 2, max_file_bytes=0)
    split(llama, tmp_path / "direct", 2, max_file_bytes=limit)
    assert tree(tmp_path / "kept") == tree(tmp_path / "direct")
    assert len(list((tmp_path / "single").glob("model-tp-*"))) == 2
    merge(tmp_path / "parts", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(llama)
    assert verify(tmp_path / "parts", against=llama).passed


@pytest.mark.parametrize("limit", [0, 5000, 10**9])
def test_repacked_merge(limit: int, llama3: Path, direct: Callable[[int], Path], tmp_path: Path) -> None:
    report = merge(direct(3), tmp_path / "merged", repack_bytes=limit)
    assert report.identical_to_source is False
    assert read_all(tmp_path / "merged") == read_all(llama3)
    assert (tmp_path / "merged" / "config.json").read_bytes() == (llama3 / "config.json").read_bytes()
    assert (tmp_path / "merged" / "model.safetensors.index.json").exists() is (limit == 5000)
    assert len(report.files) == (1 if limit != 5000 else len(list((tmp_path / "merged").glob("*.safetensors"))))
    split(tmp_path / "merged", tmp_path / "again", 3)
    assert ranks(tmp_path / "again") == ranks(direct(3))


def test_dry_run_writes_nothing_and_foretells_the_rest(
    llama: Path, direct: Callable[[int], Path], tmp_path: Path
) -> None:
    dry = Options(dry_run=True)
    for verb in (
        lambda options: split(llama, tmp_path / "split", 3, options=options),
        lambda options: reshard(direct(8), tmp_path / "reshard", 3, options=options),
        lambda options: merge(direct(8), tmp_path / "merged", options=options),
    ):
        before = sorted(tmp_path.iterdir())
        foretold = verb(dry)
        assert sorted(tmp_path.iterdir()) == before
        done = verb(Options())
        for name in ("files", "rank_bytes", "uneven", "padding", "needed_bytes", "side_files", "layout", "warnings"):
            assert getattr(foretold, name) == getattr(done, name), name
        assert (foretold.dry_run, foretold.bytes_written) == (True, 0)
        assert done.needed_bytes >= sum(p.stat().st_size for p in Path(done.output).rglob("*") if p.is_file())


def test_dry_run_refuses_what_a_run_would(llama: Path, direct: Callable[[int], Path], tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for words in (("split", llama), ("reshard", direct(8)), ("merge", direct(8))):
        degree = () if words[0] == "merge" else ("--tp", 3)
        refused(2, *words, tmp_path / "taken", *degree, "--dry-run", says=("--overwrite",))
        refused(2, *words, tmp_path / "taken", *degree, says=("--overwrite",))
        refused(5, *words, tmp_path / "no" / "where", *degree, "--dry-run", says=("mkdir",))
        refused(2, *words, tmp_path / "out", *degree, "--threads", 0, "--dry-run")
        refused(2, *words, tmp_path / "out", *degree, "--max-memory", "1k", "--dry-run")


def test_overwrite_replaces_the_whole_directory(llama: Path, tmp_path: Path) -> None:
    split(llama, tmp_path / "out", 4)
    split(llama, tmp_path / "two", 2)
    ok("split", llama, tmp_path / "out", "--tp", 2, "--overwrite")
    assert tree(tmp_path / "out") == tree(tmp_path / "two")
    ok("merge", tmp_path / "two", tmp_path / "out", "--overwrite")
    assert tree(tmp_path / "out") == tree(llama)


def test_from_degree_is_held_against_the_shards(direct: Callable[[int], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="8 ranks, not 4"):
        reshard(direct(8), tmp_path / "out", 2, from_tp_size=4)


# --- sources ---------------------------------------------------------------------------------------------------------


def write_torch(directory: Path, tensors: dict[str, Tensor], form: str) -> None:
    torch = pytest.importorskip("torch")
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    state = {
        name: torch.frombuffer(bytearray(t.data), dtype=dtypes[t.dtype]).reshape(t.shape) for name, t in tensors.items()
    }
    if form == "tied":
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    if form != "indexed":
        torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=form != "legacy")
        return
    weight_map = {}
    names = list(state)
    for number, half in enumerate((names[:9], names[9:]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: state[name] for name in half}, directory / file)
        weight_map |= dict.fromkeys(half, file)
    total = sum(len(t.data) for t in tensors.values())
    (directory / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )


@pytest.mark.parametrize("form", ["zip", "legacy", "indexed", "tied"])
def test_torch_files_come_back_byte_for_byte(form: str, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", tie_word_embeddings=form == "tied")
    tensors = read_all(source)
    (source / "model.safetensors").unlink()
    write_torch(source, tensors, form)
    split(source, tmp_path / "out", 3)
    held = ranks(tmp_path / "out")
    rows = [tensors["lm_head.weight"].array[18 * rank : 18 * rank + 18] for rank in range(3)]
    if form == "tied":  # stored once, under the name that comes first
        assert all("lm_head.weight" not in rank for rank in held)
        rows = [tensors["model.embed_tokens.weight"].array[18 * rank : 18 * rank + 18] for rank in range(3)]
    name = "model.embed_tokens.weight" if form == "tied" else "lm_head.weight"
    for rank in range(3):
        assert np.array_equal(held[rank][name].array[: len(rows[rank])], rows[rank])
    reshard(tmp_path / "out", tmp_path / "five", 5)
    report = merge(tmp_path / "five", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(source)
    assert report.identical_to_source
    assert ("lm_head.weight" in report.aliases) is (form == "tied")
    assert verify(tmp_path / "five", against=source).passed


def test_hub_id_from_the_cache(tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "plain", files=2)
    repo = tmp_path / "home" / "hub" / "models--org--tiny"
    for revision, name in (("main", "0" * 40), ("v2", "1" * 40)):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / revision).write_text(name)
        snapshot = repo / "snapshots" / name
        snapshot.mkdir(parents=True)
        for path in plain.iterdir():
            blob = repo / "blobs" / f"{revision}-{path.name}"
            blob.parent.mkdir(exist_ok=True)
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    environment = {**ELSEWHERE["env"], "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    for given in ("org/tiny", "org/tiny@v2"):
        out = tmp_path / given.replace("/", "-")
        done = process("split", given, out, "--tp", 2, env=environment)
        assert done.returncode == 0, done.stderr
        merge(out, tmp_path / f"merged-{out.name}")
        assert tree(tmp_path / f"merged-{out.name}") == tree(plain)
    for missing in ("org/other", "org/tiny@v3"):
        done = process("split", missing, tmp_path / "none", "--tp", 2, env=environment)
        assert done.returncode == 5
        assert missing.split("@")[0] in done.stderr
        assert "Traceback" not in done.stderr


# --- every dtype and shape -------------------------------------------------------------------------------------------

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def noise(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    count = int(np.prod(shape, dtype=int)) * BITS[dtype] // 8
    return Tensor(dtype, shape, np.random.default_rng(seed).bytes(count))


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_is_cut(dtype: str, tmp_path: Path) -> None:
    """All 8 ranks cut on whole bytes here: rows of 32, heads of 4."""
    config = weights.CONFIG | {"intermediate_size": 64}
    source = write_llama(tmp_path / "source")
    (source / "config.json").write_text(json.dumps(config))
    shapes = weights.llama_shapes(config)
    tensors = {name: noise(dtype, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    write(source / "model.safetensors", tensors)
    split(source, tmp_path / "eight", 8)
    reshard(tmp_path / "eight", tmp_path / "two", 2)
    merge(tmp_path / "two", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(source)
    name = "model.layers.1.mlp.down_proj.weight"
    held = ranks(tmp_path / "eight")
    whole = np.unpackbits(np.frombuffer(read(source / "model.safetensors")[name].data, "u1")).reshape(32, -1)
    for rank in range(8):
        mine = np.unpackbits(np.frombuffer(held[rank][name].data, "u1")).reshape(32, -1)
        assert held[rank][name][:2] == (dtype, (32, 8))
        assert np.array_equal(mine, whole[:, BITS[dtype] * 8 * rank : BITS[dtype] * 8 * (rank + 1)])


def test_a_cut_inside_a_byte_is_refused(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", dtype="F4")  # 44 channels: 15, 15 and 14 on three ranks
    split(source, tmp_path / "two", 2)
    for words in (("split", source), ("reshard", tmp_path / "two")):
        refused(3, *words, tmp_path / "three", "--tp", 3, says=("inside a byte", "whole bytes", "mlp"))
    report = plan(source, [2, 3])
    assert [degree.possible for degree in report.degrees] == [True, False]
    assert "mlp" in report.degrees[1].reason
    assert not (tmp_path / "three").exists()


ODD = {
    "empty": noise("F32", (0, 5)),
    "zero.width": noise("F8_E8M0", (3, 0)),
    "scalar": noise("I64", ()),
    "flags": noise("BOOL", (3, 1, 2)),
}


def test_unknown_tensors_are_refused_or_copied_whole(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", extra=ODD)
    with pytest.raises(UnsupportedError, match="--copy-unknown") as caught:
        split(source, tmp_path / "out", 3)
    assert all(name in str(caught.value) for name in ODD)
    report = split(source, tmp_path / "out", 3, copy_unknown=True)
    assert sorted(report.copied_whole) == sorted(ODD)
    for rank in ranks(tmp_path / "out"):
        assert {name: rank[name] for name in ODD} == ODD
    reshard(tmp_path / "out", tmp_path / "five", 5)
    split(source, tmp_path / "direct", 5, copy_unknown=True)
    assert tree(tmp_path / "five") == tree(tmp_path / "direct")
    merge(tmp_path / "five", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(source)
    assert verify(tmp_path / "five", against=source).passed


def test_names_of_ten_layers_and_more_keep_their_place(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", num_hidden_layers=12, files=3)
    split(source, tmp_path / "out", 2)
    assert list(header_of(tmp_path / "out" / "model-tp-00-of-02.safetensors"))[1:] == [
        name for path in sorted(source.glob("*.safetensors")) for name in read(path)
    ]
    merge(tmp_path / "out", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(source)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_model(large: Path, llama: Path, tmp_path: Path) -> None:
    """Peak memory with 200 MB of weights, in tensors of up to 65 MB, against that with 50 KB."""
    script = (
        "import resource, sys; from tpshard.cli import run; status = run(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(status)"
    )

    def peak(*words: object) -> int:
        command = [sys.executable, "-c", script, *map(str, words)]
        done = subprocess.run(command, **ELSEWHERE, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return int(done.stderr.split()[-1]) * 1024

    steps = (
        lambda source, at: ("split", source, at / "8", "--tp", 8),
        lambda source, at: ("reshard", at / "8", at / "3", "--tp", 3),
        lambda source, at: ("merge", at / "3", at / "merged"),
        lambda source, at: ("verify", at / "3", "--against", source),
    )
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    for step in steps:
        small = peak(*step(llama, tmp_path / "small"))
        assert peak(*step(large, tmp_path / "large")) < small + (48 << 20)


def test_the_public_functions_neither_print_nor_exit(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    split(llama, tmp_path / "out", 3)
    reshard(tmp_path / "out", tmp_path / "two", 2)
    merge(tmp_path / "two", tmp_path / "merged")
    verify(tmp_path / "two")
    with pytest.raises(UsageError):
        split(llama, tmp_path / "zero", 0)
    assert capfd.readouterr() == ("", "")
    for bad in ("", "a\0b"):
        for call in (
            lambda bad=bad: split(llama, bad, 2),
            lambda bad=bad: split(bad, tmp_path / "x", 2),
            lambda bad=bad: reshard(bad, tmp_path / "x", 2),
            lambda bad=bad: reshard(tmp_path / "out", bad, 2),
            lambda bad=bad: merge(bad, tmp_path / "x"),
            lambda bad=bad: verify(bad),
            lambda bad=bad: verify(tmp_path / "out", against=bad),
            lambda bad=bad: plan(bad, [2]),
        ):
            with pytest.raises(UsageError):
                call()
    assert tpshard("inspect", "").status == 2
