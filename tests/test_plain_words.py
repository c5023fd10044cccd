"""What the command line says: to whom, in which numbers, and never in a way that a terminal would obey."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ELSEWHERE, ok, process, refused, tpshard
from hypothesis import given
from hypothesis import strategies as st
from weights import Tensor, write, write_llama

from tpshard import split
from tpshard.cliparts import printable
from tpshard.counting import counted
from tpshard.errors import short


@pytest.fixture(scope="module")
def two(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two") / "shards"
    split(llama, out, 2)
    return out


# --- standard streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, llama: Path, two: Path, tmp_path: Path) -> None:
    program = f"{sys.executable} -m tpshard"
    for number, (words, status) in enumerate(
        (
            (f"inspect {llama}", 0), (f"split {llama} {tmp_path}/NEW --tp 2", 0), (f"verify {two}", 0),
            (f"merge {two} {tmp_path}/NEW", 0), ("reshard 4-", 2), (f"inspect {tmp_path}/no/such/thing", 2), ("", 2),
        )
    ):  # fmt: skip
        script = f"{program} {words.replace('NEW', str(number))} {closed}"
        done = subprocess.run(["sh", "-c", script], **ELSEWHERE, capture_output=True, timeout=60)
        loses_its_report = status == 0 and re.search(r"(^| )>&-", closed)
        assert done.returncode == (5 if loses_its_report else status), (script, done)
        assert "Traceback" not in done.stderr
        if loses_its_report and "2>&-" not in closed:
            assert done.stderr.startswith("error: stdout")
    written = {path.name for path in (tmp_path / "1").iterdir()}
    assert {"tpshard.json", "model-tp-00-of-02.safetensors"} <= written
    assert ok("verify", tmp_path / "1", "--against", llama)


def test_without_words_the_usage_is_told_once() -> None:
    done = process()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("Usage:") == 1
    assert "error" not in done.stderr
    assert all(command in done.stderr for command in ("split", "reshard", "merge", "verify"))


# --- names -----------------------------------------------------------------------------------------------------------


@given(text=st.text(max_size=30))
def test_nothing_that_a_terminal_would_obey_is_printed(text: str) -> None:
    shown = printable(text)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    if text.isprintable():
        assert shown == text


@given(name=st.text(max_size=2000))
def test_names_are_shortened_only_when_long(name: str) -> None:
    assert short(name) == name if len(name) <= 200 else len(short(name)) < 220
    if len(name) > 200:
        assert short(name).startswith(name[:120])
        assert f"({len(name):,} characters)" in short(name)


@pytest.mark.parametrize("name", ["x\x1b[2J\x1b]0;owned\x07", "x\x9b31m", "x\r\x08\x7f", "x\u202e", "x" * 50_000])
def test_hostile_tensor_names_reach_no_terminal(name: str, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model")
    config = source / "config.json"
    text = config.read_text()
    shutil.rmtree(source)
    source.mkdir()
    config.write_text(text)
    write(source / "model.safetensors", {name: Tensor("F32", (1,), bytes(4))})
    done = tpshard("split", source, tmp_path / "out", "--tp", 2)
    assert done.status in (3, 4)
    assert printable(done.err) == done.err
    assert len(done.err) < 1500
    config.write_text(text.replace('"llama"', '"lla\\u001b[2Jma"'))
    assert "\x1b" not in tpshard("inspect", source).err


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_one_is_singular_and_thousands_are_set_off() -> None:
    assert [counted(n, "file") for n in (0, 1, 2, 1234567)] == ["0 files", "1 file", "2 files", "1,234,567 files"]
    assert counted(["x"], "tensor") == "1 tensor"


def test_reports_count_rightly(llama: Path, two: Path, tmp_path: Path) -> None:
    done = ok("split", llama, tmp_path / "one", "--tp", 1)
    text = done.out + ok("inspect", tmp_path / "one").out + ok("verify", tmp_path / "one").out
    text += ok("reshard", two, tmp_path / "less", "--tp", 1).out + ok("merge", tmp_path / "one", tmp_path / "back").out
    text += ok("inspect", llama).out
    assert not re.search(r"\b1 (ranks|files|tensors|other files)\b", text), text
    assert "to 1 rank:" in text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1-1000000000", ("at most 4,096", "1,000,000,000")), ("1-4097", ("at most 4,096", "4,097")),
        ("1-4096,7", ("at most 4,096",)), ("4-2", ("2-4",)), ("x", ("2,4,8",)),
    ],
)  # fmt: skip
def test_degrees_are_refused_for_what_is_wrong_with_them(value: str, said: tuple[str, ...], llama: Path) -> None:
    refused(2, "plan", llama, "--tp", value, says=said)


@pytest.mark.parametrize("zero", ["0", "0.4", "0GB"])
def test_files_of_no_bytes_are_refused(zero: str, llama: Path, two: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for words in (("split", llama, out, "--tp", 2), ("reshard", two, out, "--tp", 3), ("merge", two, out)):
        refused(2, *words, "--max-file-size", zero, says=("0 bytes",))
    assert not out.exists()


# --- what is missing or no file --------------------------------------------------------------------------------------


def test_ranks_without_their_manifest(llama: Path, two: Path, tmp_path: Path) -> None:
    for parts in ((), ("--max-file-size", "20kB")):
        shards = tmp_path / f"shards{len(parts)}"
        ok("split", llama, shards, "--tp", 2, *parts)
        (shards / "tpshard.json").unlink()
        for words in (
            ("verify", shards), ("merge", shards, tmp_path / "out"), ("reshard", shards, tmp_path / "out", "--tp", 3),
            ("inspect", shards), ("plan", shards, "--tp", 2), ("split", shards, tmp_path / "out", "--tp", 2),
        ):  # fmt: skip
            reason = refused(4, *words, says=("no tpshard.json", "split again", "Copy" if "ins" in words[0] else ""))
            assert "has not been split" not in reason


def test_partial_directories_say_what_to_do_again(llama: Path, tmp_path: Path) -> None:
    rank, whole = "model-tp-00-of-02.safetensors", "model.safetensors"
    for name, again in ((rank, "split (or reshard) again"), (whole, "merge again")):
        partial = tmp_path / f"{again[:2]}.tpshard-partial"
        shutil.copytree(llama, partial)
        os.rename(partial / whole, partial / name)
        refused(2, "verify", partial, says=(again,))
        os.rename(partial, tmp_path / again[:2])  # also under another name, by the mark inside
        (tmp_path / again[:2] / ".tpshard-partial").touch()
        refused(2, "merge", tmp_path / again[:2], tmp_path / "out", says=(again,))


def test_problems_of_a_rank_file_name_its_directory_and_one_remedy(two: Path, tmp_path: Path) -> None:
    def cut(path: Path) -> None:
        os.truncate(path, path.stat().st_size - 5)

    def spoil(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(b"\xff" * 8)

    for number, harm in enumerate((cut, spoil, Path.unlink, lambda path: os.truncate(path, 3))):
        shards = tmp_path / str(number)
        shutil.copytree(two, shards)
        harm(shards / "model-tp-01-of-02.safetensors")
        for words in (("merge", shards, tmp_path / "out"), ("reshard", shards, tmp_path / "out", "--tp", 1)):
            reason = refused(4, *words, says=(shards / "model-tp-01-of-02.safetensors",))
            assert len(re.findall(r"\b(?:copy|download or copy)\b", reason, re.IGNORECASE)) == 1, reason
            assert ".;" not in reason


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "link to a device"])
def test_small_files_that_are_no_files_are_refused_at_once(kind: str, llama3: Path, two: Path, tmp_path: Path) -> None:
    def put(path: Path) -> None:
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "link to a device":
            path.symlink_to("/dev/zero")
        else:
            try:
                os.mknod(path, 0o020666, os.makedev(1, 5))
            except PermissionError:
                pytest.skip("making a device needs root")

    source, shards = tmp_path / "source", tmp_path / "shards"
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copytree(llama3, source)
        put(source / name)
        reason = refused(4, "split", source, tmp_path / "out", "--tp", 2, says=(name, "not a regular file"))
        assert "missing" not in reason
        assert "no such file" not in reason
        shutil.rmtree(source)
    shutil.copytree(two, shards)
    put(shards / "tpshard.json")
    for words in (("verify", shards), ("merge", shards, tmp_path / "out"), ("inspect", shards)):
        refused(4, *words, says=("tpshard.json", "not a regular file"))


def test_weights_that_are_links_to_devices_are_called_so(llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").symlink_to("/dev/null")
    reason = refused(4, "inspect", source, says=("model.safetensors", "link to /dev/null", "a device"))
    assert "missing" not in reason
    assert "no weights" not in reason
