"""Every kind of damage to shards is found, at the level that can see it, with file and tensor named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from commands import Done, ok, refused, tpshard
from weights import header_of, write_llama

from tpshard import DamagedError, UsageError, merge, reshard, split
from tpshard import manifest as manifests
from tpshard.check import verify
from tpshard.manifestreader import parsed

Q, K, HEAD = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight"
SIX = [f"model-tp-{rank:02d}-of-06.safetensors" for rank in range(6)]


@pytest.fixture(scope="module")
def six(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split to six: two KV heads are on two ranks each, one vocabulary row is padding."""
    split(llama, tmp_path_factory.mktemp("six") / "shards", 6)
    return tmp_path_factory.getbasetemp() / "six0" / "shards"


@pytest.fixture
def shards(six: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(six, tmp_path / "shards"))


def place(path: Path, name: str) -> tuple[int, int]:
    """Where a tensor's bytes begin and end in a file."""
    begin, end = header_of(path)[name]["data_offsets"]
    data = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return data + begin, data + end


def poke(path: Path, at: int, flip: int = 1) -> None:
    """Flip bits of one byte without the file's size or time of change telling of it."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ flip]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def redigest(shards: Path, file: str, name: str) -> None:
    """Put the digest of the tensor as it is now into the manifest: whoever did the damage knew what he did."""
    begin, end = place(shards / file, name)
    digest = xxhash.xxh3_128((shards / file).read_bytes()[begin:end]).hexdigest()
    number = [key for key in header_of(shards / file) if key != "__metadata__"].index(name)
    promise(shards, file, number, digest)


def promise(shards: Path, file: str, number: int, digest: str) -> None:
    """Have the manifest promise this digest for a tensor of a file."""
    path = shards / "tpshard.json"
    manifest = parsed(path.read_bytes(), str(path))
    files = list(manifest.files)
    at = [entry.name for entry in files].index(file)
    digests = list(files[at].digests)
    digests[number] = digest
    files[at] = dataclasses.replace(files[at], digests=tuple(digests))
    path.write_bytes(manifests.dumped(dataclasses.replace(manifest, files=tuple(files))))


def found(level: str, *arguments: object, file: str, tensor: str = "", says: str = "") -> dict[str, Any]:
    """Verify must fail with a finding of this level that names file and tensor; returns the report."""
    done: Done = tpshard("verify", *arguments, "--json")
    assert done.status == 1, done
    report: dict[str, Any] = json.loads(done.out)
    assert report["passed"] is False
    findings = [f for f in report["findings"] if f["level"] == level and f["file"] == file and f["tensor"] == tensor]
    assert findings, report["findings"]
    assert all(part in findings[0]["message"] for part in (file, tensor, says)), findings[0]
    text = tpshard("verify", *arguments)
    assert text.status == 1
    assert "FAILED" in text.out
    assert findings[0]["message"] in text.out
    return report


def test_whole_shards_pass_every_level(six: Path, llama: Path, tmp_path: Path) -> None:
    for level, passed in (("structure", ["structure"]), ("digest", ["structure", "digest"])):
        report = verify(six, levels=[level])
        assert (report.passed, report.levels) == (True, passed)
    report = verify(six, against=llama)
    assert (report.passed, report.levels) == (True, ["structure", "digest", "bytes"])
    assert report.files_checked == 6
    assert report.bytes_checked > 3 * sum(path.stat().st_size for path in llama.glob("*.safetensors"))
    reshard(six, tmp_path / "four", 4)
    for one, two in ((six, tmp_path / "four"), (tmp_path / "four", six)):
        assert verify(one, against=two).passed
    assert tpshard("verify", llama, six).status == 0  # verify SRC SHARDS
    assert "passed" in tpshard("verify", six).out


# --- what the headers tell -------------------------------------------------------------------------------------------


def _missing(shards: Path) -> None:
    (shards / SIX[2]).unlink()


def _truncated(shards: Path) -> None:
    os.truncate(shards / SIX[2], (shards / SIX[2]).stat().st_size - 1)


def _longer(shards: Path) -> None:
    with (shards / SIX[2]).open("ab") as file:
        file.write(b"\0")


def _empty(shards: Path) -> None:
    os.truncate(shards / SIX[2], 0)


def _directory(shards: Path) -> None:
    (shards / SIX[2]).unlink()
    (shards / SIX[2]).mkdir()


def _pipe(shards: Path) -> None:
    (shards / SIX[2]).unlink()
    os.mkfifo(shards / SIX[2])


def _exchanged(shards: Path) -> None:
    (shards / SIX[2]).rename(shards / "aside")
    (shards / SIX[3]).rename(shards / SIX[2])
    (shards / "aside").rename(shards / SIX[3])


def _copied(shards: Path) -> None:
    shutil.copy(shards / SIX[3], shards / SIX[2])


def _header(shards: Path) -> None:
    poke(shards / SIX[2], 9, 0xFF)


STRUCTURE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (_missing, "missing"),
    "truncated": (_truncated, ""),
    "longer": (_longer, ""),
    "empty": (_empty, ""),
    "a directory": (_directory, ""),
    "a pipe": (_pipe, ""),
    "exchanged": (_exchanged, "rank 3 where rank 2"),
    "copied from another rank": (_copied, "rank 3 where rank 2"),
    "garbage in the header": (_header, ""),
}


@pytest.mark.parametrize("kind", STRUCTURE)
def test_structure_sees(kind: str, shards: Path, llama: Path, tmp_path: Path) -> None:
    damage, says = STRUCTURE[kind]
    damage(shards)
    report = found("structure", shards, "--against", llama, file=SIX[2], says=says)
    assert {"digest", "bytes"}.isdisjoint(report["levels"])
    by_bytes = verify(shards, against=llama)
    assert (by_bytes.passed, by_bytes.levels) == (False, ["structure"])
    assert any("not run" in warning and "digest, bytes" in warning for warning in by_bytes.warnings)
    for words in (("merge", shards, tmp_path / "out"), ("reshard", shards, tmp_path / "out", "--tp", 2)):
        refused(4, *words, says=(SIX[2],))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", ["seed", "degree", "shape", "limit", "foreign"])
def test_structure_sees_a_file_of_another_split(other: str, shards: Path, llama: Path, tmp_path: Path) -> None:
    says = "another model or run"
    if other == "seed":
        split(write_llama(tmp_path / "model", seed=1), tmp_path / "other", 6)
    elif other == "degree":
        split(llama, tmp_path / "other", 3)
        (tmp_path / "other" / "model-tp-02-of-03.safetensors").rename(tmp_path / "other" / SIX[2])
        says = "3 ranks, not 6"
    elif other == "shape":
        split(write_llama(tmp_path / "model", vocab_size=60), tmp_path / "other", 6)
        says = "another layout"
    elif other == "limit":
        split(llama, tmp_path / "other", 6, max_file_bytes=4000)
        next((tmp_path / "other").glob("model-tp-02-*-00001-of-*")).rename(tmp_path / "other" / SIX[2])
        says = "bytes where"
    else:
        (tmp_path / "other").mkdir()
        shutil.copy(llama / "model.safetensors", tmp_path / "other" / SIX[2])
        says = "not written by tpshard"
    shutil.copy(tmp_path / "other" / SIX[2], shards / SIX[2])
    found("structure", shards, file=SIX[2], says=says)
    refused(4, "merge", shards, tmp_path / "out", says=(SIX[2],))


# --- what digests tell -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [Q, K, HEAD, "model.norm.weight"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_digest_sees_one_flipped_bit(name: str, where: str, shards: Path, llama: Path, tmp_path: Path) -> None:
    begin, end = place(shards / SIX[4], name)
    poke(shards / SIX[4], begin if where == "first" else end - 1, 0x80)
    assert verify(shards, levels=["structure"]).passed
    found("digest", shards, file=SIX[4], tensor=name, says="xxh3_128")
    found("bytes", shards, "--against", llama, "--level", "bytes", file=SIX[4], tensor=name)
    refused(4, "merge", shards, tmp_path / "out", says=(name,))
    refused(4, "reshard", shards, tmp_path / "out", "--tp", 6, says=(name,))
    assert not (tmp_path / "out").exists()


def test_every_damaged_tensor_is_listed_not_only_the_first(shards: Path, llama: Path) -> None:
    hurt = [(SIX[0], Q), (SIX[0], HEAD), (SIX[5], Q)]
    for file, name in hurt:
        poke(shards / file, place(shards / file, name)[0])
    report = verify(shards, against=llama)
    for level in ("digest", "bytes"):
        assert sorted((f.file, f.tensor) for f in report.findings if f.level == level) == sorted(hurt)


# --- what only a comparison tells ------------------------------------------------------------------------------------


def test_bytes_see_a_wrong_replica_whose_digest_was_made_to_fit(shards: Path, llama: Path, tmp_path: Path) -> None:
    by_rank = [(shards / file).read_bytes()[slice(*place(shards / file, K))] for file in SIX]
    assert by_rank[0] == by_rank[1] != by_rank[2]  # a KV head on two ranks
    poke(shards / SIX[1], place(shards / SIX[1], K)[0] + 5)
    redigest(shards, SIX[1], K)
    assert verify(shards, levels=["structure", "digest"]).passed
    report = found("bytes", shards, "--against", llama, file=SIX[1], tensor=K)
    assert "byte 5" in report["findings"][0]["message"]
    for words in (("merge", shards, tmp_path / "out"), ("reshard", shards, tmp_path / "out", "--tp", 2)):
        refused(4, *words, says=(K,))


def test_bytes_see_exchanged_heads_whose_digests_were_made_to_fit(shards: Path, llama: Path, tmp_path: Path) -> None:
    (begin, end), other = place(shards / SIX[4], Q), place(shards / SIX[5], Q)
    raws = [bytearray((shards / file).read_bytes()) for file in SIX[4:]]
    raws[0][begin:end], raws[1][slice(*other)] = raws[1][slice(*other)], raws[0][begin:end]
    for file, raw in zip(SIX[4:], raws, strict=True):
        (shards / file).write_bytes(raw)
        redigest(shards, file, Q)
    assert verify(shards).passed
    for file in SIX[4:]:
        found("bytes", shards, "--against", llama, file=file, tensor=Q)
    refused(4, "merge", shards, tmp_path / "out", says=(Q, "source"))


def test_bytes_see_padding_that_is_not_zero(shards: Path, llama: Path, tmp_path: Path) -> None:
    end = place(shards / SIX[5], HEAD)[1]
    assert not np.frombuffer((shards / SIX[5]).read_bytes()[end - 64 : end], "u1").any()
    poke(shards / SIX[5], end - 3)
    redigest(shards, SIX[5], HEAD)
    assert verify(shards, levels=["structure", "digest"]).passed
    found("bytes", shards, "--against", llama, file=SIX[5], tensor=HEAD, says="padding")
    for words in (("merge", shards, tmp_path / "out"), ("reshard", shards, tmp_path / "out", "--tp", 2)):
        refused(4, *words, says=(HEAD,))


def test_bytes_against_other_weights(six: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=1)
    split(other, tmp_path / "four", 4)
    for against in (other, tmp_path / "four"):
        report = verify(six, against=against, levels=["bytes"])
        assert not report.passed
        assert {finding.tensor for finding in report.findings} == set(header_of(other / "model.safetensors")) - {
            "__metadata__"
        }


def test_bytes_against_other_shapes_and_names(six: Path, llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", vocab_size=54, num_hidden_layers=1, dtypes={"model.norm.weight": "F32"})
    report = verify(six, against=other, levels=["bytes"])
    messages = {finding.tensor: finding.message for finding in report.findings}
    assert "[53, 32]" in messages[HEAD]
    assert "[54, 32]" in messages[HEAD]
    assert "F32" in messages["model.norm.weight"]
    assert "absent" in messages["model.layers.1.mlp.up_proj.weight"]
    assert "model.layers.0.mlp.up_proj.weight" not in messages
    split(other, tmp_path / "shards", 2)
    more = verify(tmp_path / "shards", against=llama, levels=["bytes"])
    assert "model.layers.1.mlp.up_proj.weight" in {finding.tensor for finding in more.findings}


# --- the manifest ----------------------------------------------------------------------------------------------------


def test_edited_manifest(shards: Path, six: Path, tmp_path: Path) -> None:
    text = (six / "tpshard.json").read_text()
    manifest = json.loads(text)
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
        "tp_size": lambda m: m.update(tp_size=5),
        "content": lambda m: m.update(content="0" * 64),
        "layout": lambda m: m.update(layout="0" * 64),
        "a digest of the source": lambda m: m["source"].update(digests="0" * 32 + m["source"]["digests"][32:]),
        "another algorithm": lambda m: m.update(algorithm="crc32"),
        "a segment": lambda m: m["dims"][0].update(segments=["whole*53"]),
        "a file less": lambda m: m["files"].pop(),
        "a rank twice": lambda m: m["files"][1].update(rank=0),
        "no source": lambda m: m.pop("source"),
        "a size": lambda m: m["files"][0].update(size=1),
    }
    for edit in edits.values():
        changed = json.loads(text)
        edit(changed)
        assert changed != manifest
        (shards / "tpshard.json").write_text(json.dumps(changed))
        refused(4, "verify", shards, says=("tpshard.json",))
        refused(4, "merge", shards, tmp_path / "out", says=("tpshard.json",))
    for raw in (b"", b"{}", b"[]", b"null", b"\xff\xfe", text.encode()[:-100], b'{"format": "tpshard"'):
        (shards / "tpshard.json").write_bytes(raw)
        refused(4, "verify", shards, says=("tpshard.json",))
    (shards / "tpshard.json").write_text(json.dumps({**manifest, "version": 2}))
    refused(3, "verify", shards, says=("version 2", "newer"))
    (shards / "tpshard.json").unlink()
    refused(4, "verify", shards, says=("tpshard.json",))


def test_a_digest_of_a_rank_file_that_was_edited(shards: Path) -> None:
    promise(shards, SIX[3], 0, "0" * 32)
    name = next(key for key in header_of(shards / SIX[3]) if key != "__metadata__")
    found("digest", shards, file=SIX[3], tensor=name)


# --- calls that make no sense ----------------------------------------------------------------------------------------


def test_levels_and_what_they_need(six: Path, llama: Path, tmp_path: Path) -> None:
    refused(2, "verify", six, "--level", "bytes", says=("--against",))
    refused(2, "verify", six, "--level", "everything", says=("everything", "structure"))
    refused(2, "verify", llama, says=("tpshard.json", "split"))
    refused(2, "verify", tmp_path / "nowhere", says=("nowhere",))
    refused(2, "verify", six / SIX[0], says=(SIX[0],))
    refused(2, "verify")
    refused(2, "verify", six, llama, six)
    refused(2, "verify", six, "--against", tmp_path / "nowhere")
    with pytest.raises(UsageError):
        verify(six, levels=["bytes"])
    (tmp_path / "source").mkdir()
    shutil.copy(llama / "model.safetensors", tmp_path / "source")
    with pytest.raises(DamagedError):
        verify(six, against=tmp_path / "source")


def test_shards_without_digests(llama: Path, tmp_path: Path) -> None:
    ok("split", llama, tmp_path / "out", "--tp", 2, "--digest", "none")
    report = verify(tmp_path / "out")
    assert (report.passed, report.levels) == (True, ["structure"])
    assert [(v.level, v.verdict) for v in report.verdicts] == [("structure", "passed"), ("digest", "not_run")]
    assert "without digests" in report.verdicts[1].notes[0]
    assert not verify(tmp_path / "out", levels=["digest"]).passed
    done = ok("verify", tmp_path / "out")
    assert "passed (structure, plan)" in done.out
    assert "digest    not run" in done.out
    assert tpshard("verify", tmp_path / "out", "--level", "digest").status == 1
    (tmp_path / "out" / "config.json").write_text((llama / "config.json").read_text().replace("1e-05", "2e-05"))
    found("digest", tmp_path / "out", file="config.json")
    shutil.copy(llama / "config.json", tmp_path / "out")
    file = tmp_path / "out" / "model-tp-01-of-02.safetensors"
    poke(file, place(file, Q)[0])
    assert verify(tmp_path / "out").passed  # nothing was promised
    found("bytes", tmp_path / "out", "--against", llama, file=file.name, tensor=Q)


def test_a_source_that_was_merged_serves_as_well(six: Path, tmp_path: Path) -> None:
    merge(six, tmp_path / "merged", repack_bytes=5000)
    assert verify(six, against=tmp_path / "merged").passed
