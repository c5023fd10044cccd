"""The command line: exit statuses, JSON, words and their order, and what happens when things are cut short."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from commands import ELSEWHERE, ok, process, refused, started, tpshard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights import tree, write_llama

from tpshard import cli, cliparts, split


@pytest.fixture(scope="module")
def four(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("four") / "shards"
    split(llama, out, 4)
    return out


# --- exit statuses and reports ---------------------------------------------------------------------------------------


def test_every_exit_status(llama: Path, four: Path, tmp_path: Path) -> None:
    def status(*words: object) -> int:
        done = process(*words)
        assert "Traceback" not in done.stderr
        assert bool(done.stderr) is (done.returncode > 1 or "unequal" in done.stderr)
        return done.returncode

    unknown = write_llama(tmp_path / "unknown", model_type="never-heard-of")
    broken = write_llama(tmp_path / "broken")
    os.truncate(broken / "model.safetensors", 1000)
    other = write_llama(tmp_path / "other", seed=3)
    assert status("inspect", llama) == 0
    assert status("verify", four, "--against", other) == 1
    assert status("split", llama, tmp_path / "out", "--tp", "0") == 2
    assert status("split", llama) == 2
    assert status("inspect", unknown) == 3
    assert status("split", llama, tmp_path / "out", "--tp", "9") == 3
    assert status("plan", llama, "--tp", "9,10") == 3
    assert status("split", broken, tmp_path / "out", "--tp", "2") == 4
    assert status("split", llama, tmp_path / "no" / "where", "--tp", "2") == 5
    assert not (tmp_path / "out").exists()


def test_json_of_every_command(llama: Path, four: Path, tmp_path: Path) -> None:
    steps: dict[str, tuple[object, ...]] = {
        "inspect": (llama,),
        "plan": (four, "--tp", "1-9"),
        "split": (llama, tmp_path / "three", "--tp", 3),
        "reshard": (four, tmp_path / "two", "--tp", 2),
        "merge": (four, tmp_path / "merged"),
        "verify": (four, "--against", llama),
        "list": ("families",),
        "demo": (),
    }
    for verb, words in steps.items():
        done = process(verb, *words, "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["schema"] == f"tpshard.{verb}/1"
        assert report["verb"] == verb
    report = json.loads(tpshard("plan", four, "--tp", "1-9", "--json").out)
    assert [degree["possible"] for degree in report["degrees"]] == [True] * 8 + [False]


def test_text_of_every_command_says_the_numbers(llama: Path, four: Path, tmp_path: Path) -> None:
    text = ok("inspect", llama).out
    for words in ("llama", "21 tensors", "BF16", "8 query heads over 4 kv heads", "53 vocabulary rows",
                  "44 feed-forward channels", "any from 1 to 8", "equal ranks at 1, 2, 4"):  # fmt: skip
        assert words in text
    assert "shards on 4 ranks" in ok("inspect", four).out
    text = ok("plan", llama, "--tp", "3,8").out
    assert "ffn: 14 to 15 feed-forward channels a rank (44 feed-forward channels)" in text
    assert "heads: 2 to 4 query heads a rank (8 query heads over 4 kv heads)" in text
    assert "heads: 1 to 2 kv heads a rank" in text
    assert "1 padded vocabulary row" in text
    assert "3 padded vocabulary rows" in text
    text = ok("split", llama, tmp_path / "out", "--tp", 8).out
    assert "to 8 ranks: wrote" in text
    assert "3 padded vocabulary rows" in text
    assert "1 other file" not in ok("split", llama, tmp_path / "again", "--tp", 1).out
    text = ok("merge", four, tmp_path / "merged").out
    assert "byte for byte" in text
    assert "llama" in ok("list", "families").out
    assert "smollm3" in ok("list", "families").out
    assert ok("list", "engines").out
    for command in cli.cli.commands:
        assert ok(command, "--help").out.startswith("Usage: tpshard " + command)
    assert "tpshard" in ok("--version").out


def test_demo_keeps_its_files_where_told(tmp_path: Path) -> None:
    done = ok("demo", "--keep", tmp_path / "kept")
    assert done.out.count("ok ") == 3
    assert "BAD" not in done.out
    assert tree(tmp_path / "kept" / "model") == tree(tmp_path / "kept" / "merged")
    before = tree(tmp_path)
    refused(2, "demo", "--keep", tmp_path / "kept")
    assert tree(tmp_path) == before


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["x", "", "2.5", "1e3", "8->4", "0x2", "--even", "٣x"])
def test_degrees_that_are_no_number(value: str, llama: Path, tmp_path: Path) -> None:
    refused(2, "split", llama, tmp_path / "out", "--tp", value)
    refused(2, "plan", llama, "--tp", value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("value", "status"), [("0", 2), ("-1", 2), ("9", 3), ("1000000000", 3), ("9" * 30, 3)])
def test_degrees_out_of_range(value: str, status: int, llama: Path, four: Path, tmp_path: Path) -> None:
    refused(status, "split", llama, tmp_path / "out", "--tp", value, says=(value,))
    refused(status, "reshard", four, tmp_path / "out", "--tp", value, says=(value,))
    assert not list(tmp_path.iterdir())


def test_degrees_of_plan(llama: Path) -> None:
    for value, status in (("0", 2), ("-1", 2), ("4-2", 2), ("1-99999", 2), (",", 2), ("9", 3), ("1000000000", 3)):
        assert tpshard("plan", llama, "--tp", value).status == status, value
    done = ok("plan", llama, "--tp", " 2, 4-5 ,8", "--json")
    assert [degree["tp_size"] for degree in json.loads(done.out)["degrees"]] == [2, 4, 5, 8]


@pytest.mark.parametrize(
    ("text", "size"), [("500", 500), ("1kB", 1000), ("64MiB", 64 << 20), ("1.5 gb", 1_500_000_000), ("2T", 2 * 10**12)]
)
def test_sizes(text: str, size: int) -> None:
    assert cliparts.size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.", "1XB", "B", "1e6", "1 000", "∞", "9" * 400])
def test_sizes_that_are_none(text: str, llama: Path, tmp_path: Path) -> None:
    refused(2, "split", llama, tmp_path / "out", "--tp", 2, "--max-file-size", text, says=("500MB",))


def test_reshard_by_arrow(four: Path, tmp_path: Path) -> None:
    ok("reshard", four, tmp_path / "direct", "--tp", 3)
    for number, words in enumerate((("4->3", four), (four, "4 -> 3"), ("4→3", four))):
        ok("reshard", *words, tmp_path / str(number))
        assert tree(tmp_path / str(number)) == tree(tmp_path / "direct")
    out = tmp_path / "out"
    refused(2, "reshard", "8->3", four, out, says=("4 ranks", "8"))
    refused(2, "reshard", "4->3", four, out, "--tp", 2, says=("twice",))
    refused(2, "reshard", "4->3", "4->2", four, out, says=("once",))
    refused(2, "reshard", four, out, says=("--tp",))
    refused(2, "reshard", "4->3", four)
    refused(2, "reshard")
    refused(2, "reshard", "4->0", four, out)
    assert not out.exists()


def test_arrow_without_quotes_is_explained(four: Path, tmp_path: Path) -> None:
    script = tmp_path / "tpshard"
    script.write_text(f"#!{sys.executable}\nfrom tpshard.cli import main\nmain()\n")
    script.chmod(0o755)
    environment = {**ELSEWHERE["env"], "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", f"tpshard reshard 4->3 {four} out"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "a file named 3" in done.stderr
    assert "Quote it: tpshard reshard '4->3' SRC OUT" in done.stderr
    assert (tmp_path / "3").read_bytes() == b""
    assert not (tmp_path / "out").exists()
    refused(2, "reshard", "4-", four, tmp_path / "out", says=("Quote it",))


NAMES = ["with space", "modèle 模型", "-dash", "quote'\"", "new\nline", "%s {0}", "~tilde"]
NAMES.append(os.fsdecode(b"not\xff utf"))


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_paths_of_every_kind(name: str, llama: Path, tmp_path: Path) -> None:
    source, out, merged = tmp_path / "in" / name, tmp_path / f"out{name}", tmp_path / f"merged{name}"
    source.parent.mkdir()
    source.symlink_to(llama)
    ok("split", source, out, "--tp", 3)
    ok("merge", out, merged)
    ok("verify", out, "--against", source)
    assert json.loads(ok("inspect", out, "--json").out)["path"] == str(out)
    assert tree(merged) == tree(llama)
    if not name.isascii():  # on terminals that can or cannot show the name
        for encoding in ("utf-8", "ascii", "latin-1"):
            environment = {**ELSEWHERE["env"], "PYTHONIOENCODING": encoding}
            done = process("inspect", out, env=environment, text=False)
            assert (done.returncode, done.stderr) == (0, b"")
            assert b"shards on 3 ranks" in done.stdout


FLAGS = [
    "--tp", "--json", "--even", "--dry-run", "--overwrite", "--help", "--level", "--against", "--threads",
    "--max-memory", "--max-file-size", "--digest", "--copy-unknown", "--fsync",
]  # fmt: skip
WORDS = [
    "none", "4->2", "4-", "2", "-1", "0", "99999999999999999999", "1kB", "digest", "families", "nowhere", "SRC",
    "SHARDS", "OUT", ".", "/", "..", "--", "-", "a/b@c",
]  # fmt: skip
WORDS += ["", "/dev/null", "/dev/zero", "/proc/self/mem", "x" * 5000, "\udcff"]
FRAGMENTS = st.sampled_from([*cli.cli.commands, *FLAGS, *WORDS]) | st.text(max_size=6).filter(lambda t: "\0" not in t)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(FRAGMENTS, max_size=7))
def test_no_words_lead_to_a_traceback(
    words: list[str], llama: Path, four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--help" not in words:
        words = [word for word in words if word not in ("demo", "selftest")]  # they work, and take their time
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPSHARD_TRACEBACK", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    places = {"SRC": llama, "SHARDS": four, "OUT": tmp_path / "out"}
    done = tpshard(*(places.get(word, word) for word in words))
    assert done.status in (0, 1, 2, 3, 4, 5), done
    assert "Traceback" not in done.err
    assert done.status in (0, 1) or "error: " in done.err or not set(words) - {"--"}


# --- standard streams ------------------------------------------------------------------------------------------------


def test_reader_of_stdout_that_has_gone(llama: Path, four: Path) -> None:
    other = f"{sys.executable} -c 'from tpshard.cli import main; main()'"
    for words, status in ((f"plan {llama} --tp 1-8", 0), (f"verify {four}", 0), (f"verify {four} --level bytes", 2)):
        script = f"({other} {words}; echo status $? >&2) | true"
        done = subprocess.run(["sh", "-c", script], **ELSEWHERE, capture_output=True)
        assert f"status {status}" in done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
        assert "Broken" not in done.stderr


def test_failing_verification_is_told_even_to_a_closed_pipe(four: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=9)
    reading, writing = os.pipe()
    os.close(reading)
    running = started("verify", four, "--against", other, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert "Exception" not in running.communicate(timeout=60)[1]
    assert running.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_stdout(llama: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = process("plan", llama, "--tp", "2", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 5
    assert done.stderr == "error: stdout: writing the report failed: No space left on device\n"


def test_progress_only_on_a_terminal(large: Path, tmp_path: Path) -> None:
    done = process("split", large, tmp_path / "quiet", "--tp", 2)
    assert (done.returncode, done.stderr) == (0, "")
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    running = started("split", large, tmp_path / "shown", "--tp", 2, stderr=child, stdout=subprocess.PIPE)
    os.close(child)
    shown = b""
    while True:
        try:
            data = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(parent)
    out = running.communicate(timeout=60)[0]
    assert running.returncode == 0
    assert b"100%" in shown
    assert b"B/s" in shown
    assert out.startswith("split ")
    assert "%" not in out


# --- bugs ------------------------------------------------------------------------------------------------------------


def test_a_bug_is_called_one(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*words: object, **more: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("tpshard.survey.inspect", broken)
    done = tpshard("inspect", llama)
    assert done.status == 70
    assert "bug in tpshard (ZeroDivisionError: of all things)" in done.err
    monkeypatch.setenv("TPSHARD_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        tpshard("inspect", llama)
