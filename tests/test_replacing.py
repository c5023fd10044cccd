"""``--overwrite`` loses nothing that the new output does not replace; outputs that cannot be are told rightly."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ok, process, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cut_short import as_nobody
from weights import tree

from tpshard import split
from tpshard.errors import UsageError
from tpshard.outputplace import check_output


@pytest.fixture(scope="module")
def two(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two") / "shards"
    split(llama, out, 2)
    return out


def test_what_tpshard_did_not_make_is_never_deleted(llama: Path, two: Path, tmp_path: Path) -> None:
    for number, foreign in enumerate(("thesis.tex", "deep/er/notes", ".git/HEAD", "model.safetensors.bak")):
        out = tmp_path / str(number)
        (out / foreign).parent.mkdir(parents=True)
        (out / foreign).write_text("years of work")
        shutil.copy(llama / "config.json", out)
        for words in (("split", llama, out, "--tp", 2), ("reshard", two, out, "--tp", 3), ("merge", two, out)):
            for more in ((), ("--dry-run",)):
                reason = refused(2, *words, "--overwrite", *more, says=(foreign, "would be lost"))
                assert "--overwrite" not in reason
        assert sorted(tree(out)) == sorted([foreign, "config.json"])


def test_links_and_special_files_are_files_that_would_be_lost(llama: Path, two: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for make in (lambda path: path.symlink_to(tmp_path / "elsewhere"), lambda path: os.mkfifo(path)):
        out = tmp_path / "out"
        out.mkdir()
        make(out / "precious")
        refused(2, "merge", two, out, "--overwrite", says=("precious",))
        assert os.path.lexists(out / "precious")
        (out / "precious").unlink()
        out.rmdir()


def test_outputs_of_tpshard_and_what_is_replaced_anyway(llama: Path, two: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ok("merge", two, out)
    ok("merge", two, out, "--overwrite")  # every file of it is written anew
    assert tree(out) == tree(llama)
    (out / "sub").mkdir()
    ok("merge", two, out, "--overwrite")  # an empty directory holds nothing that could be lost
    refused(2, "split", llama, out, "--tp", 2, "--overwrite", says=("model.safetensors", "would be lost"))
    shutil.rmtree(out)
    ok("split", llama, out, "--tp", 3)
    ok("split", llama, out, "--tp", 2, "--overwrite")
    ok("merge", two, out, "--overwrite")
    assert tree(out) == tree(llama)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(held=st.sets(st.sampled_from(["a", "b/c", "b/d", "e"])), written=st.sets(st.sampled_from(["a", "b/c", "b/d"])))
def test_a_directory_is_replaced_only_if_each_file_is_written_again(
    held: set[str], written: set[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for name in held:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).touch()
    if held <= written:
        check_output(out, overwrite=True, needed_bytes=0, written=written)
    else:
        with pytest.raises(UsageError) as caught:
            check_output(out, overwrite=True, needed_bytes=0, written=written)
        assert any(name in str(caught.value) for name in held - written)


@pytest.fixture
def anyones() -> Iterator[Path]:
    """A directory in which anyone may write; not below pytest's, which another run of pytest closes to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("mode", [0o555, 0o500, 0o700])
def test_an_old_output_without_write_permission_is_replaced(mode: int, llama: Path, anyones: Path) -> None:
    folder = anyones
    shutil.copytree(llama, folder / "source")
    (folder / "source" / "sub").mkdir()
    (folder / "source" / "sub" / "extra.json").write_text("{}")
    for tp_size in (2, 3):
        done = as_nobody("split", folder / "source", folder / "out", "--tp", tp_size, "--overwrite", folder=folder)
        assert done.returncode == 0, done
        assert "could not" not in done.stderr
        assert sorted(os.listdir(folder)) == ["out", "source"]
        (folder / "out" / "sub").chmod(mode)
        (folder / "out").chmod(mode)
    assert "model-tp-00-of-03.safetensors" in tree(folder / "out")


def test_outputs_that_cannot_be(llama: Path, two: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for more in ((), ("--overwrite",), ("--dry-run",)):
        refused(2, "split", llama, "/", "--tp", 2, *more, says=("root directory",))
        refused(2, "merge", two, "/", *more, says=("root directory",))
        for out in (tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out"):
            assert "mkdir" not in refused(5, "split", llama, out, "--tp", 2, *more, says=("file is a file",))
    refused(5, "split", llama, tmp_path / "a b" / "out", "--tp", 2, says=(f"mkdir -p '{tmp_path}/a b'",))


def test_demo_gives_advice_that_it_takes(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").touch()
    assert "--overwrite" not in refused(2, "demo", "--keep", tmp_path / "kept", says=("kept", "--keep"))


def test_a_current_directory_that_was_removed(llama: Path, two: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"

    def leave() -> None:
        here.mkdir()
        os.chdir(here)
        here.rmdir()

    for words in (("split", llama, "out", "--tp", 2), ("merge", "in", tmp_path / "out"), ("inspect", "in"),
                  ("inspect", "."), ("verify", "in"), ("demo", "--keep", "kept")):  # fmt: skip
        done = process(*words, preexec_fn=leave)
        assert done.returncode == 5, done
        assert "the current directory has been removed" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    for more in ((), ("--overwrite",)):  # nothing here depends on it
        assert process("split", llama, tmp_path / "out", "--tp", 2, *more, preexec_fn=leave).returncode == 0
