"""Files that aren't weights arrive as they were, as ordinary files, and nowhere else."""

from __future__ import annotations

import os

import pytest

from tpshard.errors import DamagedError, StorageError, UsageError
from tpshard.filecopy import copy_side_file


def test_a_side_file_becomes_an_ordinary_file(tmp_path):
    data = os.urandom(3_000_001)
    (tmp_path / "blob").write_bytes(data)
    (tmp_path / "blob").chmod(0o400)
    (tmp_path / "tokenizer.json").symlink_to("blob")
    out = tmp_path / "out"
    out.mkdir()
    old = os.umask(0o022)
    try:
        assert copy_side_file(tmp_path / "tokenizer.json", out / "sub" / "t.json", inside=out) == len(data)
    finally:
        os.umask(old)
    made = out / "sub" / "t.json"
    assert made.read_bytes() == data
    assert not made.is_symlink()
    assert made.stat().st_mode & 0o777 == 0o644


def test_a_side_file_stays_inside(tmp_path):
    (tmp_path / "f").write_text("x")
    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"'\.\.'"):
        copy_side_file(tmp_path / "f", out / ".." / "g")
    for name in (out / "link" / "g", tmp_path / "g", out):
        with pytest.raises(UsageError, match="lies outside"):
            copy_side_file(tmp_path / "f", name, inside=out)
    assert not (tmp_path / "g").exists()


def test_side_files_that_cannot_be_copied(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DamagedError, match="isn't an ordinary file"):
        copy_side_file(tmp_path / "pipe", tmp_path / "x")
    with pytest.raises(StorageError, match="none"):
        copy_side_file(tmp_path / "none", tmp_path / "x")
    (tmp_path / "f").write_text("x")
    (tmp_path / "taken").write_text("y")
    with pytest.raises(StorageError, match="taken: creating it failed: File exists"):
        copy_side_file(tmp_path / "f", tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "y"


def test_a_side_file_that_changes_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    real, grown = os.read, []

    def read(fd, count):
        data = real(fd, count)
        if not grown:
            grown.append(True)
            with path.open("ab") as file:
                file.write(b"more")
        return data

    monkeypatch.setattr(os, "read", read)
    with pytest.raises(DamagedError, match="f: had 100 bytes, 104 were copied and it has 104 now"):
        copy_side_file(path, tmp_path / "g")
